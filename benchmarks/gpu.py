"""Runs all tests and benchmarks that need a GPU, each part in a process of its own; `make gpu` calls it.

Parts run in the order of information per minute: correct values, then the layer, casts, decoding, training,
loss curves, the rates of estimates, products of libraries. If a part fails, or is stopped at its limit, the
others still run. All parts append to ``gpu.jsonl``, a row when it is measured, and to ``gpu.log``, both in
``$OUT`` or ``benchmarks/results``. At the end a summary lists right, wrong and missing results, and measured
times beside their estimates.

It needs a checkout, PyTorch, Triton, transformers and pytest, but no installed mxcompile, no network and no
git. Without a GPU every part reports so. Usage: python benchmarks/gpu.py [--minutes 8] [--compile h100] [PART
…]
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
BENCHMARKS = ROOT / "benchmarks"
NO_DEVICE = "no CUDA or ROCm device"
ROWS = "gpu"
"""Name of the files of rows and of the log, which all parts share so that there are few files to copy."""

RIGHT, WRONG, FAILED, STOPPED, NOT_REACHED = "right", "wrong", "failed", "stopped", "not reached"
_LEAST_S = 10.0
"""Least remaining time with which a part starts."""

_GRACE_S = 5.0
"""Time between SIGTERM and SIGKILL at the end of a part."""

_WORKERS, _LONG_S = 6, 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Part:
    """A part. command: arguments of Python. seconds: time limit. rows: name of its result file, or ""."""

    name: str
    command: tuple[str, ...]
    seconds: float
    rows: str = ""


def _script(name: str, seconds: float, script: str, *arguments: str) -> Part:
    command = str(BENCHMARKS / f"{script}.py"), *arguments
    return Part(name=name, command=command, seconds=seconds, rows=ROWS)


def _tests() -> Part:
    """Returns the part that runs the GPU tests, kernels first, in parallel if pytest-xdist is installed."""
    folder = ROOT / "tests" / "gpu"
    order = ("kernels", "products", "models", "decode", "experts", "autotuning")
    files = [str(folder / f"test_gpu_{name}.py") for name in order]
    workers = min(_WORKERS, (os.cpu_count() or 1) // 2)
    parallel = ["-n", str(workers)] if workers > 1 and importlib.util.find_spec("xdist") else []
    command = "-m", "pytest", "-v", "-rs", "-p", "no:cacheprovider", *parallel, *files
    return Part(name="tests", command=command, seconds=200)


PARTS = (
    _tests(),
    _script("layer", 180, "gpu_layer"),
    _script("casts", 100, "gpu_kernels", "--part", "casts"),
    _script("decode", 180, "gpu_kernels", "--part", "decode"),
    _script("training", 180, "gpu_training"),
    _script("curves", 180, "gpu_curves"),
    _script("rates", 60, "gpu_rates"),
    _script("gemms", 240, "gpu_gemms"),
)


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The end of a part. rows: rows it wrote. counts: number of tests by result. why: cause of a failure."""

    part: str
    word: str
    seconds: float = 0.0
    rows: Sequence[dict[str, Any]] = ()
    counts: dict[str, int] = field(default_factory=dict)
    why: str = ""

    @property
    def wrong(self) -> list[str]:
        """A text for each row that reports an error."""
        named = (" ".join(str(row.get(key, "")) for key in ("kernel", "shape", "wrong")) for row in self.rows)
        return [words for row, words in zip(self.rows, named, strict=True) if "wrong" in row]

    def summary(self) -> dict[str, Any]:
        """Returns the line of the part in the final table."""
        failed = self.counts.get("FAILED", 0) + self.counts.get("ERROR", 0)
        return {
            "part": self.part,
            "outcome": f"{self.word}: {self.why}" if self.why else self.word,
            "seconds": f"{self.seconds:.0f}",
            "right": len(self.rows) - len(self.wrong) + self.counts.get("PASSED", 0),
            "wrong": len(self.wrong) + failed,
            "skipped": self.counts.get("SKIPPED", 0),
        }


def folder() -> Path:
    """Returns the folder for rows and logs."""
    path = Path(os.environ.get("OUT") or BENCHMARKS / "results")
    path.mkdir(parents=True, exist_ok=True)
    return path


def log_file() -> Path:
    """Returns the path of the log with the output of all parts."""
    return folder() / f"{ROWS}.log"


def environment() -> dict[str, str]:
    """Returns the environment of a part: the checkout on its path, no network, unbuffered output."""
    paths = [str(ROOT), str(ROOT / "tests"), str(ROOT / "examples"), os.environ.get("PYTHONPATH", "")]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "PYTHONUNBUFFERED": "1",
        "HF_HUB_OFFLINE": "1",
        "OUT": str(folder()),
    }


