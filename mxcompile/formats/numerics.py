"""E8M0 scales in plain torch operations: the definition every kernel is held to.

    byte     = exponent of the block's scale, from the FP32 bits of its amax (see `scale_bytes`)
    element  = round-to-nearest-even(x · 2^(127 − byte)), saturated to ±max
    value    = element · 2^(byte − 127)

All arithmetic on scales is on integers; multiplications by powers of two are exact in FP32, also at
byte 0 (2^127) and byte 254 (the subnormal 2^−127). `encoding` casts with them. Not here: the swizzled scale
layouts of particular chips.

Source: OCP Microscaling Formats v1.0 §6.3 (FLOOR); arXiv 2506.08027 Algorithm 1 (RCEIL).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxcompile.errors import FormatError
from mxcompile.formats.types import SCALE_NAN, ElemType, Rounding

_INF_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000


def scale_bytes(amax: Tensor, elem: ElemType, mode: Rounding) -> Tensor:
    """E8M0 bytes (int32, 0 to 255) for the FP32 block maxima `amax`; any shape, NaN and Inf give 255."""
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    byte = (((bits + added_to_amax(elem, mode)) >> 23) - elem.emax).clamp(0, 254)
    return torch.where(bits >= _INF_BITS, SCALE_NAN, byte)


def added_to_amax(elem: ElemType, mode: Rounding) -> int:
    """Returns the number to add to the bits of an amax, so that it carries into the exponent.

    A scale is a power of two. RCEIL rounds up where amax over it would exceed the largest element, CEIL where
    the mantissa of amax is not 0, EVEN where amax rounds to the next power of two as an element would.
    """
    match mode:
        case Rounding.RCEIL:
            mantissa = elem.max / 2.0**elem.emax - 1.0
            return (1 << 23) - 1 - int(mantissa * (1 << 23))
        case Rounding.EVEN:
            return 1 << (22 - elem.mantissa_bits)
        case Rounding.CEIL:
            return (1 << 23) - 1
        case Rounding.FLOOR:
            return 0


def scale_value(byte: Tensor) -> Tensor:
    """2^(byte − 127) in FP32 for int32 bytes; NaN for 255."""
    bits = torch.where(byte == 0, 0x00400000, byte << 23)
    return torch.where(byte == SCALE_NAN, _NAN_BITS, bits).view(torch.float32)


def inverse_scale_value(byte: Tensor) -> Tensor:
    """2^(127 − byte) in FP32 for int32 bytes; NaN for 255."""
    bits = torch.where(byte == 254, 0x00400000, (254 - byte) << 23)
    return torch.where(byte == SCALE_NAN, _NAN_BITS, bits).view(torch.float32)


def check_source(x: Tensor, block_dim: int) -> None:
    """`FormatError` unless `x` can be quantized along `block_dim`."""
    if not isinstance(x, Tensor):
        raise FormatError(f"cannot quantize a {type(x).__name__}: MXFP8 is made of a torch.Tensor")
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise FormatError(f"cannot quantize a {kind} tensor: blocks need dense storage, as of .to_dense()")
    if not x.dtype.is_floating_point:
        raise FormatError(f"cannot quantize a tensor of {x.dtype}: MXFP8 takes floating point")
    if x.ndim == 0:
        raise FormatError("cannot quantize a scalar tensor: a block needs a dimension to run along")
    if not -x.ndim <= block_dim < x.ndim:
        raise FormatError(f"block_dim {block_dim} is outside a tensor of {x.ndim} dimensions")
