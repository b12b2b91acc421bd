"""``mx.cast_statistics`` on CPU: the kernel of ``statistics.h``, which reads a tensor once.

MXFP8 of BF16 and FP32            other formats and dtypes: the operator's own definition
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._inductor import ir
from torch._inductor.lowering import fallback_handler, lowerings, register_lowering

from mxcompile import ops
from mxcompile.formats import ELEM_TYPES, MAX, Format, ScaleType, Tile
from mxcompile.lowering.cpu import kernel
from mxcompile.lowering.cpu.kernel import C_TYPES, CppBody, Words
from mxcompile.ops.watch import LENGTH

_AS_IT_IS = fallback_handler(ops.cast_statistics, add_to_fallback_set=False)
_FULL = lowerings[torch.ops.aten.full.default]


@register_lowering(ops.cast_statistics, type_promotion_kind=None)
def lower_cast_statistics(x: ir.TensorBox, block_dim: int, fmt: str, keep: int, *given: Any) -> Any:
    """Statistics, FP64, and a part of the cast, FP32. given: seed, stream and scale."""
    form, rank = Format.of(fmt) if fmt else None, len(x.get_size())
    if form is None or not _has_kernel(x, form) or any(given) or (form.tile == Tile.SQUARE and rank < 2):
        return _AS_IT_IS(x, block_dim, fmt, keep, *given)
    shape, device = list(x.get_size()), x.get_device_or_error()
    source = kernel.stored(x)
    outputs: dict[str, Any] = {"statistics": ([LENGTH], torch.float64)}
    if keep:
        outputs["kept"] = ([keep], torch.float32)
    dtype, dim = source.get_dtype(), block_dim % rank
    code = CppBody(header="statistics.h", body=lambda words: _body(shape, dtype, dim, form, keep, words))
    results = kernel.call(code, {"x": source}, outputs, device)
    return [*results, *([] if keep else [_FULL([0], 0.0, dtype=torch.float32, device=device)])]


def _has_kernel(x: ir.TensorBox, form: Format) -> bool:
    if x.get_device_or_error().type != "cpu" or x.get_dtype() not in C_TYPES or not kernel.usable():
        return False
    plain = form.elem in ELEM_TYPES.values() and form.amax == MAX and not form.stochastic
    return plain and form.scale is ScaleType.E8M0 and form.tile in (Tile.ROW, Tile.SQUARE)


def _body(shape: list[Any], dtype: torch.dtype, dim: int, form: Format, keep: int, words: Words) -> str:
    """The call of ``Statistics<…>::rows`` or ``matrices``."""
    elem = f"mxcompile::{form.elem.name.upper()}, mxcompile::Rounding::{form.rounding}"
    function = f"mxcompile::Statistics<{elem}, {C_TYPES[dtype]}>"
    out = f"reinterpret_cast<double*>({words.pointer('statistics')})"
    results = f"{words.threads}, {out}, {words.given(keep)}, {words.pointer('kept')}"
    last, square = len(shape) - 1, form.tile == Tile.SQUARE
    if dim == last and not square:
        sizes = words.given(math.prod(shape[:-1]), shape[-1])
        return f"{function}::rows({words.pointer('x')}, {sizes}, {results});"
    dim = min(dim, last - 1)
    sizes = words.given(math.prod(shape[:dim]), shape[dim], math.prod(shape[dim + 1 :]))
    return f"{function}::matrices<{str(square).lower()}>({words.pointer('x')}, {sizes}, {results});"
