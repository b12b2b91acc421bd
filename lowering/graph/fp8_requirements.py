"""The requirements of the vendor's FP8 GEMM, each with the reason for records if it is violated.

Source: the checks of `torch._scaled_mm` (torch/_meta_registrations.py, ATen/native/cuda/ScaledBlas.cpp).
"""

from __future__ import annotations

import torch
from torch import Tensor

from mxcompile.formats import E5M2, WHOLE, Tile
from mxcompile.graph.tags import is_empty, tensor, value_of
from mxcompile.ops.view import Product

_MULTIPLE = 16
"""The sizes of the right operand are multiples of this."""

_HALVES = (torch.bfloat16, torch.float16)

_ALIGNED = 4
"""The number of scales along their innermost dimension is a multiple of this: 16 bytes."""

_BLOCKS_SINCE = (12, 9)
"""The first CUDA whose GEMM takes block scales."""


def unmet(product: Product, device: str) -> str:
    """Returns the reason why the vendor's FP8 GEMM does not take `product`, or "".

    product: operands are FP8 with FP32 scales. device: device type of the target's tensors.
    """
    lhs, rhs = product.forms
    out, a, b = map(value_of, (product.node, product.a, product.b))
    if a.ndim != 2:
        return "no FP8 GEMM for batches of matrices"
    if out.device.type != device:
        return "it is not on the target's device"
    sizes = zip("kn", b.shape, strict=True)
    odd = [f"{key}={size}" for key, size in sizes if not isinstance(size, int) or size % _MULTIPLE]
    if odd or is_empty((*out.shape, b.shape[0])):
        return f"the FP8 GEMM takes multiples of {_MULTIPLE} ({', '.join(odd) or 'empty'})"
    if rhs.elem == E5M2 and (lhs.elem == E5M2 or lhs.tile == Tile.CHANNEL):
        return "the FP8 GEMM takes no E5M2 on the right"
    if lhs.tile == Tile.CHANNEL and out.dtype is not torch.bfloat16:
        return "the FP8 GEMM with a scale per channel gives BF16"
    if lhs.tile.along != WHOLE and (reason := _unmet_blocks(a, rhs.tile)):
        return reason
    bias = tensor(product.bias)
    if bias is not None and not (bias.ndim == 1 and bias.dtype is out.dtype and out.dtype in _HALVES):
        return "the FP8 GEMM takes a vector bias in its result's half precision"
    return ""


def _unmet_blocks(a: Tensor, right: Tile) -> str:
    """Returns the violated requirement of a GEMM with several scales along K, or ""."""
    version = torch.version.cuda
    if version is not None and tuple(map(int, version.split(".")[:2])) < _BLOCKS_SINCE:
        return f"the FP8 GEMM takes block scales from CUDA 12.9 on (this is {version})"
    rows, k = a.shape
    if not isinstance(rows, int) or rows % _ALIGNED:
        return f"the FP8 GEMM with block scales takes multiples of {_ALIGNED} rows (m={rows})"
    num_blocks = -(-k // right.along)
    if right.across > 1 and num_blocks % _ALIGNED:
        return f"the FP8 GEMM takes multiples of {_ALIGNED} blocks along k ({num_blocks})"
    return ""
