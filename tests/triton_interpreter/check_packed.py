"""The cast of packed BF16 against the integer reference, exhaustively, and against the casts of `tiles`."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers import reference as integer_reference
from helpers.spread import every_amax

from mxcompile.formats import ELEM_TYPES, Rounding
from mxcompile.lowering.kernels import packed, tiles

ELEM = pytest.mark.parametrize("elem", ELEM_TYPES)
ROUNDING = pytest.mark.parametrize("rounding", [str(rounding) for rounding in Rounding])


@triton.jit
def cast_kernel(
    x_ptr, code_ptr, byte_ptr, C: tl.constexpr, ELEM: tl.constexpr, ROUNDING: tl.constexpr, WAY: tl.constexpr
):
    """Of [64, C]. WAY: "rows" or "columns", packed or not."""
    row, column = tl.arange(0, 64)[:, None], tl.arange(0, C)[None, :]
    x = tl.load(x_ptr + row * C + column)
    if WAY == "packed rows":
        codes, byte = packed.quantize_rowwise(x, ELEM, ROUNDING)
    elif WAY == "wide rows":
        codes, byte = packed.quantize_rowwise(x, ELEM, ROUNDING, False)
    elif WAY == "rows":
        codes, byte = tiles.quantize_rowwise(x, ELEM, ROUNDING, True)
    elif WAY == "packed columns":
        codes, byte = packed.quantize_columnwise(x, ELEM, ROUNDING)
    else:
        codes, byte = tiles.quantize_columnwise(x, ELEM, ROUNDING, True)
    tl.store(code_ptr + row * C + column, codes)
    R: tl.constexpr = byte.shape[0]
    W: tl.constexpr = byte.shape[1]
    tl.store(byte_ptr + tl.arange(0, R)[:, None] * W + tl.arange(0, W)[None, :], byte)


@triton.jit
def value_kernel(x_ptr, packed_ptr, value_ptr, C: tl.constexpr, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    """Values of [64, C] in rows, then in columns: packed, and of `tiles`."""
    at = tl.arange(0, 64)[:, None] * C + tl.arange(0, C)[None, :]
    x = tl.load(x_ptr + at)
    tl.store(packed_ptr + at, packed.round_rowwise(x, ELEM, ROUNDING))
    tl.store(packed_ptr + 64 * C + at, packed.round_columnwise(x, ELEM, ROUNDING))
    tl.store(value_ptr + at, tiles.round_rowwise(x, ELEM, ROUNDING))
    tl.store(value_ptr + 64 * C + at, tiles.round_columnwise(x, ELEM, ROUNDING))


@triton.jit
def producer_kernel(x_ptr, out_ptr, rounded_ptr, SIZE: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    x = tl.load(x_ptr + at)
    tl.store(out_ptr + at, packed.sigmoid(x))
    tl.store(rounded_ptr + at, packed.rounded(x))


def cast(x, elem, rounding, way):
    """Codes and bytes of a BF16 [64, C]."""
    width = x.shape[1]
    shape = (64, width // 32) if "rows" in way else (2, width)
    codes, byte = torch.empty(x.shape, dtype=torch.uint8), torch.empty(shape, dtype=torch.uint8)
    cast_kernel[(1,)](x, codes, byte, width, elem, rounding, way)
    return codes, byte


@ELEM
@ROUNDING
def test_packed_cast_of_every_amax_equals_fp32_cast(elem, rounding):
    """Of the codes, some by integers."""
    x = every_amax(32, 1 << 15, 1 << 14)
    codes, byte = cast(x, elem, rounding, "packed rows")
    wanted, wanted_byte = cast(x, elem, rounding, "rows")
    wide, wide_byte = cast(x, elem, rounding, "wide rows")
    assert torch.equal(wide, codes)
    assert torch.equal(wide_byte, byte)
    assert torch.equal(byte, wanted_byte)
    kind = ELEM_TYPES[elem].dtype
    np.testing.assert_array_equal(codes.view(kind).double().numpy(), wanted.view(kind).double().numpy())
    values, scales = integer_reference.quantize(x[::16, :2048].float().numpy(), elem, rounding)
    np.testing.assert_array_equal(byte[::16, :64].numpy(), scales)
    np.testing.assert_array_equal(codes[::16, :2048].view(kind).double().numpy(), values)


@ELEM
@ROUNDING
@pytest.mark.parametrize("side", ["rows", "columns"])
def test_packed_cast_of_special_values_equals_fp32_cast(elem, rounding, side):
    """The bits of FP32's form, also of zeros of both signs, of subnormals and of blocks of NaN and Inf."""
    exponents = torch.randint(-133, 128, (2, 4)).repeat_interleave(32, 0).repeat_interleave(32, 1)
    x = (torch.randn(64, 128) * torch.exp2(exponents.float())).bfloat16()
    x[3, 7], x[40, 70], x[50, 100] = float("nan"), float("inf"), -float("inf")
    x[:32, 64:96] = -0.0
    x[32:, :32] = torch.randint(-128, 128, (32, 32), dtype=torch.int16).view(torch.bfloat16).abs()
    codes, byte = cast(x, elem, rounding, f"packed {side}")
    wanted, wanted_byte = cast(x, elem, rounding, side)
    assert torch.equal(byte, wanted_byte)
    kind = ELEM_TYPES[elem].dtype
    is_nan = wanted.view(kind).float().isnan()
    assert torch.equal(codes.view(kind).float().isnan(), is_nan)
    assert torch.equal(codes[~is_nan], wanted[~is_nan])


