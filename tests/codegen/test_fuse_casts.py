"""Fusing a cast into the one product that reads it: which graphs, and which not."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from helpers.casts import quantize, scaled_mm
from helpers.graphs import TAG, calls, lowered, operators, traced
from torch import Tensor, fx
from torch._inductor import config

from mxcompile import ops
from mxcompile.graph.tags import set_tag, tags_of
from mxcompile.lowering.choices.configs import NARROW
from mxcompile.lowering.graph.fuse import Fuse

E4M3 = torch.float8_e4m3fn
BF16 = torch.bfloat16


def _product(x: Tensor, w: Tensor, bias: Tensor | None = None, dim: int = -1, square: bool = False) -> Tensor:
    a = quantize(x, dim, E4M3, "rceil", square)
    return scaled_mm(*a, *quantize(w, -2, E4M3, "rceil"), bias, BF16)


def _marked(function: Callable, *inputs: Tensor, native: bool = True) -> fx.GraphModule:
    """`function` on fake `inputs`, its products marked as the native ones are."""
    module = traced(function, *inputs)
    for index, node in enumerate(calls(module, ops.matmul)):
        kernel = "mx_scaled_mm" if native else ""
        set_tag(node, replace(TAG, layer=node.name, index=index, kernel=kernel))
    return module


def _fused(
    function: Callable, *inputs: Tensor, target: str = "sm_100", native: bool = True
) -> fx.GraphModule:
    """The same after the pass."""
    module, _ = lowered([Fuse], target, _marked(function, *inputs, native=native))
    return module


X, W, BIAS = torch.randn(40, 70), torch.randn(70, 30), torch.randn(30)


@pytest.mark.parametrize("bias", [None, BIAS])
def test_one_operator_that_means_the_same(bias):
    inputs = [X, W] if bias is None else [X, W, bias]
    module = _fused(_product, *inputs)
    assert operators(module) == ["cast", "quantize_mm"]
    (node,) = calls(module, ops.quantize_mm)
    (tag,) = tags_of(node)
    assert tag.kernel == "mx_quantize_mm 128x32x128 swapped (tcgen05.mma block_scale)"
    torch.testing.assert_close(module(*inputs), _product(*inputs), rtol=0, atol=0)


def test_autotuned_quantize_mm_also_reads_the_separate_cast():
    with config.patch(max_autotune_gemm=True):
        module = _fused(_product, X, W)
    assert operators(module) == ["cast", "cast", "quantize_mm"]
    (node,) = calls(module, ops.quantize_mm)
    assert [argument.target.__name__ for argument in node.args[-2:]] == ["getitem", "getitem"]
    assert tags_of(node)[0].kernel == "mx_quantize_mm autotuned of 3 (tcgen05.mma block_scale)"
    torch.testing.assert_close(module(X, W), _product(X, W), rtol=0, atol=0)


def _of_several(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a, b = quantize(x, -1, E4M3, "rceil"), quantize(w, -2, E4M3, "rceil")
    return scaled_mm(*a, *b, None, BF16), scaled_mm(*a, *b, None, torch.float32)


def _kept(x: Tensor, w: Tensor) -> tuple[Tensor, ...]:
    a = quantize(x, -1, E4M3, "rceil")
    return scaled_mm(*a, *quantize(w, -2, E4M3, "rceil"), None, BF16), a[1]


UNFUSED: dict[str, Callable] = {
    "several products read it": _of_several,
    "kept": _kept,
    "in both layouts": lambda x, w: (_product(x, w), *quantize(x, -2, E4M3, "rceil")),
    "columnwise": lambda x, w: _product(x, w, dim=-2),
    "square": lambda x, w: _product(x, w, square=True),
    "with a matrix added": lambda x, w: _product(x, w, x[:, :30]),
}


@pytest.mark.parametrize("name", UNFUSED)
def test_casts_with_other_users_or_unsupported_forms_are_not_fused(name):
    assert "quantize_mm" not in operators(_fused(UNFUSED[name], X, W))


def test_a_result_read_twice_over_stays():
    """The same result of the cast as two nodes, one of them for another reader."""
    module = _marked(_product, X, W)
    cast, *_ = calls(module, ops.cast)
    output = module.graph.output_node()
    with module.graph.inserting_before(output):
        getitem = module.graph.call_function(operator.getitem, (cast, 1))
    output.args = ((*output.all_input_nodes, getitem),)
    lowered([Fuse], "sm_100", module)
    assert "quantize_mm" not in operators(module)


@pytest.mark.parametrize(
    ("autotune", "rows", "columns", "fuses"),
    [
        (False, 64, 4096, True),
        (False, 65, 64, False),
        (True, 65, NARROW, True),
        (True, 65, NARROW + 1, False),
    ],
)
def test_few_rows_or_a_narrow_result_that_is_timed(autotune, rows, columns, fuses):
    with config.patch(max_autotune_gemm=autotune):
        module = _fused(_product, torch.randn(rows, 32), torch.randn(32, columns))
    assert ("quantize_mm" in operators(module)) is fuses


@pytest.mark.parametrize(
    ("inputs", "how"),
    [
        ((torch.randn(2, 40, 70), torch.randn(2, 70, 30)), {}),
        ((X, W), {"native": False}),
        ((X, W), {"target": "sm_90"}),
    ],
    ids=["batch", "dequantized", "chip without the product"],
)
def test_casts_of_other_products_are_not_fused(inputs, how):
    assert "quantize_mm" not in operators(_fused(_product, *inputs, **how))
