"""Packed FP4: bit for bit the cast to codes of a byte each, and the packing that others read."""

from __future__ import annotations

import pytest
import torch
from helpers.bits import same_bits
from torch.library import opcheck

import mxcompile
from mxcompile import MXTensor, ops
from mxcompile.errors import FormatError
from mxcompile.formats import Format, ScaleType, Tile, stored_elem
from mxcompile.formats.elements import E2M1
from mxcompile.formats.encoding import (
    decode_tensors,
    element_values,
    encode_stored,
    encode_tensors,
    pack,
    unpack,
)
from mxcompile.formats.types import Rounding

BF16 = torch.bfloat16
WORD = str(Format(elem=E2M1))
EVERY = torch.arange(256, dtype=torch.uint8)


@pytest.mark.parametrize("dtype", [torch.float32, BF16, torch.float16])
@pytest.mark.parametrize("dim", [-1, 0])
def test_every_byte_under_every_scale(dim: int, dtype: torch.dtype):
    packed, scales = EVERY.view(16, 16).repeat(256, 1), EVERY.repeat_interleave(16)[:, None].contiguous()
    if dim == 0:
        packed, scales = packed.t().contiguous(), scales.t().contiguous()
    weight = MXTensor(packed.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu), dim)
    codes = torch.stack([packed & 15, packed >> 4], packed.ndim if dim else 1)
    codes = codes.flatten(-2) if dim else codes.flatten(0, 1)
    assert torch.equal(unpack(packed, dim, E2M1), codes)
    assert torch.equal(pack(codes, dim, E2M1), packed)
    table = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    values = torch.cat([table, -table])[codes.long()]
    power = torch.exp2(scales.double() - 127).where(scales != 255, torch.nan)
    exact = (values.double() * power.repeat_interleave(32, dim)).float().to(dtype)
    assert same_bits(weight.dequantize(dtype), exact)
    assert same_bits(ops.decode(packed, scales, dim, f"{WORD} packed", dtype), exact)


