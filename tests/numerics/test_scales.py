"""Scale bytes: every BF16 amax, and FP32 amax around the values where the byte steps."""

import numpy as np
import pytest
import torch
from helpers.reference import FP8, TORCH, scale_byte

import mxcompile

ROUNDINGS = ("rceil", "floor", "ceil", "even")


def bytes_of(amax: torch.Tensor, elem: str, rounding: str) -> np.ndarray:
    """Bytes of blocks that hold each value of `amax` once, in the middle, and smaller ones around it."""
    blocks = torch.zeros(amax.numel(), 32, dtype=amax.dtype)
    blocks[:, 0] = -0.0
    blocks[:, 17] = amax
    quantized = mxcompile.quantize(blocks, elem_dtype=TORCH[elem], rounding=rounding)
    return quantized.scale.view(torch.uint8).squeeze(1).numpy()


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("elem", FP8)
def test_scale_byte_of_every_bf16_amax_equals_reference(elem: str, rounding: str):
    values = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    bytes_ = bytes_of(values, elem, rounding)
    expected = [scale_byte(abs(v), elem, rounding) for v in values.to(torch.float64).tolist()]
    np.testing.assert_array_equal(bytes_, expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
@pytest.mark.parametrize("elem", FP8)
def test_scale_byte_around_its_steps_equals_reference(elem: str, rounding: str):
    """largest·2^k, 2^k and the thresholds of EVEN, with the 4 FP32 neighbours on each side."""
    largest, emax, mantissa_bits = FP8[elem]
    steps = [largest / 2.0**emax, 1.0, 2.0 - 2.0 ** -(mantissa_bits + 1)]
    with np.errstate(over="ignore"):
        anchors = np.array([step * 2.0**k for step in steps for k in range(-149, 128)], dtype=np.float32)
    around = (anchors.view(np.int32)[:, None] + np.arange(-4, 5)).ravel()
    around = around[(around >= 0) & (around <= 0x7F800001)].astype(np.int32).view(np.float32)
    bytes_ = bytes_of(torch.from_numpy(around), elem, rounding)
    expected = [scale_byte(float(v), elem, rounding) for v in around.astype(np.float64)]
    np.testing.assert_array_equal(bytes_, expected)


@pytest.mark.parametrize("rounding", ROUNDINGS)
def test_scale_byte_of_random_fp32_equals_reference(rounding: str):
    bits = np.random.default_rng(0).integers(0, 1 << 32, 20_000, dtype=np.uint32)
    values = bits.view(np.float32)
    bytes_ = bytes_of(torch.from_numpy(values.copy()), "e4m3", rounding)
    expected = [scale_byte(abs(v), "e4m3", rounding) for v in torch.from_numpy(values).tolist()]
    np.testing.assert_array_equal(bytes_, expected)
