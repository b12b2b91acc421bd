"""Compiles in fresh processes that share Inductor's cache directory: hits, and never stale ones."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mxcompile
from mxcompile.compiler.hooks.inductor import sources
from mxcompile.lowering.cpu.features import features

PATHS = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
PROGRAM = """
import copy, json, sys
import torch
import mxcompile
from helpers.eager import reference_linears
from helpers.reference import sqnr_db
from torch import nn

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(48, 80), nn.GELU(), nn.Linear(80, 48))
x = torch.randn(21, 48)
compiled = torch.compile(model, backend="mxfp8", options={"policy": sys.argv[1]})
y = compiled(x)
y.square().sum().backward()
(report,) = mxcompile.reports()
found = [y.detach(), *(p.grad for p in model.parameters())]
model.zero_grad()
with reference_linears(model, report):
    y = model(x)
    y.square().sum().backward()
expected = [y.detach(), *(p.grad for p in model.parameters())]
print(json.dumps({
    "report": report.to_json(),
    "sum": found[1].double().abs().sum().item(),
    "db": min(map(sqnr_db, expected, found)),
}))
"""
ALL = "version: 1\n"
FIRST_KEPT = "version: 1\nrules:\n  - match: {name: '0'}\n    use: bf16\n"


class Shared:
    """A cache directory and a policy file, for one process after another."""

    def __init__(self, folder: Path) -> None:
        self.caches, self.policy = folder / "caches", folder / "policy.yaml"

    def start(self, **variables: str) -> subprocess.Popen[str]:
        """A process with `variables` that compiles and trains a step with the policy in the file."""
        return subprocess.Popen(
            [sys.executable, "-c", PROGRAM, str(self.policy)],
            env={
                **os.environ,
                "TORCHINDUCTOR_CACHE_DIR": str(self.caches),
                "PYTHONPATH": PATHS,
                **variables,
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def run(self, policy: str, **variables: str) -> tuple[mxcompile.Report, dict[str, Any]]:
        """Report and results of one process with `policy` in the file."""
        self.policy.write_text(policy, encoding="utf-8")
        return self.result(self.start(**variables))

    def result(self, process: subprocess.Popen[str]) -> tuple[mxcompile.Report, dict[str, Any]]:
        written, errors = process.communicate()
        assert process.returncode == 0, errors
        data = json.loads(written.splitlines()[-1])
        report = mxcompile.Report.from_json(data.pop("report"))
        assert data["db"] > 60
        return report, data


def lasting(report: mxcompile.Report) -> mxcompile.Report:
    """`report` without what is of one compile only."""
    return replace(report, summary=replace(report.summary, cache="", pass_time_us=0.0))


def precisions(report: mxcompile.Report) -> set[tuple[str, str]]:
    return {(gemm.name, gemm.precision) for gemm in report.gemms}


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Shared, mxcompile.Report, dict[str, Any]]:
    """The directory after a first compile, and what that gave."""
    directory = Shared(tmp_path_factory.mktemp("shared"))
    return directory, *directory.run(ALL)


@pytest.mark.slow
def test_an_unchanged_policy_hits_and_reports_the_same(shared: tuple[Shared, Any, Any]):
    directory, first, computed = shared
    second, same = directory.run(ALL)
    assert (first.summary.cache, second.summary.cache) == ("miss", "hit")
    assert lasting(second) == lasting(first)
    assert all(gemm.kernel for gemm in second.gemms)
    assert same == computed


def test_a_changed_policy_file_changes_the_result(shared: tuple[Shared, Any, Any]):
    """The file's name is the same; so is everything Dynamo sees."""
    directory, first, computed = shared
    changed, other = directory.run(FIRST_KEPT)
    assert precisions(first) == {("0", "mxfp8"), ("2", "mxfp8")}
    assert precisions(changed) == {("0", "bf16"), ("2", "mxfp8")}
    assert changed.summary.cache == "miss"
    assert other["sum"] != computed["sum"]


VARIABLES = {
    "ATEN_CPU_CAPABILITY": "default",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "TORCHINDUCTOR_MAX_AUTOTUNE_GEMM": "1",
}
"""Environment variables that change the code of a graph, or its report."""


@pytest.mark.slow
@pytest.mark.parametrize("name", VARIABLES)
def test_a_changed_environment_variable_gives_a_first_compile(
    name: str, shared: tuple[Shared, Any, Any], tmp_path: Path
):
    """The cache is warm from a process without the variable."""
    if name == "ONEDNN_MAX_CPU_ISA" and not features().bf16:
        pytest.skip("this CPU has no instructions that the variable hides")
    warm, _, _ = shared
    variable = {name: VARIABLES[name]}
    report, computed = warm.run(ALL, **variable)
    cold = Shared(tmp_path)
    cold.policy = warm.policy  # reports name the file
    first, expected = cold.run(ALL, **variable)
    assert (report.summary.cache, first.summary.cache) == ("miss", "miss")
    assert lasting(report) == lasting(first)
    assert computed == expected


@pytest.mark.slow
def test_processes_at_once_do_not_mix_their_code_and_reports(tmp_path: Path):
    """They compile one graph and keep one report. The next process has the code of this report."""
    directory = Shared(tmp_path)
    directory.policy.write_text(ALL, encoding="utf-8")
    results = [directory.result(process) for process in [directory.start(), directory.start()]]
    results.append(directory.run(ALL))
    (first, computed), (second, also), (third, at_last) = results
    assert lasting(first) == lasting(second) == lasting(third)
    assert computed == also == at_last
    assert third.summary.cache == "hit"


def test_the_cache_key_covers_all_modules():
    """Also in a checkout, where the passes and the lowering are behind links."""
    names = {file.parts[-2:] for file in sources()}
    assert {("passes", "quantize_gemms.py"), ("inductor", "copies.py"), ("ops", "products.py")} <= names
    assert len(set(sources())) == len(sources())