@ELEM
@ROUNDING
def test_packed_values_equal_the_integer_reference(elem, rounding):
    """Those of codes, held to the integer reference; and with them, to the bit, those that are never FP8.

    Every amax of BF16, the ends of its range too: values are rounded to BF16 once.
    """
    x = every_amax(32, 1 << 15, 1 << 14)
    values = torch.empty(2, *x.shape)
    computed = torch.empty(2, *x.shape, dtype=torch.bfloat16)
    value_kernel[(1,)](x, computed, values, x.shape[1], elem, rounding)
    for side, (way, dim) in enumerate((("rows", 1), ("columns", 0))):
        codes, byte = cast(x, elem, rounding, way)
        exponents = byte.double().sub(127).masked_fill(byte == 255, float("nan"))
        scale = torch.exp2(exponents).repeat_interleave(32, dim)
        wanted = (codes.view(ELEM_TYPES[elem].dtype).double() * scale).float()
        is_nan = wanted.isnan()
        assert torch.equal(values[side].isnan(), is_nan)
        assert torch.equal(values[side][~is_nan], wanted[~is_nan])
        zeros = wanted == 0
        assert torch.equal(values[side].signbit()[zeros], wanted.signbit()[zeros])
        assert torch.equal(computed[side].isnan(), is_nan)
        rounded = wanted.bfloat16()[~is_nan]
        assert torch.equal(computed[side][~is_nan].view(torch.int16), rounded.view(torch.int16))


def test_producer_rounds_to_bf16_and_bounds_the_sigmoid():
    """BF16 of every FP32 near a tie; a sigmoid within its bound of the exact one."""
    high = torch.arange(65536, dtype=torch.int32) << 16
    x = (high[:, None] | torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF, 0x4000, 0xC000])).flatten()
    x = x.view(torch.float32)
    out, rounded = torch.empty_like(x), torch.empty(x.shape, dtype=torch.bfloat16)
    producer_kernel[(x.numel() // 8192,)](x, out, rounded, 8192)
    assert torch.equal(rounded.isnan(), x.isnan())
    assert torch.equal(rounded[~x.isnan()], x.bfloat16()[~x.isnan()])
    exact = torch.sigmoid(x.double())
    seen = ~x.isnan() & (exact > 2.0**-126)
    assert ((out.double() - exact).abs() / exact)[seen].max() <= 2.0**-17
    assert out[x.isnan()].isnan().all()


def test_the_bound_of_the_approximations():
    """Every BF16 gate, each instruction as far off as the PTX ISA lets it be: at most one last place."""
    x = np.arange(-32768, 32768).astype(np.int16).view(np.uint16)
    x = torch.from_numpy(x.astype(np.int32) << 16).view(torch.float32).numpy()
    x = x[np.isfinite(x)]
    exact = 1 / (1 + np.exp(-x.astype(np.float64)))
    worst = 0.0
    for power in (-(2.0**-22), 2.0**-22):  # ex2.approx.ftz.f32: 2^-22 relative
        for inverse in (-1, 1):  # rcp.approx.ftz.f32: 1 ulp
            t = (x * np.float32(-1.4426950408889634)).astype(np.float32)
            e = (np.exp2(t.astype(np.float64)) * (1 + power)).astype(np.float32)
            total = (e + np.float32(1)).astype(np.float32)
            result = np.nextafter((np.float32(1) / total).astype(np.float32), np.float32(inverse * 4))
            result = np.where(np.isinf(total) | (result < 2.0**-126), 0, result).astype(np.float64)
            seen = exact >= 2.0**-125
            worst = max(worst, (np.abs(result - exact) / exact)[seen].max())
            product = torch.from_numpy((x * result)[seen]).bfloat16()
            wanted = torch.from_numpy((x * exact)[seen]).bfloat16()
            apart = (product.view(torch.int16).int() - wanted.view(torch.int16).int()).abs()
            assert apart.max() <= 1
            assert (apart != 0).double().mean() < 0.01
    assert worst <= 2.0**-17, worst
