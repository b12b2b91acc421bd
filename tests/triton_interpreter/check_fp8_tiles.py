"""The device functions of the FP8 cast with FP32 scales, bit for bit, against the reference's division."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from helpers.bits import same_bits
from helpers.spread import every_bf16

from mxcompile.formats import ELEM_TYPES, Format
from mxcompile.formats.encoding import as_fnuz, encode_tensors, fp32_scale
from mxcompile.lowering.kernels import fp8_tiles

ELEM = pytest.mark.parametrize("elem", ELEM_TYPES)


@triton.jit
def cast_kernel(
    x_ptr, scale_ptr, out_ptr, COLUMNS: tl.constexpr, ELEM: tl.constexpr, WIDE: tl.constexpr,
    STATEFUL: tl.constexpr, NATIVE: tl.constexpr, FNUZ: tl.constexpr,
):  # fmt: skip
    row, at = tl.program_id(0), tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + row * COLUMNS + at).to(tl.float32)
    power, scaled, inverse = fp8_tiles.parts(tl.load(scale_ptr + row + tl.zeros((1,), tl.int32)))
    y = fp8_tiles.quotient(x, power, scaled, inverse, ELEM, WIDE, STATEFUL)
    tl.store(out_ptr + row * COLUMNS + at, fp8_tiles.encode(y, ELEM, NATIVE, NATIVE, FNUZ))


@triton.jit
def scale_kernel(amax_ptr, out_ptr, SIZE: tl.constexpr, ELEM: tl.constexpr, POW2: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, fp8_tiles.scale_of(tl.load(amax_ptr + at), ELEM, POW2))


@triton.jit
def transpose_kernel(x_ptr, out_ptr, R: tl.constexpr, C: tl.constexpr, PERM: tl.constexpr):
    rows = fp8_tiles.order(R, PERM)
    codes = tl.load(x_ptr + rows[:, None] * C + tl.arange(0, C)[None, :])
    at = tl.arange(0, C)[:, None] * R + tl.arange(0, R)[None, :]
    tl.store(out_ptr + at, fp8_tiles.transposed(codes, PERM))


def scales(count: int) -> torch.Tensor:
    """Significands that are hard to divide by, and any; exponents from the smallest to the largest."""
    hard = torch.tensor([(k << 20) + d for k in range(8, 16) for d in range(-8, 9)])
    hard = torch.cat([hard, torch.tensor([(1 << 24) - 1, (1 << 23) + 1])]).clamp(1 << 23, (1 << 24) - 1)
    any_of_them = torch.randint(1 << 23, 1 << 24, (count,))
    significands = torch.cat([hard, any_of_them])
    exponents = torch.randint(-149, 97, significands.shape)
    factors = torch.ldexp(significands.double(), exponents.double()).float()
    subnormal = torch.randint(1, 1 << 23, (16,), dtype=torch.int32).view(torch.float32)
    return torch.cat(
        [factors[factors.isfinite() & (factors > 0)], subnormal, torch.tensor([2.0**-149, 1.0, torch.nan])]
    )


def cast(x: torch.Tensor, scale: torch.Tensor, elem: str, *, stateful=False, native=True, fnuz=False):
    x, scale, out = x.contiguous(), scale.contiguous(), torch.empty(x.shape, dtype=torch.uint8)
    cast_kernel[(len(x),)](
        x, scale, out, COLUMNS=x.shape[1], ELEM=elem, WIDE=x.dtype is torch.float32,
        STATEFUL=stateful, NATIVE=native, FNUZ=fnuz,
    )  # fmt: skip
    return out


def elements(x: torch.Tensor, scale: torch.Tensor, fmt: Format) -> torch.Tensor:
    return encode_tensors(x, -1, fmt, scale=scale)[0]


@ELEM
@pytest.mark.parametrize("native", [True, False])
def test_fp8_cast_of_every_bf16_value_equals_reference(elem: str, native: bool):
    """Under scales that a tensor which holds it may have: quotients are at most the largest element."""
    fmt, scale = Format.parse(f"{elem} channel nearest"), scales(8)[::10]
    x = every_bf16().repeat(len(scale), 1)
    in_range = x.isfinite() & (x.double().abs() <= scale.double().unsqueeze(1) * fmt.elem.max * 1.01)
    x = torch.where(in_range | scale.isnan().unsqueeze(1), x, 0.0).to(torch.bfloat16)
    codes = cast(x, scale, elem, native=native)
    assert same_bits(codes.view(fmt.elem.dtype), elements(x, scale.unsqueeze(1), fmt))


@ELEM
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
def test_quotients_near_rounding_midpoints_match_the_reference(elem: str, dtype: torch.dtype):
    """x next to s · m, for every m halfway between two elements."""
    fmt, scale = Format.parse(f"{elem} channel nearest"), scales(32)
    codes = torch.arange(0, 0x7E if elem == "e4m3" else 0x7B, dtype=torch.uint8)
    below, above = (c.view(fmt.elem.dtype).double() for c in (codes, codes + 1))
    middle = (below + above) / 2
    x = (scale.double().unsqueeze(1) * middle).to(dtype)
    x = torch.cat([x, torch.nextafter(x, x * 2), torch.nextafter(x, x * 0)], 1)
    x = torch.where(x.isfinite(), x, 0.0)  # a tensor that holds others has the scale NaN
    x = torch.nn.functional.pad(torch.cat([x, -x], 1), (0, 1024 - 6 * len(codes)))
    assert same_bits(cast(x, scale, elem).view(fmt.elem.dtype), elements(x, scale.unsqueeze(1), fmt))


@ELEM
def test_fp8_cast_with_delayed_scale_saturates_as_reference(elem: str):
    """What is larger saturates, what is not finite becomes NaN: every BF16 value under every scale."""
    fmt = Format.parse(f"{elem} tensor nearest delayed:4:0")
    scale = torch.cat([scales(8)[:-1:20], torch.tensor([torch.nan])])
    x = every_bf16().repeat(len(scale), 1)
    wanted = torch.cat([elements(row[None], s.reshape(1, 1), fmt) for row, s in zip(x, scale, strict=True)])
    assert same_bits(cast(x, scale, elem, stateful=True).view(fmt.elem.dtype), wanted)


@ELEM
@pytest.mark.parametrize("native", [True, False])
def test_elements_of_half_the_value(elem: str, native: bool):
    fmt, x = Format.parse(f"{elem} channel nearest"), every_bf16().reshape(64, 1024)
    x = x.where(x.float().abs() <= 448, torch.nan)
    scale = torch.full((64,), 1.0)
    wanted = as_fnuz(elements(x, scale.unsqueeze(1), fmt)).view(torch.uint8)
    assert torch.equal(cast(x, scale, elem, native=native, fnuz=True), wanted)


@ELEM
@pytest.mark.parametrize("derivation", ["nearest", "pow2"])
def test_fp32_scale_of_every_amax_equals_reference(elem: str, derivation: str):
    amax = torch.cat([every_bf16().float().abs(), torch.tensor([0.0, 2.0**-149, 3.4e38])])
    amax = torch.nn.functional.pad(amax, (0, (1 << 17) - len(amax)))
    out = torch.empty_like(amax)
    scale_kernel[(1,)](amax, out, SIZE=1 << 17, ELEM=elem, POW2=derivation == "pow2")
    torch.testing.assert_close(
        out, fp32_scale(amax, Format.parse(f"{elem} channel {derivation}")), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.parametrize("perm", [1, 4, 8])
def test_transposed_tile_equals_transposed_tensor(perm: int):
    x, out = torch.randint(0, 256, (64, 32), dtype=torch.uint8), torch.empty(32, 64, dtype=torch.uint8)
    transpose_kernel[(1,)](x, out, R=64, C=32, PERM=perm)
    assert torch.equal(out, x.t())


def test_amax_of_rows_columns_and_tile_propagates_nan():
    x = torch.randn(16, 128)
    x[3, 5], x[4, 6], x[5, 7] = torch.nan, torch.inf, -7.0
    largest = torch.empty(16 + 128 + 1)
    amax_kernel[(1,)](x, largest)
    wanted = torch.cat([x.abs().amax(1), x.abs().amax(0), x.abs().amax().reshape(1)])
    torch.testing.assert_close(largest, wanted, rtol=0, atol=0, equal_nan=True)


@triton.jit
def amax_kernel(x_ptr, out_ptr):
    row, column = tl.arange(0, 16), tl.arange(0, 128)
    x = tl.load(x_ptr + row[:, None] * 128 + column[None, :])
    tl.store(out_ptr + row[:, None], fp8_tiles.block_amax(x, False))
    tl.store(out_ptr + 16 + column[None, :], fp8_tiles.column_amax(x))
    tl.store(out_ptr + 144 + tl.zeros((1, 1), tl.int32), fp8_tiles.block_amax(x, True))
