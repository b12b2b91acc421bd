"""Predictions for a GPU, written to a file before any measurement on it.

A GPU benchmark times a `Program`. A `CompiledProgram` can be compiled without the GPU: the work of its
launches, from machine code, goes into ``results/gpu_predicted.jsonl`` with the versions of PyTorch and
Triton, whose code differs. The rates of a chip (`mxcompile.offline.rates`) turn the work into times.
Usage: python benchmarks/gpu_predicted.py --write        tables into the page that shows them
"""

from __future__ import annotations

import argparse
import functools
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import common
import torch
import triton
from tabulate import tabulate

from mxcompile.lowering.targets import of_chip
from mxcompile.offline import CodegenResult, Range, Rates, Work
from mxcompile.offline.estimate import ratio, total

NAME = "gpu_predicted"
Row = dict[str, Any]
Stack = tuple[str, str]
"""Versions of PyTorch (without the build suffix) and Triton."""

LAYER = "layer"
BF16 = "bf16"
CHIPS = ("h100", "h200")
PAGE = common.ROOT / "docs" / "gpu.md"
BEGIN, END = "<!-- predicted: begin -->", "<!-- predicted: end -->"


@dataclass(frozen=True, kw_only=True)
class LaunchWork:
    """The work of one launch. kind: see `Launch.kind`. kernel: name of its kernel."""

    kind: str
    kernel: str
    work: Work


@dataclass(frozen=True, kw_only=True)
class Program(ABC):
    """A program to time. part: part of the benchmarks. kernel, shape: name of the program and its sizes."""

    part: str
    kernel: str
    shape: str

    @abstractmethod
    def measure(self, rates: Rates, repeats: int) -> Iterable[Row]:
        """Returns one or more rows with the time that the GPU of this machine takes."""

    @property
    def about(self) -> Row:
        """The fields that identify the program."""
        return {"part": self.part, "kernel": self.kernel, "shape": self.shape}


@dataclass(frozen=True, kw_only=True)
class CompiledProgram(Program):
    """A program whose time can be predicted from its code.

    beside: work of kernels that run in addition to the generated code, such as the optimizer.
    """

    beside: Work | None = None

    @abstractmethod
    def code(self, target: str) -> CodegenResult:
        """Returns the code of the program for `target`."""

    def compiled(self, chip: str) -> Row:
        """Compiles for `chip`. Returns a row with the work of each launch, problems, spills and registers."""
        result = self.code(chip)
        launches = [(launch.kind, launch.kernel, launch.work) for launch in result.launches if launch.work]
        launches += [("rest", "beside", self.beside)] if self.beside else []
        binaries = [kernel.binary for kernel in result.kernels if kernel.is_template]
        return {
            "target": result.target,
            **self.about,
            "launches": len(launches),
            "problems": list(result.problems),
            "spill_bytes": max((binary.spill_bytes for binary in binaries), default=0),
            "registers": max((binary.registers for binary in binaries), default=0),
            "works": [[kind, kernel, work.as_data()] for kind, kernel, work in launches],
        }

    def works(self, rates: Rates) -> tuple[LaunchWork, ...]:
        """Returns the work of each launch, from the file if it has these versions, else from a compile."""
        row = written().get((installed(), rates.target.name, *self.about.values()))
        return works_of(row or self.compiled(rates.target.name))

    def expected(self, time_us: float, rates: Rates) -> Row:
        """Returns the estimate, its range, and the ratio of the measured time `time_us` to it."""
        works = [work.work for work in self.works(rates)]
        estimate = Range.from_rates(lambda moved: total(works, moved), rates)
        return {
            "predicted_us": round(estimate.centre, 2),
            "predicted_range_us": [round(estimate.low, 2), round(estimate.high, 2)],
            "over_predicted": round(time_us / estimate.centre, 3) if estimate.centre else None,
        }

    def num_bytes(self, rates: Rates) -> float:
        """Returns the least bytes that the launches move."""
        return sum(work.work.num_bytes for work in self.works(rates))


