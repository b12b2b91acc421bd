"""E8M0 scales in plain torch operations. Every kernel returns the same bits.

    byte     = exponent of the block's scale, from the FP32 bits of its amax (see `scale_bytes`)
    element  = round-to-nearest-even(x · 2^(127 − byte)), saturated to ±max
    value    = element · 2^(byte − 127)

Scales are computed in integers. Factors are exact powers of two in FP32: from 2^127 for byte 0 to the
subnormal 2^−127 for byte 254. `encoding` casts with these scales; `scale_tiles` has the layout that Blackwell
reads.

Source: OCP Microscaling Formats v1.0 §6.3 (FLOOR); arXiv 2506.08027 Algorithm 1 (RCEIL).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxcompile.errors import FormatError
from mxcompile.formats.elements import ElemType
from mxcompile.formats.types import SCALE_NAN, Rounding

SMALLEST_NORMAL = 1 << 23
"""FP32 bits of 2^−126. For a subnormal amax ≥ 2^−127, 2 · bits − SMALLEST_NORMAL has a normalized mantissa.

Only integer types need that mantissa: the scale byte of all other types is 0 for a subnormal amax.
"""

_INF_BITS = 0x7F800000
_NAN_BITS = 0x7FC00000


def scale_bytes(amax: Tensor, elem: ElemType, mode: Rounding) -> Tensor:
    """Returns E8M0 bytes (int32, 0 to 255) for the FP32 block maxima `amax`; 255 for NaN and Inf."""
    bits = amax.view(torch.int32) & 0x7FFFFFFF
    mantissa = torch.where(bits < SMALLEST_NORMAL, 2 * bits - SMALLEST_NORMAL, bits)
    byte = (((mantissa + added_to_amax(elem, mode)) >> 23) - elem.emax).clamp(0, 254)
    return torch.where(bits >= _INF_BITS, SCALE_NAN, byte)


def added_to_amax(elem: ElemType, mode: Rounding) -> int:
    """Returns the number to add to the FP32 bits of an amax; a carry into the exponent doubles the scale.

    It carries with RCEIL if amax / scale would exceed the largest element, with CEIL if the mantissa of amax
    is not 0, and with EVEN if amax, rounded to the mantissa bits of an element, is the next power of two.
    FLOOR never carries.
    """
    match mode:
        case Rounding.RCEIL:
            mantissa = elem.max / 2.0**elem.emax - 1.0
            return (1 << 23) - 1 - int(mantissa * (1 << 23))
        case Rounding.EVEN:
            return 1 << (22 - elem.mantissa_bits)  # half of the last kept mantissa bit
        case Rounding.CEIL:
            return (1 << 23) - 1
        case Rounding.FLOOR:
            return 0


def scale_value(byte: Tensor) -> Tensor:
    """Returns 2^(byte − 127) in FP32 for int32 bytes; NaN for 255."""
    bits = torch.where(byte == 0, 0x00400000, byte << 23)  # 2^−127 is subnormal
    return torch.where(byte == SCALE_NAN, _NAN_BITS, bits).view(torch.float32)


def inverse_scale_value(byte: Tensor) -> Tensor:
    """Returns 2^(127 − byte) in FP32 for int32 bytes; NaN for 255."""
    bits = torch.where(byte == 254, 0x00400000, (254 - byte) << 23)  # 2^−127 is subnormal
    return torch.where(byte == SCALE_NAN, _NAN_BITS, bits).view(torch.float32)


def check_source(x: Tensor, block_dim: int) -> None:
    """Raises `FormatError` unless `x` is a dense floating-point tensor that has the dimension `block_dim`."""
    if not isinstance(x, Tensor):
        raise FormatError(f"cannot quantize a {type(x).__name__}: pass a torch.Tensor")
    if x.is_nested or x.layout is not torch.strided:
        kind = "nested" if x.is_nested else str(x.layout).removeprefix("torch.")
        raise FormatError(f"cannot quantize a {kind} tensor: blocks need dense storage, as of .to_dense()")
    if not x.dtype.is_floating_point:
        raise FormatError(f"cannot quantize a tensor of {x.dtype}: MXFP8 takes floating point")
    if x.ndim == 0:
        raise FormatError("cannot quantize a scalar tensor: a block needs a dimension to run along")
    if not -x.ndim <= block_dim < x.ndim:
        raise FormatError(f"block_dim {block_dim} is outside a tensor of {x.ndim} dimensions")
