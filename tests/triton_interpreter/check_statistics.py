"""The generated statistics of a cast: counts equal those of the operator, sums to the rounding of FP32."""

from __future__ import annotations

import math

import pytest
import torch
from modules import results_of_calls
from torch import Tensor

from mxcompile import ops
from mxcompile.formats import ELEM_TYPES, Rounding
from mxcompile.lowering.kernels import statistics
from mxcompile.ops.watch import FIELDS, NUM_BYTES

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
SUMS = slice(FIELDS.index("signal"), len(FIELDS))
PLAIN = "e4m3 1x32 rceil"
SMALL = "e5m2 1x32 floor"


def spread(*shape: int, dtype: torch.dtype = BF16, binades: float = 8) -> Tensor:
    """Numbers of many magnitudes, a tenth of them 0."""
    x = torch.randn(shape) * torch.exp2(torch.randn(shape) * binades)
    x[torch.rand(shape) < 0.1] = 0.0
    return x.to(dtype)


def special(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    """The same, whose first 32 rows hold NaN, both Inf, −0, the largest values and the smallest."""
    x = spread(*shape, dtype=dtype)
    finfo = torch.finfo(dtype)
    odd = [math.nan, math.inf, -math.inf, -0.0, finfo.max, -finfo.max, finfo.tiny, finfo.smallest_normal / 2]
    rows = torch.arange(len(odd)) * 4
    x[rows, torch.arange(len(odd)) * (shape[1] // len(odd))] = torch.tensor(odd, dtype=dtype)
    return x


def check(calls: list[tuple[object, ...]], target: str = "sm_100") -> None:
    wanted = [ops.cast_statistics(*arguments) for arguments in calls]
    results = results_of_calls(ops.cast_statistics, calls, target=target)
    for arguments, (numbers, kept), (expected, part) in zip(calls, results, wanted, strict=True):
        about = arguments[1:]
        assert numbers[: SUMS.start].tolist() == expected[: SUMS.start].tolist(), about
        assert numbers[SUMS.stop :].tolist() == expected[SUMS.stop :].tolist(), about
        assert numbers[SUMS].tolist() == pytest.approx(expected[SUMS].tolist(), rel=1e-5), about
        assert torch.equal(kept.nan_to_num(7e30), part.nan_to_num(7e30)), about


def test_the_row_has_the_fields():
    assert (statistics.NUM_FIELDS.value, statistics.NUM_BYTES.value) == (len(FIELDS), NUM_BYTES)


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_statistics_of_every_format_equal_the_operator(dtype: torch.dtype):
    formats = [f"{elem} 1x32 {rounding}" for elem in ELEM_TYPES for rounding in Rounding]
    x = special(40, 70, dtype=dtype)
    check([(x, dim, fmt, 0) for fmt in formats for dim in (-1, -2)])


def test_statistics_of_square_tiles_and_fp16_equal_the_operator():
    x = special(70, 300, dtype=F16)
    check([(x, -1, "e4m3 32x32 rceil", 9), (x.float(), -2, "e5m2 32x32 even", 0), (x, -1, PLAIN, 0)])


def test_statistics_of_odd_shapes_equal_the_operator():
    whole = spread(4, 66, 300)
    sources = [spread(1, 1), spread(33, 513), whole, whole.transpose(1, 2), whole[1, 1:, 3:], spread(45)]
    calls = [(x, dim, PLAIN, 0) for x in sources for dim in (-1, -2) if dim + x.ndim >= 0]
    check([*calls, (whole, 0, PLAIN, 0)])


def test_statistics_of_extreme_values_equal_the_operator():
    """Nothing but zeros, the largest and the smallest values, blocks far apart, one NaN in many tiles."""
    zeros = torch.zeros(40, 70)
    largest, smallest = zeros + torch.finfo(F32).max, torch.full((40, 70), 1e-45)
    apart = spread(40, 70, dtype=F32) * torch.tensor([1e30, 1e-36]).repeat(35)
    wide = spread(64, 600)
    wide[40, 500] = math.nan
    check([(x, -1, fmt, 0) for fmt in (PLAIN, SMALL) for x in (zeros, largest, smallest, apart, wide)])


@pytest.mark.parametrize("target", ["sm_80", "gfx950"])
def test_statistics_on_other_chips_equal_the_operator(target: str):
    check([(special(40, 300), -1, PLAIN, 16)], target)


def test_kept_excerpt_equals_that_of_the_operator():
    """Places that divide the tensor evenly and others; values of blocks that are NaN, or that are cut."""
    check([(special(40, 300), -1, PLAIN, 100), (spread(33, 77), -2, SMALL, 100)])
