"""The generated casts, bit for bit, against the operators' reference and the integer reference.

Of BF16 on Blackwell the template casts two elements a register; elsewhere, and of other dtypes, one. On chips
without an MX GEMM casts are Inductor's own kernels, whose conversion is the chip's or integer arithmetic.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers import reference as integer_reference
from helpers.bits import assert_same_bits
from helpers.casts import quantize, quantize_both, quantize_operands, quantize_two
from helpers.spread import spread
from modules import results_of_calls, run

from mxcompile.formats import ELEM_TYPES, Format, Rounding, ScaleLayout

BF16, F16, F32 = torch.bfloat16, torch.float16, torch.float32
FORMATS = [Format(elem=elem, rounding=rounding) for elem in ELEM_TYPES.values() for rounding in Rounding]
SHAPES = [(1, 1), (1, 1056), (32, 32), (33, 65), (130, 257), (257, 31), (64, 640)]
ROW_MAJOR, TILED = ScaleLayout.ROW_MAJOR, ScaleLayout.TILED_128X4
PLAIN = (torch.float8_e4m3fn, "rceil")


def by_blocks(*shape: int, dtype: torch.dtype = BF16) -> torch.Tensor:
    return spread(*shape, binades=100, tile=(32, 32)).to(dtype)


def check(operator, calls, target) -> None:
    """What is generated gives the bits of the operator's reference; NaN of any."""
    wanted = [operator(*arguments) for arguments in calls]
    results = results_of_calls(operator, calls, target=target)
    for number, (computed, expected) in enumerate(zip(results, wanted, strict=True)):
        assert_same_bits(computed, expected, (number, target))


@pytest.mark.parametrize(
    ("target", "scales"),
    [("sm_100", TILED), ("sm_100", ROW_MAJOR), ("gfx950", ROW_MAJOR)],
)
def test_mx_casts_of_odd_shapes_equal_reference(target, scales):
    check(quantize_both, [(by_blocks(*shape), *PLAIN, str(scales)) for shape in SHAPES], target)
    if scales is ROW_MAJOR:
        check(quantize_both, [(by_blocks(3, 40, 70), *PLAIN), (by_blocks(2, 64, 33), *PLAIN)], target)


@pytest.mark.parametrize(
    ("target", "dtype"),
    [("sm_100", F32), ("sm_100", BF16), ("sm_100", F16), ("sm_80", F32)],
)
def test_mx_casts_of_every_format_equal_reference(target, dtype):
    """Each layout in each format, with NaN, Inf, −0, the smallest and the largest values."""
    x = by_blocks(96, 96, dtype=dtype)
    x[0, 5], x[40, 50], x[70, 70] = float("nan"), float("inf"), -float("inf")
    x[32:64, 64:] = -0.0
    if dtype is F32:
        x[64:, :32] = torch.randint(1, 1 << 23, (32, 32), dtype=torch.int32).view(F32)  # subnormal
        x[:32, 32:64] = torch.finfo(F32).max * (1 - torch.rand(32, 32) / 4)
    kinds = [(fmt.elem.dtype, str(fmt.rounding)) for fmt in FORMATS]
    check(quantize, [(x, dim, *kind) for kind in kinds for dim in (-1, -2)], target)


@pytest.mark.parametrize("target", ["sm_100", "sm_90"])
def test_mx_casts_equal_the_integer_reference(target):
    sources = []
    for fmt in FORMATS:
        largest = fmt.elem.max
        x = by_blocks(8, 64, dtype=F32).clamp(-3e38, 3e38)
        x[:, 7] = torch.tensor([largest * 2.0**k for k in range(-9, -1)])
        x[0, :32], x[1, 40], x[2, 50] = 0.0, float("nan"), float("inf")
        x[3, :32] = 2.0**-149
        x[4:6, 32:] = torch.nextafter(torch.tensor(largest), torch.tensor([0.0, 1e9]))[:, None] * 2.0**20
        sources.append(x)
    calls = [(x, -1, fmt.elem.dtype, str(fmt.rounding)) for x, fmt in zip(sources, FORMATS, strict=True)]
    for (qdata, scale), x, fmt in zip(
        results_of_calls(quantize, calls, target=target), sources, FORMATS, strict=True
    ):
        values, scales = integer_reference.quantize(x.numpy(), fmt.elem.name, fmt.rounding)
        np.testing.assert_array_equal(scale.numpy(), scales)
        np.testing.assert_array_equal(qdata.to(torch.float64).numpy(), values)


def test_emulated_mx_casts_of_odd_shapes_equal_reference():
    check(quantize_both, [(by_blocks(*shape), *PLAIN) for shape in ((1, 1), (33, 65), (70, 31))], "sm_80")


def test_mx_casts_of_square_tiles_equal_reference():
    scales = [(-1, ROW_MAJOR), (-2, TILED)]
    check(quantize, [(by_blocks(40, 70), dim, *PLAIN, True, str(scale)) for dim, scale in scales], "sm_100")


def test_mx_casts_of_strided_tensors_equal_reference():
    wide = by_blocks(64, 300)
    sources = [wide.t(), wide[:, ::3], wide[::2, 7:], wide[:1].expand(40, 300)]
    check(quantize_both, [(x, *PLAIN) for x in sources], "sm_100")
    check(quantize, [(x, dim, *PLAIN) for x in sources for dim in (-1, -2)], "sm_100")


def test_cast_of_two_tensors_equals_reference():
    shapes = [(33, 65), (130, 256)]
    check(quantize_two, [(by_blocks(*s), by_blocks(*s), *PLAIN, str(TILED)) for s in shapes], "sm_100")


@pytest.mark.parametrize("scales", [ROW_MAJOR, TILED])
def test_mx_casts_of_empty_tensors_equal_reference(scales):
    shapes = [(0, 64), (64, 0), (0, 0)]
    check(quantize_both, [(torch.empty(shape), *PLAIN, str(scales)) for shape in shapes], "sm_100")


def copy_of(x):
    return quantize(x, -1, *PLAIN)


def copy_for_emulated_products(x):
    return quantize_operands(x, None, *PLAIN, BF16, "codes", "none")


@pytest.mark.parametrize(
    ("cast", "target"),
    [(copy_of, "sm_100"), (copy_for_emulated_products, "sm_90")],
    ids=["native", "emulated"],
)
@pytest.mark.parametrize("dim", [0, 1])
def test_offsets_beyond_32_bits(dim, cast, target):
    """Rows, or columns, 2^30 elements apart: the third lies where a 32-bit offset would have wrapped."""
    apart = (1 << 30) + 16
    elem = torch.float8_e5m2  # pages are made when touched
    memory = torch.empty(2 * apart + 64, dtype=torch.uint8).view(elem)
    x = memory.as_strided((3, 64), (apart, 1)) if dim == 0 else memory.as_strided((64, 3), (1, apart))
    values = by_blocks(*x.shape).to(elem)
    x.copy_(values)
    assert_same_bits(run(cast, x, target=target), copy_of(values))
