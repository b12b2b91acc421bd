"""Self-test of the repaired interpreter: every cast between float types, BF16 arithmetic, both dots."""

from __future__ import annotations

import itertools
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers.packed_operands import ALONG, MXFP4, NAN, NVFP4, values

DTYPES = {
    tl.float8e4nv: (torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn),
    tl.float8e5: (torch.float8_e5m2, ml_dtypes.float8_e5m2),
    tl.bfloat16: (torch.bfloat16, ml_dtypes.bfloat16),
    tl.float16: (torch.float16, np.float16),
    tl.float32: (torch.float32, np.float32),
}
NARROW = [tl.float8e4nv, tl.float8e5, tl.bfloat16, tl.float16]
LARGEST = {tl.float8e4nv: 448.0, tl.float8e5: 57344.0}


@triton.jit
def cast_kernel(x_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.load(x_ptr + at).to(out_ptr.dtype.element_ty))


@triton.jit
def arithmetic_kernel(x_ptr, y_ptr, out_ptr, less_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, x + y)
    tl.store(out_ptr + SIZE + at, x * y)
    tl.store(out_ptr + 2 * SIZE + at, -x)
    tl.store(less_ptr + at, x < y)


@triton.jit
def dot_kernel(a_ptr, b_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)[:, None] * SIZE + tl.arange(0, SIZE)[None, :]
    tl.store(out_ptr + at, tl.dot(tl.load(a_ptr + at), tl.load(b_ptr + at)))


