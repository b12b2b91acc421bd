"""``mx.cast_statistics`` on CPU: the kernel of ``statistics.h``, which reads a tensor once.

`inductor.statistics` lowers the operator, and calls this kernel for casts of BF16 and FP32 to MXFP8.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._inductor import ir

from mxcompile.formats import Format, Tile
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.cpu.kernel import C_TYPES, CppNames
from mxcompile.ops.watch import LENGTH


def lower_cast_statistics(
    x: ir.TensorBox, block_dim: int, form: Format, keep: int
) -> tuple[ir.TensorBox, ir.TensorBox | None] | None:
    """Returns FP64 statistics of a cast to MXFP8, and `keep` of its values in FP32, None if `keep` is 0.

    Returns None if the kernel does not support this tensor.
    """
    if not kernel.takes(x, x.get_dtype()):
        return None
    shape, source = list(x.get_size()), kernel.stored(x)
    outputs: dict[str, Any] = {"statistics": ([LENGTH], torch.float64)}
    if keep:
        outputs["kept"] = ([keep], torch.float32)
    dtype, dim = source.get_dtype(), block_dim % len(shape)

    def body(words: CppNames) -> str:
        return _body(shape, dtype, dim, form, keep, words)

    numbers, *kept = kernel.call("statistics.h", body, {"x": source}, outputs)
    return numbers, kept[0] if kept else None


def _body(shape: list[Any], dtype: torch.dtype, dim: int, form: Format, keep: int, words: CppNames) -> str:
    """Returns the call of ``Statistics<…>::rows`` or ``matrices``."""
    elem = f"mxcompile::{form.elem.name.upper()}, mxcompile::Rounding::{form.rounding}"
    function = f"mxcompile::Statistics<{elem}, {C_TYPES[dtype]}>"
    out = f"reinterpret_cast<double*>({words.pointer('statistics')})"
    results = f"{words.threads}, {out}, {words.size_arguments(keep)}, {words.pointer('kept')}"
    last, square = len(shape) - 1, form.tile == Tile.SQUARE
    if dim == last and not square:
        sizes = words.size_arguments(math.prod(shape[:-1]), shape[-1])
        return f"{function}::rows({words.pointer('x')}, {sizes}, {results});"
    dim = min(dim, last - 1)
    sizes = words.size_arguments(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
    return f"{function}::matrices<{str(square).lower()}>({words.pointer('x')}, {sizes}, {results});"