def run(part: Part, limit_s: float, more: Sequence[str] = ()) -> Outcome:
    """Runs `part` for at most `limit_s` seconds. more: further arguments, which only scripts get."""
    command = [sys.executable, *part.command, *(more if part.rows else ())]
    start, before = time.monotonic(), _lines(part)
    with log_file().open("ab") as output:
        output.write(f"\n== {part.name}: {shlex.join(command)}\n".encode())
        output.flush()
        begin = output.tell()
        process = subprocess.Popen(
            command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            _end(process)
    text = log_file().read_bytes()[begin:].decode(errors="replace")
    rows = [*_rows(_lines(part)[len(before) :])]
    outcome = Outcome(part=part.name, word="", rows=rows, counts=_counts(text))
    word, why = _word(code, outcome, text)
    seconds = time.monotonic() - start
    return Outcome(part=part.name, word=word, seconds=seconds, rows=rows, counts=outcome.counts, why=why)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ends the process of a part and its children, such as workers of compilers and of pytest."""
    for sign in (signal.SIGTERM, signal.SIGKILL):
        try:
            os.killpg(process.pid, sign)
        except ProcessLookupError:
            break
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            continue


def _lines(part: Part) -> list[str]:
    """Returns the lines of the part's file of rows. Ends an incomplete last line with a newline."""
    path = folder() / f"{part.rows}.jsonl"
    text = path.read_text(encoding="utf-8") if part.rows and path.exists() else ""
    if text and not text.endswith("\n"):
        with path.open("a", encoding="utf-8") as file:
            file.write("\n")
    return text.splitlines()


def _rows(lines: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Yields the rows in `lines`. Skips incomplete lines."""
    for line in lines:
        try:
            yield json.loads(line)
        except ValueError:
            continue


_TEST = re.compile(r"\b(PASSED|FAILED|ERROR|SKIPPED)\b")


def _counts(text: str) -> dict[str, int]:
    """Returns the number of tests by result in `text`, the log of ``pytest -v``."""
    words = [
        match[1]
        for line in text.splitlines()
        if "::" in line and "%]" in line and (match := _TEST.search(line))
    ]
    return {word: words.count(word) for word in dict.fromkeys(words)}


def _word(code: int | None, outcome: Outcome, text: str) -> tuple[str, str]:
    """Returns the outcome of a part, and its cause if the rows do not give it."""
    if code is None:
        return STOPPED, "at its limit"
    if outcome.wrong or outcome.counts.get("FAILED") or outcome.counts.get("ERROR"):
        return WRONG, ""
    if code:
        last = (text.strip().splitlines() or [""])[-1]
        return FAILED, f"status {code}, {last[:80]}"
    if NO_DEVICE in text and not outcome.rows and not outcome.counts.get("PASSED"):
        return NO_DEVICE, ""
    return RIGHT, ""


def run_all(parts: Sequence[Part], minutes: float | None, more: Sequence[str]) -> list[Outcome]:
    """Runs `parts` in order, as many as fit in `minutes`. Returns their outcomes."""
    start, outcomes = time.monotonic(), []
    for part in parts:
        rest_s = float("inf") if minutes is None else minutes * 60 - (time.monotonic() - start) - _GRACE_S
        if rest_s < _LEAST_S:
            outcomes.append(Outcome(part=part.name, word=NOT_REACHED))
            continue
        outcomes.append(run(part, min(rest_s, part.seconds), more))
        line = outcomes[-1].summary()
        print(f"{line['part']}: {line['outcome']}, {line['right']} right, {line['wrong']} wrong", flush=True)
    return outcomes


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Returns `rows` as text in aligned columns."""
    if not rows:
        return ""
    lines = [list(rows[0]), *([str(cell) for cell in row.values()] for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def beside(outcomes: Sequence[Outcome]) -> list[dict[str, Any]]:
    """Returns measured times and rates with their predictions, without rows of single kernels of a layer."""
    return [
        {
            "part": row["part"],
            "what": f"{row['kernel']} {row['shape']}",
            "measured": row.get("time_us", row.get("rate")),
            "predicted": row.get("predicted_us", row.get("predicted")),
            "range": "–".join(
                f"{end:g}" for end in row.get("predicted_range_us", row.get("predicted_range", []))
            ),
            "÷ baseline": f"{1 / row['ratio']:.3f}" if row.get("ratio") else "",
        }
        for outcome in outcomes
        for row in outcome.rows
        if row["part"] != "kernels" and ("predicted_us" in row or "predicted" in row)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    names = [part.name for part in PARTS]
    parser.add_argument("parts", nargs="*", metavar="PART", help=f"all, or some of {', '.join(names)}")
    parser.add_argument("--minutes", type=float, help="that all parts may take together")
    parser.add_argument("--rates", help="a file of the part `rates`, by which estimates are reckoned")
    parser.add_argument("--compile", metavar="CHIP", help="compile for a chip that is not here; time nothing")
    parser.add_argument("--small", action="store_true", help="few, small sizes: to try the parts")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(names):
        parser.error(f"no part {', '.join(sorted(unknown))}: allowed are {', '.join(names)}")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # an exit also ends the part
    chosen = [part for part in PARTS if part.name in (options.parts or names)]
    if options.compile:  # takes long, and writes to another file
        chosen = [replace(part, seconds=_LONG_S, rows=part.rows and "gpu_predicted") for part in chosen]
    more = ["--small"] if options.small else []
    for name in ("rates", "compile"):
        if value := getattr(options, name):
            more += [f"--{name}", value]
    log_file().unlink(missing_ok=True)
    outcomes = run_all(chosen, options.minutes, more)
    print(f"\nrows and logs are in {folder()}")
    for outcome in outcomes:
        for words in outcome.wrong:
            print(f"wrong in {outcome.part}: {words[:300]}")
    print(f"\n{table(beside(outcomes))}\n\n{table([outcome.summary() for outcome in outcomes])}")
    sys.exit(any(outcome.word in (WRONG, FAILED) for outcome in outcomes))


if __name__ == "__main__":
    main()