@pytest.mark.parametrize("rounding", list(Rounding))
def test_stored_mxfp4_weight_equals_the_cast_of_the_precision(rounding: str):
    """All BF16 values, in blocks of neighbours and of strangers, with NaN and zeros of both signs."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(BF16)
    form = Format(elem=E2M1, rounding=Rounding(rounding))
    for x in (every.view(2048, 32), every.view(32, 2048).t().contiguous(), every[: 1 << 10].view(-1, 2)):
        codes, scales = encode_tensors(x, -1, form)
        weight = mxcompile.quantize(x, elem_dtype=torch.float4_e2m1fn_x2, rounding=rounding)
        assert torch.equal(weight.qdata, codes[:, 0::2] | codes[:, 1::2] << 4)
        assert torch.equal(weight.scale_bytes, scales)
        assert same_bits(weight.dequantize(BF16), decode_tensors(codes, scales, -1, form, BF16))


def test_blocks_that_are_not_numbers_and_blocks_of_zeros():
    x = torch.tensor([0.0, -0.0]).repeat(4, 35)
    x[1, 3], x[2, 40] = torch.nan, torch.inf
    weight = mxcompile.quantize(x, elem_dtype=torch.float4_e2m1fn_x2)
    values = weight.dequantize(torch.float32)
    assert weight.scale_bytes.tolist() == [[0, 0, 0], [255, 0, 0], [0, 255, 0], [0, 0, 0]]
    assert values[1, :32].isnan().all()
    assert values[2, 32:64].isnan().all()
    assert torch.equal(values[0].signbit(), x[0].signbit())


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (5, 2), (1, 70), (2, 3, 96)], ids=str)
def test_quantize_packs_any_even_length(shape: tuple[int, ...]):
    x = torch.randn(shape)
    weight, form = mxcompile.quantize(x, elem_dtype=torch.float4_e2m1fn_x2), Format(elem=E2M1)
    values = decode_tensors(*encode_tensors(x, -1, form), -1, form, x.dtype)
    assert weight.shape == x.shape
    assert torch.equal(weight.dequantize(torch.float32), values)


def test_an_odd_length_is_an_error():
    for refused in (
        lambda: mxcompile.quantize(torch.randn(2, 33), elem_dtype=torch.float4_e2m1fn_x2),
        lambda: encode_stored(torch.randn(33, 2), 0, Format(elem=E2M1)),
        lambda: pack(torch.zeros(2, 33, dtype=torch.uint8), -1, E2M1),
    ):
        with pytest.raises(FormatError, match="2 e2m1 elements share a byte, and k=33 is odd"):
            refused()
    with pytest.raises(FormatError, match=r"uint8 .*allowed: .*float4_e2m1fn_x2"):
        stored_elem(torch.uint8)


def test_torchao_and_compressed_tensors_read_this_packing():
    from compressed_tensors.compressors.nvfp4.helpers import pack_fp4_to_uint8, unpack_fp4_from_uint8
    from torchao.prototype.mx_formats.kernels import pack_uint4, unpack_uint4

    codes = unpack(EVERY.view(16, 16), -1, E2M1)
    values = decode_tensors(codes, torch.full((16, 1), 127, dtype=torch.uint8), -1, Format(elem=E2M1), BF16)
    assert torch.equal(unpack_uint4(EVERY.view(16, 16)), codes)
    assert torch.equal(pack_uint4(codes), EVERY.view(16, 16))
    assert same_bits(unpack_fp4_from_uint8(EVERY.view(16, 16), 16, 32), values)
    assert torch.equal(pack_fp4_to_uint8(values), EVERY.view(16, 16))


def test_decode_and_products_of_packed_weights_pass_opcheck():
    packed, scales, _ = encode_stored(torch.randn(6, 70), -1, Format(elem=E2M1))
    word = f"{WORD} packed"
    opcheck(ops.decode, (packed, None, -1, word, torch.uint8))
    opcheck(ops.decode, (packed, scales, -1, word, BF16))
    x = torch.randn(3, 70)
    for bias in (None, torch.randn(6)):
        opcheck(ops.weight_only_mm, (x, packed, scales, bias, BF16, word))
    exact = x @ ops.decode(packed, scales, -1, word, torch.float32).t()
    assert torch.equal(ops.weight_only_mm(x, packed, scales, None, torch.float32, word), exact)


NVFP4 = Format(elem=E2M1, rounding=None, tile=Tile(1, 16), scale=ScaleType.E4M3)


@pytest.mark.parametrize("dim", [-1, 0])
@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_two_levels_are_the_cast_of_the_precision_over_its_factor(dim: int, dtype: torch.dtype):
    """Codes and scales are those of a cast in a graph; values element · (scale / G), each rounded to FP32."""
    x = torch.randn(48, 80, generator=torch.Generator().manual_seed(0)) * torch.logspace(-4, 3, 80)
    weight = mxcompile.quantize(x, block_dim=dim, elem_dtype=torch.float4_e2m1fn_x2, rounding="two-level")
    amax = x.abs().max()
    codes, scales = encode_tensors(x, dim, NVFP4, amax=amax.reshape(1))
    assert torch.equal(unpack(weight.qdata, dim, E2M1), codes)
    assert torch.equal(weight.scale.view(torch.uint8), scales.view(torch.uint8))
    assert torch.equal(weight.global_scale, torch.full([1, 1], 2688.0) / amax)
    over = (scales.double() / weight.global_scale.double()).float().double().repeat_interleave(16, dim)
    exact = (element_values(codes, E2M1).double() * over).float()
    assert torch.equal(weight.dequantize(dtype), exact.to(dtype))
    assert (weight.dequantize(torch.float32) - x).norm() < 0.12 * x.norm()


def test_two_level_scales_decode_zeros_and_nonfinite_values():
    how = {"elem_dtype": torch.float4_e2m1fn_x2, "rounding": "two-level"}
    zeros = torch.zeros(2, 32)
    assert torch.equal(mxcompile.quantize(zeros, **how).dequantize(), zeros.to(BF16))
    for value in (torch.inf, torch.nan):
        weight = mxcompile.quantize(torch.tensor([[1.0, value]]), **how)
        assert weight.dequantize().isnan().all()
    with pytest.raises(FormatError, match="rounding"):
        mxcompile.quantize(torch.zeros(2, 32), rounding="two-level")


def test_operators_of_two_levels_pass_opcheck():
    packed, scales, whole = encode_stored(torch.randn(6, 70), -1, NVFP4)
    arguments = packed, scales.view(torch.float8_e4m3fn), -1, f"{NVFP4} packed", BF16
    checks = ("test_faketensor", "test_aot_dispatch_dynamic")  # the others compare what CPUs cannot, FP8
    opcheck(ops.decode, (*arguments, None, whole), test_utils=checks)
    opcheck(ops.decode, arguments, test_utils=checks)
    codes = ops.decode(packed, None, -1, arguments[3], torch.uint8)
    opcheck(ops.decode, (codes, arguments[1], -1, str(NVFP4), BF16, None, whole), test_utils=checks)
