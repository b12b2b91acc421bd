"""The device functions of the MX cast, exhaustively: every BF16 amax, every byte, every FP8 code."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from helpers import reference as integer_reference
from helpers.spread import every_bf16

from mxcompile.formats import ELEM_TYPES, Rounding
from mxcompile.lowering.kernels import tiles

NUMPY = {"e4m3": np.dtype(ml_dtypes.float8_e4m3fn), "e5m2": np.dtype(ml_dtypes.float8_e5m2)}
NATIVE = pytest.mark.parametrize("native", [True, False])
ELEM = pytest.mark.parametrize("elem", ELEM_TYPES)


@triton.jit
def byte_kernel(x_ptr, out_ptr, inverse_ptr, SIZE: tl.constexpr, ELEM: tl.constexpr, ROUNDING: tl.constexpr):
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    bits = tiles.magnitude_bits(tl.load(x_ptr + at))
    byte = tiles.scale_byte(bits, ELEM, ROUNDING)
    tl.store(out_ptr + at, byte.to(tl.uint8))
    tl.store(inverse_ptr + at, tiles.inverse_scale(byte))


@triton.jit
def value_kernel(byte_ptr, value_ptr):
    at = tl.arange(0, 256)
    tl.store(value_ptr + at, tiles.scale_value(tl.load(byte_ptr + at)))


@triton.jit
def encode_kernel(x_ptr, out_ptr, SIZE: tl.constexpr, ELEM: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(out_ptr + at, tiles.encode(tl.load(x_ptr + at), ELEM, "floor", NATIVE))


@triton.jit
def decode_kernel(code_ptr, out_ptr, ELEM: tl.constexpr, NATIVE: tl.constexpr):
    at = tl.arange(0, 256)
    tl.store(out_ptr + at, tiles.decode(tl.load(code_ptr + at), ELEM, NATIVE))


@triton.jit
def dequantize_kernel(code_ptr, scale_ptr, out_ptr, ELEM: tl.constexpr):
    at = tl.arange(0, 64)[:, None] * 64 + tl.arange(0, 64)[None, :]
    scale = tl.load(scale_ptr + tl.arange(0, 64)[:, None] * 2 + tl.arange(0, 2)[None, :])
    tl.store(out_ptr + at, tiles.dequantize_rowwise(tl.load(code_ptr + at), scale, ELEM, True))


def around(values: torch.Tensor) -> torch.Tensor:
    """FP32 `values` and their neighbours up to two ulps away."""
    bits = values.view(torch.int32)
    return torch.stack([bits + step for step in (-2, -1, 0, 1, 2)]).view(torch.float32).flatten()


@ELEM
@pytest.mark.parametrize("rounding", Rounding)
def test_scale_byte_of_every_amax_equals_integer_reference(elem, rounding):
    mantissas = torch.tensor([1.0, 1.5, 1.75, 1.875, 1.9375])
    edges = around((mantissas[:, None] * torch.exp2(torch.arange(-120, 126).float())).flatten())
    subnormal = torch.arange(1, 1 << 23, 8191, dtype=torch.int32).view(torch.float32)
    x = torch.cat([every_bf16().float(), edges, subnormal])
    x = torch.nn.functional.pad(x, (0, -x.numel() % 4096))
    out = torch.empty(x.shape, dtype=torch.uint8)
    inverse = torch.empty(x.shape)
    byte_kernel[(x.numel() // 4096,)](x, out, inverse, 4096, elem, str(rounding))
    wanted = np.array([integer_reference.scale_byte(amax, elem, rounding) for amax in x.abs().tolist()])
    np.testing.assert_array_equal(out.numpy(), wanted)
    exact = np.where(wanted == 255, np.nan, np.exp2(127.0 - wanted))
    np.testing.assert_array_equal(inverse.numpy().astype(np.float64), exact)


def test_value_of_every_scale_byte_is_its_power():
    byte = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    value = torch.empty(256)
    value_kernel[(1,)](byte, value)
    exponents = torch.arange(255, dtype=torch.float64) - 127
    assert torch.equal(value[:255].double(), torch.exp2(exponents))
    assert value[255].isnan()


@ELEM
@NATIVE
def test_encode_of_every_code_and_tie_equals_ml_dtypes(elem, native):
    """Every BF16 value, and FP32 values around every code and every tie between two codes."""
    codes = np.arange(255, dtype=np.uint8).view(NUMPY[elem]).astype(np.float32)
    finite = np.unique(codes[np.isfinite(codes)])
    between = torch.from_numpy(np.concatenate([finite, (finite[1:] + finite[:-1]) / 2]))
    x = torch.cat([every_bf16().float(), around(between[between != 0])])
    x = torch.nn.functional.pad(x, (0, (1 << 17) - x.numel()))
    out = torch.empty(x.shape, dtype=torch.uint8)
    encode_kernel[(1,)](x, out, x.numel(), elem, native)
    largest = ELEM_TYPES[elem].max
    clamped = np.where(np.isnan(x.numpy()), x.numpy(), np.clip(x.numpy(), -largest, largest))
    wanted = clamped.astype(NUMPY[elem])
    is_nan = np.isnan(clamped)
    np.testing.assert_array_equal(out.numpy()[~is_nan], wanted.view(np.uint8)[~is_nan])
    assert np.isnan(out.numpy().view(NUMPY[elem])[is_nan].astype(np.float32)).all()


@ELEM
@NATIVE
def test_decode_of_every_code_equals_ml_dtypes(elem, native):
    codes = torch.arange(256, dtype=torch.int32).to(torch.uint8)
    out = torch.empty(256)
    decode_kernel[(1,)](codes, out, elem, native)
    np.testing.assert_array_equal(out.numpy(), codes.numpy().view(NUMPY[elem]).astype(np.float32))


@ELEM
def test_dequantize_multiplies_codes_by_their_scale(elem):
    signs = (torch.randint(0, 2, (64, 64)) << 7).to(torch.uint8)
    codes = torch.randint(0, 0x7B, (64, 64), dtype=torch.uint8) | signs
    scale = torch.randint(0, 240, (64, 2), dtype=torch.uint8)
    scale[0, 0], scale[1, 1] = 0, 255
    out = torch.empty(64, 64)
    dequantize_kernel[(1,)](codes, scale, out, elem)
    factor = np.where(scale.numpy() == 255, np.nan, np.exp2(scale.numpy().astype(np.float64) - 127))
    wanted = codes.numpy().view(NUMPY[elem]).astype(np.float64) * np.repeat(factor, 32, 1)
    np.testing.assert_array_equal(out.numpy(), wanted.astype(np.float32))
