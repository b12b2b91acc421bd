"""dynamic=True with changing batch and length: what `backend="inductor"` compiles, no graph or break more."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from helpers.eager import reference_linears
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.paces import mostly_slow
from helpers.reference import sqnr_db
from helpers.reports import EVERYTHING as ALL
from torch import Tensor, nn
from torch._dynamo.utils import counters
from torch.library import opcheck
from torch.nn import functional as F

import mxcompile
from mxcompile import ops

WIDTH = 40
SHAPES = [(2, 9), (3, 17), (5, 33), (2, 31), (1, 12), (4, 1)]


class Block(Made, a=(WIDTH, 3 * WIDTH), b=(WIDTH, WIDTH), c=(WIDTH, 72), d=(72, WIDTH)):
    """Attention and feed-forward; a graph break between them if `broken`."""

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = self.a(x).view(batch, length, 3, 4, WIDTH // 4).permute(2, 0, 3, 1, 4)
        x = x + self.b(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(x.shape))
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.d(F.gelu(self.c(x)))


class FeedForward(Made, a=(WIDTH, 72), b=(72, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        y = F.gelu(self.a(x))
        if self.broken:
            torch._dynamo.graph_break()
        return x + self.b(y)


def steps(model: nn.Module, backend: Any, shapes: list[tuple[int, int]], dynamic: bool | None) -> Any:
    """Training steps at `shapes`: outputs and gradients of each, and what Dynamo counted."""
    torch._dynamo.reset()
    mxcompile.clear_reports()
    counters.clear()
    compiled = torch.compile(model, backend=backend, dynamic=dynamic)
    results = [step(compiled, model, shape) for shape in shapes]
    counted = {
        "graphs": counters["stats"]["unique_graphs"],
        "frames": counters["frames"]["ok"],
        "breaks": sum(counters["graph_break"].values()),
    }
    return results, counted


def step(run: Any, model: nn.Module, shape: tuple[int, int]) -> list[Tensor]:
    """Output and gradients, of the input too."""
    x = torch.randn(*shape, WIDTH, generator=torch.Generator().manual_seed(sum(shape))).requires_grad_()
    y = run(x)
    return [y.detach(), *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]


def assert_right(
    model: nn.Module, results: list[list[Tensor]], shapes: list[Any], at_least_db: float
) -> None:
    """`results` equal the reference at each shape, with the casts all reports tell of."""
    reports = mxcompile.reports()
    gemms = tuple(gemm for report in reports for gemm in report.gemms)
    linears = [gemm for gemm in gemms if not gemm.role.startswith("attn_") or gemm.role == "attn_out"]
    assert {gemm.precision for gemm in linears} == {"mxfp8"}
    eager = copy.deepcopy(model)
    with reference_linears(eager, mxcompile.Report(gemms=gemms, summary=reports[0].summary)) as replaced:
        for shape, values in zip(shapes, results, strict=True):
            for expected, value in zip(step(eager, eager, shape), values, strict=True):
                assert sqnr_db(expected, value) > at_least_db, shape
    assert replaced.used == {gemm.name for gemm in linears}


@pytest.mark.parametrize(
    ("broken", "dynamic"),
    mostly_slow([(False, True), (False, None), (True, True), (True, None)], (True, None), rows=True),
)
def test_the_passes_add_no_graph(broken: bool, dynamic: bool | None):
    model = Block(broken=broken)
    _, expected = steps(model, "aot_eager_decomp_partition", SHAPES, dynamic)
    results, counted = steps(model, EagerBackend(), SHAPES, dynamic)
    assert counted == expected
    assert (counted["breaks"] > 0) == broken
    assert_right(model, results, SHAPES, 90)


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
def test_compiling_adds_no_graph(broken: bool):
    shapes, model = SHAPES[:4], FeedForward(broken=broken)
    _, expected = steps(model, "inductor", shapes, dynamic=True)
    results, counted = steps(model, mxcompile.Backend(policy=ALL), shapes, dynamic=True)
    assert counted == expected
    assert (counted["breaks"], counted["graphs"]) == (int(broken), 1 + int(broken))
    assert_right(model, results, shapes, 60)


def test_scales_are_saved_flat_where_a_guard_would_be_set():
    """⌈tokens/32⌉ is one for few tokens; only of a symbolic count does Inductor ask."""
    for dynamic in (True, False):
        torch._dynamo.reset()
        model, backend = FeedForward(broken=False), EagerBackend(policy=ALL)
        step(torch.compile(model, backend=backend, dynamic=dynamic), model, SHAPES[0])
        forward, _ = backend.graphs
        flat = [node.meta["val"] for node in forward.graph.nodes if node.target is ops.flatten]
        assert [value.ndim for value in flat] == ([1, 1] if dynamic else [])


def test_flattening_is_an_operator_of_its_own():
    opcheck(ops.flatten, (torch.arange(35, dtype=torch.uint8).view(5, 7),))
    opcheck(ops.flatten, (torch.randn(4, 6).t(),))
