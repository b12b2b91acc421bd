"""Casts of emulated products: collected by matrix, one kernel, bit for bit those of the operators."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from generating import assert_clean
from helpers.bits import assert_same_bits
from helpers.casts import quantize, quantize_operands, quantize_two, values
from helpers.graphs import calls, lowered, traced
from helpers.paces import mostly_slow
from helpers.written import Written
from interpreted import interpret
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mxcompile import ops
from mxcompile.lowering.graph.merge_casts import MergeCasts
from mxcompile.lowering.graph.merge_sibling_casts import MergeSiblingCasts
from mxcompile.offline import codegen
from mxcompile.ops import view

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16


def _collected(function, *inputs: Tensor) -> tuple[fx.GraphModule, list[int]]:
    """The graph after the passes, and how many copies each of its casts makes."""
    module, _ = lowered([MergeCasts, MergeSiblingCasts], "sm_90", traced(function, *inputs))
    casts = map(view.Casts.read, calls(module, ops.cast))
    return module, [len(cast.copies) * (1 if cast.y is None else 2) for cast in casts]


def _value(x: Tensor, dim: int, square: bool = False, dtype: torch.dtype = BF16) -> Tensor:
    return values(x, dim, E4M3, "rceil", square, dtype)


def _codes(x: Tensor, dim: int) -> list[Tensor]:
    return quantize(x, dim, E4M3, "rceil")


def both_values(x):
    return _value(x, -1), _value(x, -2)


@pytest.mark.parametrize(
    ("function", "shape", "copies"),
    [
        pytest.param(lambda x: (_value(x, -1), x + 1, *_codes(x, -2)), (70, 96), [2], id="values and codes"),
        pytest.param(lambda x: (_value(x, 1), _value(x, 0)), (70, 96), [2], id="both values"),
        pytest.param(lambda x: _codes(x, 0), (70, 96), [1], id="codes alone"),
        pytest.param(lambda x: (_value(x, -1), *_codes(x, -1), _value(x, -2)), (70, 96), [2, 1], id="three"),
        pytest.param(lambda x: (_value(x, -2, square=True), _value(x, -1)), (70, 96), [1, 1], id="squares"),
        pytest.param(lambda x: (_value(x, -1), *_codes(x, 1)), (2, 32, 96), [2], id="a batch"),
        pytest.param(both_values, (2, 35, 96), [1, 1], id="blocks across matrices"),
        pytest.param(both_values, (0, 96), [1, 1], id="nothing in it"),
        pytest.param(both_values, (1, 1), [1, 1], id="a single element"),
        pytest.param(
            lambda x: (_value(x, -1), _value(x, -2, dtype=torch.float32)), (70, 96), [1, 1], id="two dtypes"
        ),
    ],
)
def test_casts_of_a_matrix_are_one_where_one_kernel_makes_them(function, shape, copies):
    x = torch.randn(shape).to(BF16)
    module, casts = _collected(function, x)
    assert casts == copies
    assert_same_bits(module(x), function(x))


def gradients(gradient, gate, up):
    first, second = gradient * F.silu(gate), gradient * up * torch.sigmoid(gate)
    return _value(first, -1), _value(second, -1), _value(first, -2), _value(second, -2)


def test_casts_of_two_gradients_become_one_kernel():
    """What a gated activation gives back: one kernel reads what both are computed from."""
    inputs = [torch.randn(70, 96).to(BF16) for _ in range(3)]
    module, casts = _collected(gradients, *inputs)
    assert casts == [4]
    assert_same_bits(module(*inputs), gradients(*inputs))


def _spread(*shape: int) -> Tensor:
    """Many binades, zeros with both signs, a block with NaN and one with Inf."""
    *batch, n = shape
    x = torch.randn(math.prod(batch), n) * torch.exp2(torch.randint(-130, 120, (math.prod(batch), 1)).float())
    x[:, 3], x[2] = -0.0, 0.0
    x[-1, 0], x[5, -1] = torch.nan, torch.inf
    return x.view(shape)


SINGLE = torch.float32
VALUES_AND_CODES = E4M3, "rceil", BF16, "values", "codes"
CASES = {
    ("sm_90", BF16, (72, 104)): VALUES_AND_CODES,
    ("sm_90", BF16, (40, 272)): (E5M2, "even", BF16, "codes", "values"),
    ("sm_90", SINGLE, (72, 104)): (E4M3, "floor", SINGLE, "values", "values"),
    ("sm_80", BF16, (72, 105)): VALUES_AND_CODES,
    ("sm_89", torch.float16, (72, 104)): (E4M3, "ceil", BF16, "codes", "none"),
    ("sm_90", BF16, (72, 136)): (E4M3, "floor", BF16, "squares", "none"),
    ("gfx942", BF16, (3, 32, 104)): (E4M3, "rceil", BF16, "none", "values"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_generated_operand_casts_equal_the_operator(case, tmp_path: Path):
    target, dtype, shape = case
    how, (x, y) = CASES[case], (_spread(*shape).to(dtype) for _ in range(2))
    model = Written(lambda _, x, y: (*quantize_operands(x, y, *how), *quantize_operands(x + y, None, *how)))
    wanted = model(x, y)
    result = codegen(model, x, y, target=target, training=False, out_dir=tmp_path)
    assert_clean(result)
    casts = [launch for launch in result.launches if "mx.cast.default" in launch.operators]
    assert len(casts) == 2
    assert_same_bits(interpret(tmp_path, [x, y]), wanted)


@pytest.mark.parametrize("target", mostly_slow(["sm_90", "sm_100"], "sm_100"))
def test_a_cast_along_the_third_last_dimension_is_a_loop(target, tmp_path: Path):
    model, x = Written(lambda _, x: _codes(x, 0)), torch.randn(64, 6, 40).to(BF16)
    result = codegen(model, x, target=target, training=False, out_dir=tmp_path)
    assert not any(kernel.is_template for kernel in result.kernels)
    assert_same_bits(interpret(tmp_path, [x]), model(x))


@pytest.mark.parametrize("rows", mostly_slow([32, 35], 35))
def test_two_batches_are_cast_by_one_kernel(rows, tmp_path: Path):
    """Blocks along columns would cross the matrices of 35 rows."""
    model = Written(lambda _, x, y: quantize_two(x, y, E4M3, "rceil"))
    x, y = (torch.randn(2, rows, 96).to(BF16) for _ in range(2))
    result = codegen(model, x, y, target="sm_100", training=False, out_dir=tmp_path)
    assert [kernel.is_template for kernel in result.kernels] == [True]
    assert_clean(result)
    assert_same_bits(interpret(tmp_path, [x, y]), model(x, y))


def rotated(_: nn.Module, x: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    """The cast of what reads each element at two places, as a rotary embedding and its gradient do."""
    half = x.shape[1] // 2
    turned = torch.cat((-x[:, half:], x[:, :half]), 1)
    return tuple(quantize_operands(x * cos + turned * sin, None, *VALUES_AND_CODES))


@pytest.mark.slow
def test_a_rotation_is_computed_where_it_is_cast(tmp_path: Path):
    """Nothing is stored between; of numbers that BF16 holds exactly, so that fused sums are the same."""
    model = Written(rotated)
    x = torch.randint(-8, 9, (64, 128)).to(BF16)
    cos, sin = (torch.exp2(torch.randint(-2, 3, (1, 128)).float()).to(BF16) for _ in range(2))
    wanted = model(x, cos, sin)
    result = codegen(model, x, cos, sin, target="sm_90", training=False, out_dir=tmp_path)
    (launch,) = result.launches
    assert launch.num_bytes <= 64 * 128 * (2 + 2 + 1 + 1 / 32) + 2 * 2 * 128
    assert_same_bits(interpret(tmp_path, [x, cos, sin]), wanted)
