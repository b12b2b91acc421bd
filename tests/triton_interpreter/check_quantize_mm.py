"""The generated products that cast their activation themselves, against FP64 ones of the reference cast."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import quantize
from helpers.operands import assert_within, embedded, operand, product, values
from helpers.spread import spread
from modules import results_of_calls

from mxcompile import ops
from mxcompile.formats import E4M3, E5M2, ELEM_TYPES, Format, Rounding, elem_type, rounding
from mxcompile.lowering.targets import TARGETS
from mxcompile.lowering.templates import fused_quantize_mm

NATIVE = [name for name, target in TARGETS.items() if target.native and name != "sm_103"]  # as sm_100
BF16, F32 = torch.bfloat16, torch.float32
PLAIN = (E4M3.dtype, "rceil")


@pytest.fixture(autouse=True)
def _many_rows_too(monkeypatch):
    """Which only autotuning tries."""

    def tiles(target, rows, _):
        row = target.tiles.fused_quantize_mm
        return [(row.swap_few, row.few) if rows <= row.few_rows else (False, row.many)]

    monkeypatch.setattr(fused_quantize_mm, "fused", tiles)


def activation(m: int, k: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    """Values over many binades from block to block, in memory that is NaN beyond them."""
    return embedded(spread(m, k, binades=30, tile=(1, 32)).to(dtype), float("nan"))


def products(calls, target) -> list[torch.Tensor]:
    """calls: x, w, bias, element type and rounding, dtype of the result."""
    arguments = []
    for x, w, bias, (elem, mode), out_dtype in calls:
        words = Format(elem=elem_type(elem), rounding=rounding(mode)), Format.mx(elem_type(w.right[0].dtype))
        arguments.append((x, *w.right, bias, out_dtype, *map(str, words)))
    outputs: list[torch.Tensor] = results_of_calls(ops.quantize_mm, arguments, target=target)
    return outputs


def check(calls, target) -> None:
    for out, (x, w, bias, cast, _) in zip(products(calls, target), calls, strict=True):
        x_values = values(*quantize(x, -1, *cast))
        assert_within(out, *product(x_values, w.values, bias), x.shape[1])


@pytest.mark.parametrize("target", NATIVE)
@pytest.mark.parametrize("tiled", [False, True])
def test_quantize_mm_of_odd_shapes_matches_fp64(tiled, target):
    shapes = [(1, 130, 96), (40, 70, 288), (150, 140, 250)]
    biases = [torch.randn(n).to(BF16) for _, n, _ in shapes]
    weights = [operand(n, k, spread=20, tiled=tiled) for _, n, k in shapes]
    sides = zip(shapes, weights, biases, strict=True)
    check([(activation(m, k), w, bias, PLAIN, BF16) for (m, _, k), w, bias in sides], target)


@pytest.mark.parametrize("dtype", [BF16, F32], ids=str)
def test_quantize_mm_of_every_format_matches_fp64(dtype):
    w, x = operand(40, 128, spread=20), activation(20, 128, dtype)
    casts = [(elem.dtype, str(rounding)) for elem in ELEM_TYPES.values() for rounding in Rounding]
    check([(x, w, None, cast, F32) for cast in casts], "sm_100")


def test_quantize_mm_of_strided_activations_matches_fp64():
    w = operand(40, 256, spread=20, k_major=False)
    check([(activation(256, m).t(), w, None, (E5M2.dtype, "rceil"), F32) for m in (20, 130)], "sm_100")


def test_nan_and_inf_reach_their_row_only():
    w, calls = operand(40, 96, spread=20), []
    for m in (20, 130):
        for bad in (float("nan"), float("inf")):
            x = activation(m, 96)
            x[5, 70] = bad
            calls.append((x, w, None, PLAIN, BF16))
    for out in products(calls, "sm_100"):
        assert out[5].isnan().all()
        assert out.isnan().sum() == 40
