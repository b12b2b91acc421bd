"""Warm caches: results and reports are those of a first compile, wherever the file of the model lies."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.made import Made
from helpers.reports import EVERYTHING as ALL
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import cache_dir

import mxcompile
from mxcompile.report.data.record import NOT_COMPILED

LINES = 5
HEAD = """
import torch
from torch import nn
from torch.nn import functional as F
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
    def forward(self, x, *others):
"""


def rows(count: int = 40) -> Tensor:
    return torch.randn(count, 64, generator=torch.Generator().manual_seed(0))


def jagged() -> Tensor:
    return torch.nested.nested_tensor([*rows().split((3, 30, 7))], layout=torch.jagged)


def slow_but(fast: str, names: Iterable[str]) -> list[Any]:
    """`names` as cases of a test, slow ones except `fast`."""
    return [name if name == fast else pytest.param(name, marks=pytest.mark.slow) for name in names]


GELU = "return self.down(F.gelu(self.up(x)))"
PROGRAMS: dict[str, tuple[str, Callable[[], list[tuple[Any, ...]]]]] = {
    "changing float": (
        "return self.down(F.gelu(self.up(x) * others[0]))",
        lambda: [(rows(), factor) for factor in (0.5, 1.5, 2.5)],
    ),
    "captured item": (
        "return self.down(F.gelu(self.up(x / x.abs().max().item())))",
        lambda: [(rows(),), (2 * rows(),)],
    ),
    "captured nonzero": (
        "return self.down(F.gelu(self.up(x[(x[:, 0] > 0).nonzero().squeeze(-1)])))",
        lambda: [(rows(),)],
    ),
    "dynamic rows": (GELU, lambda: [(rows(count),) for count in (40, 44, 50)]),
    "jagged": (GELU, lambda: [(jagged(),)]),
    "graph break": (
        "h = F.gelu(self.up(x)); torch._dynamo.graph_break(); return self.down(h)",
        lambda: [(rows(),)],
    ),
}
"""By name, the body of a forward, and the arguments of its calls."""


@pytest.fixture(autouse=True)
def _captures() -> Iterator[None]:
    """Let Dynamo capture numbers and sizes that depend on data."""
    with torch._dynamo.config.patch(capture_scalar_outputs=True, capture_dynamic_output_shape_ops=True):
        yield


def model(folder: Path, body: str, *, lines: int = 0) -> nn.Module:
    """The model with the forward `body`, from a file that starts with so many empty lines."""
    path = folder / "model.py"
    path.write_text("\n" * lines + HEAD + f"        {body}\n", encoding="utf-8")
    spec = importlib.util.spec_from_file_location("model", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    torch.manual_seed(0)
    return module.Model()


Results = list[list[Tensor]]


def run(network: nn.Module, calls: list[tuple[Any, ...]], **options: Any) -> tuple[Results, mxcompile.Report]:
    """Outputs and gradients of each of `calls` in a process that has compiled nothing, and the report."""
    torch._dynamo.reset()
    mxcompile.clear_reports()
    options = {"policy": ALL, "strict": True, **options}
    compiled = torch.compile(network, backend="mxfp8", options=options)
    results = []
    for args in calls:
        network.zero_grad()
        output = compiled(*args)
        values = output.values() if output.is_nested else output
        values.square().mean().backward()
        results.append(
            [values.detach(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]
        )
    (report,) = mxcompile.reports()
    return results, report


def same(first: Results, second: Results) -> bool:
    pairs = [
        pair for output, two in zip(first, second, strict=True) for pair in zip(output, two, strict=True)
    ]
    return all(torch.equal(output, two) for output, two in pairs)


def lasting(report: mxcompile.Report, moved: int = 0) -> Any:
    """What compiles of one model have in common, the lines of its code `moved` so far back."""

    def back(source: str) -> str:
        file, _, line = source.rpartition(":")
        return f"{file}:{int(line) - moved}" if line else ""

    gemms = [replace(gemm, source=back(gemm.source)) for gemm in report.gemms]
    return gemms, replace(report.summary, cache="", pass_time_us=0.0)


@pytest.mark.parametrize("name", slow_but("captured item", PROGRAMS))
def test_a_moved_file_changes_lines_alone(name: str, tmp_path: Path):
    body, calls = PROGRAMS[name]
    results, report = run(model(tmp_path, body), calls())
    assert {gemm.precision for gemm in report.gemms} == {"mxfp8"}
    after_move, moved = run(model(tmp_path, body, lines=LINES), calls())
    assert same(after_move, results)
    assert lasting(moved, LINES) == lasting(report)
    results_of_rerun, rerun = run(model(tmp_path, body, lines=LINES), calls())
    assert same(results_of_rerun, results)
    assert lasting(rerun) == lasting(moved)
    assert rerun.summary.cache == "hit"


def _stored() -> Path:
    return Path(cache_dir()) / "mxcompile"


def _overwritten(text: str) -> None:
    for file in _stored().glob("*.json"):
        file.write_text(text, encoding="utf-8")


def _not_writable() -> None:
    shutil.rmtree(_stored())
    _stored().write_text("a file in the place of the directory", encoding="utf-8")


SPOILED: dict[str, Callable[[], object]] = {
    "reports gone": lambda: shutil.rmtree(_stored()),
    "reports cut off": lambda: _overwritten('{"gemms": ['),
    "reports of no graph": lambda: _overwritten("{}"),
    "directory of reports not writable": _not_writable,
    "codes gone": lambda: shutil.rmtree(Path(cache_dir()) / "fxgraph"),
    "codes of AOTAutograd gone": lambda: shutil.rmtree(Path(cache_dir()) / "aotautograd"),
}
"""By name, what happens to a warm cache."""


@pytest.mark.parametrize("name", slow_but("reports gone", SPOILED))
def test_a_spoiled_cache_gives_a_first_compile(name: str, tmp_path: Path):
    gelu, calls = model(tmp_path, GELU), [(rows(),)]
    results, report = run(gelu, calls)
    SPOILED[name]()
    try:
        rerun_results, anew = run(gelu, calls)
        assert same(rerun_results, results)
        assert lasting(anew) == lasting(report)
        assert anew.summary.cache == ("hit" if name == "codes of AOTAutograd gone" else "miss")
        once_more, rerun = run(gelu, calls)
        assert same(once_more, results)
        assert lasting(rerun) == lasting(report)
        assert rerun.summary.cache == ("hit" if _stored().is_dir() else "miss")
    finally:
        _stored().unlink() if _stored().is_file() else None


def test_sizes_in_a_report_are_of_its_own_call(tmp_path: Path):
    """One graph for all numbers of rows: the cache has it from a call with others."""
    gelu = model(tmp_path, GELU)
    for count in (40, 70):
        x = rows(count)
        torch._dynamo.mark_dynamic(x, 0)
        _, report = run(gelu, [(x,)])
        assert {gemm.m for gemm in report.gemms if gemm.gemm == "fprop"} == {count}


@pytest.mark.slow
def test_a_backward_that_was_never_compiled_is_named_when_it_is(tmp_path: Path):
    """The first process stops after a forward."""
    gelu, calls = model(tmp_path, GELU), [(rows(),)]
    torch.compile(gelu, backend="mxfp8", options={"policy": ALL, "strict": True})(rows())
    (stopped,) = mxcompile.reports()
    assert {gemm.kernel for gemm in stopped.gemms if gemm.gemm != "fprop"} == {""}
    _, report = run(gelu, calls)
    assert all(gemm.kernel for gemm in report.gemms)
    _, rerun = run(gelu, calls)
    assert lasting(rerun) == lasting(report)


@pytest.mark.slow
def test_kernels_of_a_backward_are_named_if_the_cache_of_autograd_is_off(tmp_path: Path):
    gelu, calls = model(tmp_path, GELU), [(rows(),)]
    with torch._functorch.config.patch(enable_autograd_cache=False):
        results, report = run(gelu, calls)
        rerun_results, rerun = run(gelu, calls)
    assert same(rerun_results, results)
    assert lasting(rerun) == lasting(report)
    assert (report.summary.cache, rerun.summary.cache) == ("miss", "hit")


@pytest.mark.slow
@pytest.mark.parametrize("options", [{"watch": "nonfinite"}, {"policy": "fp8_delayed"}], ids=str)
def test_code_that_does_more_is_known_by_the_same_report(options: dict[str, Any], tmp_path: Path):
    """Than that without a watch, or without histories of scales."""
    calls = [(rows(),), (3 * rows(),)]
    run(model(tmp_path, GELU), calls, **({} if "watch" in options else options))
    results, report = run(model(tmp_path, GELU), calls, **options)
    shutil.rmtree(_stored())
    after, anew = run(model(tmp_path, GELU), calls, **options)
    assert same(after, results)
    assert lasting(anew) == lasting(report)
    rerun_results, rerun = run(model(tmp_path, GELU), calls, **options)
    assert same(rerun_results, results)
    assert lasting(rerun) == lasting(report)
    assert (anew.summary.cache, rerun.summary.cache) == ("miss", "hit")


@pytest.mark.slow
def test_kernels_under_compiled_autograd_are_named_after_the_reports_are_gone(tmp_path: Path):
    """Its graph comes from the cache, but the graphs that it is the backward of do not."""

    def trained() -> mxcompile.Report:
        torch._dynamo.reset()
        mxcompile.clear_reports()
        options = {"policy": ALL}
        compiled = torch.compile(model(tmp_path, GELU), backend="mxfp8", options=options)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend="mxfp8", options=options)):
            compiled(rows()).square().mean().backward()
        return mxcompile.reports()[0]

    report = trained()
    assert all(gemm.kernel for gemm in report.gemms)
    assert lasting(trained()) == lasting(report)
    shutil.rmtree(_stored())
    assert lasting(trained()) == lasting(report)


def test_block_that_is_not_compiled_stays_pending_in_a_rerun(tmp_path: Path):
    """It has the class of the block that is compiled. A rerun lowers no backward."""
    kind = type(model(tmp_path, GELU))

    class Halves(Made, blocks=lambda: nn.ModuleList([kind(), kind()])):
        def forward(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x = block(x)
            return x

    def trained() -> mxcompile.Report:
        torch._dynamo.reset()
        mxcompile.clear_reports()
        halves = Halves()
        halves.blocks[0].compile(backend="mxfp8", options={"policy": ALL})
        halves(rows()).square().mean().backward()
        (report,) = mxcompile.reports()
        return report

    report, rerun = trained(), trained()
    pending = {gemm.name for gemm in report.gemms if gemm.kernel == NOT_COMPILED}
    assert pending == {"blocks.1.up", "blocks.1.down"}
    assert lasting(rerun) == lasting(report)
    assert rerun.summary.cache == "hit"
