"""An MX cast written from the standard, on integers, sharing no code with mxcompile.

Works on numpy arrays, one Python-level idea at a time: the exponent of a block is found by comparing exact
rationals (float64 and integers), never through the bit tricks or FP32 arithmetic of the implementation.
"""

from __future__ import annotations

import math

import numpy as np
import torch

FP8 = {"e4m3": (448.0, 8, 3), "e5m2": (57344.0, 15, 2)}
"""Largest element, its exponent, and bits of the mantissa."""

ELEMS = {**FP8, "int8": (127 / 64, 0, 6)}
"""The same of the types that stored weights have one a byte. An integer has no exponent: k/64 is below 2."""

TORCH = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2, "int8": torch.int8}


def numpy_dtype(elem: str) -> np.dtype:
    """The element type as ml_dtypes has it, which the tests of a GPU do without."""
    import ml_dtypes

    return np.dtype({"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2}[elem])


def element_values(codes: np.ndarray, elem: str) -> np.ndarray:
    """The values of elements given as bytes, in FP64."""
    if elem == "int8":
        return codes.view(np.int8) / 64.0
    return codes.view(numpy_dtype(elem)).astype(np.float64)


def element_codes(values: np.ndarray, elem: str) -> np.ndarray:
    """The bytes of the elements nearest to FP64 values of at most the largest element; ties to even."""
    if elem == "int8":
        return np.rint(values * 64.0).astype(np.int8).view(np.uint8)
    return values.astype(np.float32).astype(numpy_dtype(elem)).view(np.uint8)


def scale_byte(amax: float, elem: str, rounding: str) -> int:
    """E8M0 byte for one finite or non-finite FP32 amax, from the definitions of the roundings."""
    return scale_byte_of(amax, *FP8[elem], rounding)


def scale_byte_of(amax: float, largest: float, emax: int, mantissa_bits: int, rounding: str) -> int:
    """The same for any element type."""
    if math.isnan(amax) or math.isinf(amax):
        return 255
    if amax == 0.0:
        return 0
    mantissa, exponent = math.frexp(amax)  # amax = mantissa · 2^exponent, 1/2 ≤ mantissa < 1
    mantissa, exponent = 2 * mantissa, exponent - 1
    up = {
        "rceil": mantissa > largest / 2.0**emax,  # amax / scale must not exceed the largest element
        "even": mantissa + 2.0 ** -(mantissa_bits + 1) >= 2.0,
        "ceil": mantissa != 1.0,
    }.get(rounding, False)
    return min(max(exponent + 127 + up - emax, 0), 254)


def quantize(x: np.ndarray, elem: str = "e4m3", rounding: str = "rceil") -> tuple[np.ndarray, np.ndarray]:
    """Elements (as float64 values) and bytes of `x` [rows, n] FP32, in blocks of 32 along the last axis."""
    dtype, (largest, _, _) = numpy_dtype(elem), FP8[elem]
    rows, length = x.shape
    blocks = -(-length // 32)
    values = np.zeros((rows, length))
    scales = np.zeros((rows, blocks), np.uint8)
    for row in range(rows):
        for block in range(blocks):
            part = x[row, 32 * block : 32 * block + 32].astype(np.float64)
            amax = np.nan if np.isnan(part).any() else np.abs(part).max()
            byte = scale_byte(float(amax), elem, rounding)
            scales[row, block] = byte
            if byte == 255:
                values[row, 32 * block : 32 * block + 32] = np.nan
                continue
            scaled = np.clip(part * 2.0 ** (127 - byte), -largest, largest)
            rounded = scaled.astype(np.float32).astype(dtype).astype(np.float64)
            values[row, 32 * block : 32 * block + 32] = rounded
    return values, scales


def round_trip(
    x: torch.Tensor, dim: int, elem: str = "e4m3", rounding: str = "rceil", square: bool = False
) -> torch.Tensor:
    """`x` [m, n], finite, quantized along `dim` and back, in FP32; vectorised, for whole models.

    Scales come from `frexp` on float64.
    """
    largest, emax, mantissa_bits = FP8[elem]
    moved = x.detach().to(torch.float64).movedim(dim, -1)
    length = moved.shape[-1]
    padded = torch.nn.functional.pad(moved, (0, -length % 32))
    blocks = padded.unflatten(-1, (-1, 32))
    amax = blocks.abs().amax(-1, keepdim=True)
    if square:
        rows = amax.shape[0]
        tiles = torch.nn.functional.pad(amax, (0, 0, 0, 0, 0, -rows % 32)).unflatten(0, (-1, 32))
        amax = tiles.amax(1, keepdim=True).expand(-1, 32, -1, -1).flatten(0, 1)[:rows]
    mantissa, exponent = torch.frexp(amax.clamp(min=2.0**-126))
    mantissa, exponent = 2 * mantissa, exponent - 1
    if rounding == "rceil":
        exponent = exponent + (mantissa > largest / 2.0**emax)
    elif rounding == "even":
        exponent = exponent + (mantissa + 2.0 ** -(mantissa_bits + 1) >= 2.0)
    elif rounding == "ceil":
        exponent = exponent + (mantissa > 1.0)
    scale = torch.exp2((exponent - emax).clamp(-127, 127).to(torch.float64))
    quantized = (blocks / scale).clamp(-largest, largest).to(torch.float32).to(TORCH[elem])
    values = (quantized.to(torch.float64) * scale).flatten(-2)[..., :length]
    return values.movedim(-1, dim).to(torch.float32)


def sqnr_db(reference: torch.Tensor, other: torch.Tensor) -> float:
    """10·log10 of signal over error power, both in FP64; inf for equal tensors."""
    signal = reference.detach().to(torch.float64)
    error = (signal - other.detach().to(torch.float64)).square().sum()
    return float("inf") if error == 0 else float(10 * torch.log10(signal.square().sum() / error))


def noise_db(expected: torch.Tensor, computed: torch.Tensor, largest: float) -> float:
    """Signal to noise; less than 1e-4 of the `largest` norm is noise, as is the gradient of a key's bias."""
    noise = (expected - computed).norm().item()
    return 20 * math.log10(max(expected.norm().item(), 1e-4 * largest) / noise) if noise else math.inf
