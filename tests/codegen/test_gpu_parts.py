"""`make gpu`: parts that fail, hang or find no device, and the rows that are left of them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "benchmarks"

WRITES_TWO = """
import os, signal, sys
sys.path.insert(0, {folder!r})
import common

def rows():
    yield {{"part": "slow", "kernel": "first", "shape": ""}}
    yield {{"part": "slow", "kernel": "second", "shape": "", "wrong": "3 of 4 differ"}}
    {then}

common.write("slow", rows())
"""


@pytest.fixture
def gpu(benchmark: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """The runner, whose rows go to a folder of the test."""
    monkeypatch.setenv("OUT", str(tmp_path))
    return benchmark("gpu")


def script(folder: Path, then: str) -> tuple[str, ...]:
    """A command that writes two rows, of which one is wrong."""
    path = folder / "slow.py"
    path.write_text(WRITES_TWO.format(folder=str(BENCHMARKS), then=then), encoding="utf-8")
    return (str(path),)


def ended(pid: int) -> bool:
    """Whether process `pid` ends within 10 s; a zombie has ended. The kernel takes a moment for a kill."""
    state = Path(f"/proc/{pid}/stat")
    for _ in range(100):
        try:
            if state.read_text(encoding="utf-8").rpartition(")")[2].split()[0] == "Z":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.1)
    return False


def test_a_part_that_is_killed_keeps_the_rows_it_wrote(gpu: Any, tmp_path: Path):
    """It loses the row that it was making, and the next part runs."""
    cut = "(common.folder() / 'slow.jsonl').open('a').write('{'); os.kill(os.getpid(), signal.SIGKILL)"
    killed = gpu.Part(name="slow", command=script(tmp_path, cut), seconds=300, rows="slow")
    row = "import os; open(os.environ['OUT'] + '/slow.jsonl', 'a').write('{\"kernel\": 3}\\n')"
    first, second = gpu.run_all(
        [killed, gpu.Part(name="next", command=("-c", row), seconds=60, rows="slow")], None, []
    )
    assert [row["kernel"] for row in first.rows] == ["first", "second"]
    assert [row["kernel"] for row in second.rows] == [3]
    assert {row["torch"].partition("+")[0] for row in first.rows} == {torch.__version__.partition("+")[0]}
    assert (first.word, second.word) == (gpu.WRONG, gpu.RIGHT)
    assert first.summary()["wrong"] == first.summary()["right"] == 1


def test_a_part_is_stopped_at_its_limit_with_all_that_it_started(gpu: Any, tmp_path: Path):
    sleep = "import time; time.sleep(600)"
    start = f"import subprocess, sys; p = subprocess.Popen([sys.executable, '-c', '{sleep}'])"
    command = "-c", f"{start}; print(p.pid, flush=True); {sleep}"
    outcome = gpu.run(gpu.Part(name="hangs", command=command, seconds=600), 3)
    assert outcome.word == gpu.STOPPED
    child = int((tmp_path / "gpu.log").read_text(encoding="utf-8").split()[-1])
    assert ended(child), "its child runs"


def test_summary_of_a_failed_part_has_status_and_message(gpu: Any, tmp_path: Path):
    command = script(tmp_path, "raise SystemExit('no such chip')")
    outcome = gpu.run(gpu.Part(name="slow", command=command, seconds=100, rows="slow"), 100)
    assert outcome.word == gpu.WRONG
    assert outcome.wrong == ["second  3 of 4 differ"]
    lost = gpu.Part(name="lost", command=("-c", "raise SystemExit('no such chip')"), seconds=60)
    assert gpu.run(lost, 60).summary()["outcome"] == "failed: status 1, no such chip"


def test_rows_of_earlier_runs_do_not_count(gpu: Any, tmp_path: Path):
    (tmp_path / "old.jsonl").write_text('{"part": "x", "kernel": "old", "wrong": "yes"}\n', encoding="utf-8")
    part = gpu.Part(name="old", command=("-c", "print()"), seconds=60, rows="old")
    assert gpu.run(part, 60).rows == []


def test_parts_that_no_time_is_left_for_are_not_reached(gpu: Any):
    part = gpu.Part(name="any", command=("-c", "print()"), seconds=60)
    (outcome,) = gpu.run_all([part], 0.1, [])
    assert outcome.word == gpu.NOT_REACHED


@pytest.mark.parametrize(
    ("log", "counts"),
    [
        ("tests/a.py::test_x PASSED   [ 50%]\ntests/a.py::test_y FAILED  [100%]", {"PASSED": 1, "FAILED": 1}),
        ("[gw1] [ 50%] SKIPPED tests/a.py::test_x[ERROR] \nFAILED tests/a.py::test_y", {"SKIPPED": 1}),
    ],
    ids=["one", "workers"],
)
def test_outcomes_of_tests_are_counted_once(gpu: Any, log: str, counts: dict[str, int]):
    assert gpu._counts(log) == counts


def test_measured_times_stand_beside_their_estimates(gpu: Any):
    row = {"part": "layer", "kernel": "nvidia", "shape": "8192 tokens", "time_us": 20.0, "ratio": 0.5}
    estimated = {**row, "predicted_us": 19.0, "predicted_range_us": [18.0, 21.5]}
    rows = [row, estimated, {**estimated, "part": "kernels"}]
    (line,) = gpu.beside([gpu.Outcome(part="layer", word=gpu.RIGHT, rows=rows)])
    assert list(line.values()) == ["layer", "nvidia 8192 tokens", 20.0, 19.0, "18–21.5", "2.000"]


def test_an_unknown_part_is_refused(tmp_path: Path):
    done = started("lyer", out=tmp_path)
    assert done.returncode == 2
    assert "no part lyer: allowed are tests, layer, casts" in done.stderr


ABSENT = ("jsonschema", "torchao", "compressed_tensors", "ml_dtypes", "hypothesis", "matplotlib")
WITHOUT = f"""
import sys
from importlib.machinery import PathFinder