def installed() -> Stack:
    """Returns the installed versions."""
    return _plain(torch.__version__), triton.__version__


def _plain(version: str) -> str:
    return version.partition("+")[0]


def works_of(row: Row) -> tuple[LaunchWork, ...]:
    """Returns the work of each launch in `row`."""
    return tuple(LaunchWork(kind=kind, kernel=name, work=Work(**work)) for kind, name, work in row["works"])


@functools.cache
def written() -> dict[tuple[Any, ...], Row]:
    """Returns the newest row of each program, by (versions, target, part, kernel, shape)."""
    return {
        ((_plain(row["torch"]), row["triton"]), row["target"], row["part"], row["kernel"], row["shape"]): row
        for row in common.read(NAME)
    }


def layers() -> dict[tuple[Stack, str], dict[str, list[Work]]]:
    """Returns the work of a layer under each policy, by (versions, target)."""
    works: dict[tuple[Stack, str], dict[str, list[Work]]] = {}
    for (stack, target, part, policy, _), row in written().items():
        if part == LAYER:
            works.setdefault((stack, target), {})[policy] = [work.work for work in works_of(row)]
    return works


def layer_table() -> Iterator[dict[str, str]]:
    """Yields a row per policy: the step time of a layer ÷ BF16's, by chip and versions."""
    with_bf16 = {key: works for key, works in layers().items() if BF16 in works}
    policies = dict.fromkeys(policy for works in with_bf16.values() for policy in works)
    for policy in policies:
        row = {"policy": f"`{policy}`"}
        for name, key, rates in _columns(with_bf16):
            row[name] = _over(with_bf16[key], policy, rates) if policy in with_bf16[key] else ""
        yield row


def _columns(keys: Iterable[tuple[Stack, str]]) -> Iterator[tuple[str, tuple[Stack, str], Rates]]:
    """Yields (header, key, rates of the chip) for each column, sorted by chip, then by versions."""
    columns = sorted(set(keys))
    for chip in CHIPS:
        rates = Rates.for_target(of_chip(chip))
        for (torch_version, triton_version), target in columns:
            if target == rates.target.name:
                head = f"{chip.upper()}, torch {torch_version}, Triton {triton_version}"
                yield head, ((torch_version, triton_version), target), rates


def _over(works: dict[str, list[Work]], policy: str, rates: Rates) -> str:
    if policy != BF16:
        return ratio(works[policy], works[BF16], rates).text(".2f")
    return f"{_time(works[BF16], rates)} µs"


def _time(works: Sequence[Work], rates: Rates) -> str:
    estimate = Range.from_rates(lambda moved: total(works, moved), rates)
    return estimate.text(",.0f" if estimate.centre >= 100 else ".1f")


def other_table() -> Iterator[dict[str, str]]:
    """Yields a row for every other program: its µs, by chip and versions."""
    rows = {key: row for key, row in written().items() if row["part"] != LAYER and "works" in row}
    programs = dict.fromkeys(key[2:] for key in rows)
    columns = list(_columns(key[:2] for key in rows))
    for program in programs:
        times = {
            name: _time([work.work for work in works_of(rows[*key, *program])], rates)
            for name, key, rates in columns
            if (*key, *program) in rows
        }
        about = dict(zip(("part", "what", "shape"), program, strict=True))
        yield {**about, **{name: times.get(name, "") for name, *_ in columns}}


def page() -> str:
    """Returns both tables as Markdown."""
    tables = (list(layer_table()), sorted(other_table(), key=lambda row: row["part"]))
    return "\n\n".join(tabulate(t, headers="keys", tablefmt="github", disable_numparse=True) for t in tables)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put the tables into the page")
    if parser.parse_args().write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        PAGE.write_text(f"{before}{BEGIN}\n{page()}\n{END}{rest.partition(END)[2]}", encoding="utf-8")
    print(page())


if __name__ == "__main__":
    main()