@triton.jit
def dot_scaled_kernel(
    a_ptr, a_scale_ptr, b_ptr, b_scale_ptr, out_ptr, SIZE: tl.constexpr, A: tl.constexpr, B: tl.constexpr
):
    rows, blocks = tl.arange(0, SIZE)[:, None], tl.arange(0, SIZE // 32)[None, :]
    at = rows * SIZE + tl.arange(0, SIZE)[None, :]
    a_scale = tl.load(a_scale_ptr + rows * (SIZE // 32) + blocks)
    b_scale = tl.load(b_scale_ptr + rows * (SIZE // 32) + blocks)
    tl.store(out_ptr + at, tl.dot_scaled(tl.load(a_ptr + at), a_scale, A, tl.load(b_ptr + at), b_scale, B))


def all_values(kind) -> torch.Tensor:
    """Every value of a 1- or 2-byte type; of FP32, all BF16 bit patterns, each with low bits around a tie."""
    if kind is tl.float32:
        high = torch.arange(65536, dtype=torch.int32) << 16
        low = torch.tensor([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], dtype=torch.int32)
        return (high[:, None] | low).flatten()[: 1 << 18].view(torch.float32)
    codes, wide = torch.arange(256, dtype=torch.uint8), torch.arange(-32768, 32768, dtype=torch.int16)
    return (codes if kind in LARGEST else wide).view(DTYPES[kind][0])


def as_numpy(x: torch.Tensor, kind) -> np.ndarray:
    return x.view(torch.uint8).numpy().view(DTYPES[kind][1])


@pytest.mark.parametrize(("source", "target"), list(itertools.permutations(DTYPES, 2)), ids=str)
def test_interpreter_casts_every_value_as_numpy(source, target):
    x = all_values(source)
    out = torch.empty(x.shape, dtype=DTYPES[target][0])
    cast_kernel[(1,)](x, out, x.numel())
    wanted = as_numpy(x, source).astype(np.float64)
    if target in LARGEST:
        wanted = np.where(np.isnan(wanted), wanted, np.clip(wanted, -LARGEST[target], LARGEST[target]))
    wanted = wanted.astype(np.float32).astype(DTYPES[target][1])
    computed = as_numpy(out, target)
    is_nan = np.isnan(wanted.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(computed.astype(np.float32)), is_nan)
    bits = f"uint{8 * computed.dtype.itemsize}"
    np.testing.assert_array_equal(computed.view(bits)[~is_nan], wanted.view(bits)[~is_nan])


def test_interpreter_rounds_bf16_arithmetic_once():
    x, y = torch.randn(2, 1024, dtype=torch.float64).exp().to(torch.bfloat16)
    x[::3] *= -1
    out, less = torch.empty(3, 1024, dtype=torch.bfloat16), torch.empty(1024, dtype=torch.bool)
    arithmetic_kernel[(1,)](x, y, out, less, 1024)
    wide_x, wide_y = x.double(), y.double()
    assert torch.equal(out[0], (wide_x + wide_y).to(torch.bfloat16))
    assert torch.equal(out[1], (wide_x * wide_y).to(torch.bfloat16))
    assert torch.equal(out[2], -x)
    assert torch.equal(less, wide_x < wide_y)


def test_interpreter_dot_of_bf16_matches_fp64():
    a, b = torch.randn(2, 32, 32).to(torch.bfloat16)
    out = torch.empty(32, 32)
    dot_kernel[(1,)](a, b, out, 32)
    torch.testing.assert_close(out.double(), a.double() @ b.double(), rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("fmt_a", ["e4m3", "e5m2"])
@pytest.mark.parametrize("fmt_b", ["e4m3", "e5m2"])
def test_interpreter_dot_scaled_of_fp8_matches_fp64(fmt_a, fmt_b):
    dtypes = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
    a, b = torch.randn(64, 64).to(dtypes[fmt_a]), torch.randn(64, 64).to(dtypes[fmt_b])
    a_scale, b_scale = torch.randint(110, 144, (2, 64, 2), dtype=torch.uint8)
    a_scale[5, 1] = 255
    out = torch.empty(64, 64)
    codes = (a.view(torch.uint8), a_scale, b.view(torch.uint8), b_scale)
    dot_scaled_kernel[(1,)](*codes, out, 64, fmt_a, fmt_b)
    factors = [torch.exp2(scale.double() - 127).repeat_interleave(32, 1) for scale in (a_scale, b_scale)]
    wanted = (a.double() * factors[0]) @ (b.double() * factors[1].t())
    assert out[5].isnan().all()
    keep = torch.arange(64) != 5
    magnitude = (a.double() * factors[0]).abs() @ (b.double() * factors[1].t()).abs()
    error = (out.double() - wanted).abs()
    assert (error[keep] <= 64 * 2.0**-24 * magnitude[keep]).all()


@triton.jit
def packed_dot_kernel(
    a_ptr,
    a_scale_ptr,
    b_ptr,
    b_scale_ptr,
    out_ptr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    E4M3: tl.constexpr,
):
    rows, half, block = tl.arange(0, SIZE), tl.arange(0, SIZE // 2), tl.arange(0, SIZE // BLOCK)
    if E4M3:
        a_scale_ptr = a_scale_ptr.to(tl.pointer_type(tl.float8e4nv))
        b_scale_ptr = b_scale_ptr.to(tl.pointer_type(tl.float8e4nv))
    a = tl.load(a_ptr + rows[:, None] * (SIZE // 2) + half[None, :])
    b = tl.load(b_ptr + half[:, None] + rows[None, :] * (SIZE // 2))
    at = rows[:, None] * (SIZE // BLOCK) + block[None, :]
    a_scale, b_scale = tl.load(a_scale_ptr + at), tl.load(b_scale_ptr + at)
    out = tl.dot_scaled(a, a_scale, "e2m1", b, b_scale, "e2m1")
    tl.store(out_ptr + rows[:, None] * SIZE + rows[None, :], out)


@pytest.mark.parametrize("word", [MXFP4, NVFP4])
def test_interpreter_dot_scaled_of_packed_fp4_matches_fp64(word):
    """Every byte of codes, each half in its place; scales of both types, the largest and NaN among them."""
    along, size = ALONG[word], 64
    sides = []
    for _ in range(2):
        codes = torch.arange(256, dtype=torch.uint8)[torch.randperm(size * size // 2) % 256].view(size, -1)
        low, high = (110, 144) if word == MXFP4 else (0, 0x7F)
        scale = torch.randint(low, high, (size, size // along), dtype=torch.uint8)
        sides.append((codes, scale))
    sides[0][1][5, 1] = NAN[word]
    sides[1][1][7, 0] = 220 if word == MXFP4 else 0x7E
    out = torch.empty(size, size)
    packed_dot_kernel[(1,)](*sides[0], *sides[1], out, size, along, word == NVFP4)
    left, right = (values(codes, scale, size, word) for codes, scale in sides)
    assert out[5].isnan().all()
    keep = torch.arange(size) != 5
    error = (out.double() - left @ right.t()).abs()
    magnitude = left.abs() @ right.abs().t()
    assert (error[keep] <= size * 2.0**-24 * magnitude[keep]).all()


@triton.jit
def fma_kernel(x_ptr, y_ptr, z_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tl.fma(tl.load(x_ptr + at), tl.load(y_ptr + at), tl.load(z_ptr + at)))


def test_interpreter_fma_rounds_as_rational_arithmetic():
    """Against rational arithmetic, with sums that cancel and sums that are nearly halfway between numbers."""
    size = 4096
    x, y = torch.randn(2, size)
    z = -(x * y) * torch.where(torch.arange(size) % 2 == 0, 1.0, 1 + 2.0**-12)
    z[::4] = (x * y)[::4].abs() * 2.0**24
    x[:3], y[:3], z[:3] = 1 + 2.0**-23, 1 + 2.0**-23, torch.tensor([1.0, 2.0**25, -1.0])
    out = torch.empty(size)
    fma_kernel[(1,)](x, y, z, out, SIZE=size)
    terms = zip(x.tolist(), y.tolist(), z.tolist(), strict=True)
    exact = [Fraction(a) * Fraction(b) + Fraction(c) for a, b, c in terms]

    def errors(values: torch.Tensor) -> list[Fraction]:
        return [abs(Fraction(v) - wanted) for v, wanted in zip(values.tolist(), exact, strict=True)]

    for end in (torch.inf, -torch.inf):
        near = torch.nextafter(out, torch.full((), end))
        assert all(ours <= theirs for ours, theirs in zip(errors(out), errors(near), strict=True))


@triton.jit
def extreme_kernel(x_ptr, y_ptr, out_ptr, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    x, y = tl.load(x_ptr + at), tl.load(y_ptr + at)
    tl.store(out_ptr + at, tl.minimum(x, y))
    tl.store(out_ptr + SIZE + at, tl.maximum(x, y))
    tl.store(out_ptr + 2 * SIZE + at, tl.minimum(x, y, propagate_nan=tl.PropagateNan.ALL))


def test_a_number_beats_a_nan():
    """Unless NaN is to propagate."""
    nan = torch.nan
    x, y, out = torch.tensor([1.0, nan, 2.0, nan]), torch.tensor([nan, 3.0, 4.0, nan]), torch.empty(3, 4)
    extreme_kernel[(1,)](x, y, out, SIZE=4)
    expected = torch.tensor([[1.0, 3.0, 2.0, nan], [1.0, 3.0, 4.0, nan], [nan, nan, 2.0, nan]])
    torch.testing.assert_close(out, expected, rtol=0, atol=0, equal_nan=True)