class Finder(PathFinder):
    @classmethod
    def find_spec(cls, name, path=None, target=None):
        return None if name.partition(".")[0] in {ABSENT} else super().find_spec(name, path, target)

sys.meta_path[sys.meta_path.index(PathFinder)] = Finder
"""


def started(*arguments: str, out: Path) -> subprocess.CompletedProcess[str]:
    """The runner in a process without git and without any package that a GPU machine may lack."""
    absent = out / "absent"
    absent.mkdir()
    (absent / "sitecustomize.py").write_text(WITHOUT, encoding="utf-8")
    environment = {**os.environ, "OUT": str(out), "PYTHONPATH": str(absent), "PATH": "/nonexistent"}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    environment["PYTEST_ADDOPTS"] = "-p no:hypothesispytest"  # pytest loads it where it is installed
    command = [sys.executable, str(BENCHMARKS / "gpu.py"), *arguments]
    return subprocess.run(command, env=environment, cwd=out, capture_output=True, text=True, check=False)


@pytest.mark.slow
def test_every_part_reports_a_missing_device_without_a_gpu(gpu: Any, tmp_path: Path):
    done = started(out=tmp_path)
    assert done.returncode == 0, done.stdout
    summary = done.stdout.rpartition("\n\n")[2].splitlines()[1:]
    assert [line.split()[0] for line in summary] == [part.name for part in gpu.PARTS]
    assert all(gpu.NO_DEVICE in line for line in summary)
    assert not list(tmp_path.glob("*.jsonl"))


@pytest.mark.slow
@pytest.mark.parametrize("part", ["layer", "casts", "decode", "training", "curves", "gemms"])
def test_part_compiles_its_kernels_for_an_absent_chip(part: str, tmp_path: Path):
    """The stand-in of offline codegen takes the place of the GPU; every kernel could run."""
    done = started("--compile", "h100", "--small", part, out=tmp_path)
    log = (tmp_path / "gpu.log").read_text(encoding="utf-8")
    assert done.returncode == 0, log[-3000:]
    rows = [json.loads(line) for line in (tmp_path / "gpu_predicted.jsonl").read_text("utf-8").splitlines()]
    assert rows
    for row in rows:
        assert row["target"] == "sm_90"
        assert row["problems"] == [], row["kernel"]
        assert row["works"], row["kernel"]
