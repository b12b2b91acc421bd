"""Operands of PyTorch's grouped product: each group begins in memory at a multiple of 16 bytes."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import encode
from helpers.graphs import traced
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile import ops
from mxcompile.graph.opsets import aten, packet
from mxcompile.graph.tags import tags_of, value_of
from mxcompile.lowering.graph import pipeline
from mxcompile.lowering.targets import TARGETS

SHAPES = {
    "rows": ((37, 64), (4, 64, 48)),
    "columns": ((4, 48, 64), (64, 37)),
    "K": ((48, 37), (37, 64)),
}
INNERMOST = {"rows": (-1, None), "columns": (None, -2), "K": (-2, -1)}
"""By the form: the dimension of each operand in which no group ends; of stacks both are right."""


def lowered(shapes, transposed: bool, word: str = "e4m3 1x32 rceil") -> fx.Graph:
    """The graph of a grouped product of operands cast along the contraction; stored transposed or not."""

    def cast(x: Tensor, dim: int) -> tuple[Tensor, Tensor]:
        dim = -3 - dim if transposed else dim
        encoded = encode(x, dim, word)
        return tuple(side.mT for side in encoded) if transposed else encoded

    def function(a: Tensor, b: Tensor, offs: Tensor) -> Tensor:
        sides = *cast(a, -1), *cast(b, -2)
        return ops.grouped_matmul(*sides, offs, torch.bfloat16, word, word)

    with FakeTensorMode():
        a, b = (torch.empty(*batch, *(n, m) if transposed else (m, n)) for *batch, m, n in shapes)
        graph = traced(function, a, b, torch.empty(4, dtype=torch.int32)).graph
    pipeline.run(graph, TARGETS["cpu_bf16"], torch.device("cpu"))
    return graph


@pytest.mark.parametrize("word", ["e4m3 1x32 rceil", "e4m3 1x128 pow2", "e4m3 channel nearest"])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("form", SHAPES)
def test_groups_begin_at_rows_in_memory(form: str, transposed: bool, word: str):
    graph = lowered(SHAPES[form], transposed, word)
    (product,) = (node for node in graph.nodes if packet(node) is aten._grouped_mm)
    for operand, dim in zip(product.args[:2], INNERMOST[form], strict=True):
        strides = value_of(operand).stride()[-2:]
        assert sorted(strides)[0] == 1
        assert max(strides) % 8 == 0
        assert dim is None or strides[dim] == 1


@pytest.mark.parametrize("form", SHAPES)
def test_grouped_product_of_unaligned_sizes_avoids_the_aten_operator(form: str):
    shapes = [[60 if size == 64 else size for size in shape] for shape in SHAPES[form]]
    graph = lowered(shapes, transposed=False)
    assert not any(packet(node) is aten._grouped_mm for node in graph.nodes)
    ((tag,),) = filter(None, map(tags_of, graph.nodes))
    reason = "PyTorch's grouped product takes rows of multiples of 16 bytes (60 elements)"
    assert tag.kernel == f"mx.grouped_mm (bfloat16, dequantized); {reason}"


def test_grouped_product_over_one_row_avoids_the_aten_operator():
    """The stride of a dimension of length 1 is arbitrary, and PyTorch checks it."""
    graph = lowered([(64, 1), (1, 48)], transposed=True)
    assert not any(packet(node) is aten._grouped_mm for node in graph.nodes)
    ((tag,),) = filter(None, map(tags_of, graph.nodes))
    assert tag.kernel.startswith("mx.grouped_mm (bfloat16, dequantized); PyTorch's grouped product takes")
