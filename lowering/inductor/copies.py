"""Inductor lowering of ``mx.cast``: by a template where one makes all of its copies, else copy by copy.

MXFP8           loops (`casts`), or a kernel of `cpu.casts`
other formats   loops (`general`): scales, then elements over them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering

from mxcompile import ops
from mxcompile.formats import Copy, CopyPart, ScaleLayout
from mxcompile.lowering.cpu import casts as cpp
from mxcompile.lowering.inductor import casts, general

_CLONE = lowerings[torch.ops.aten.clone.default]

Results = Sequence[ir.TensorBox]

TEMPLATES: list[Callable[[ir.TensorBox, Sequence[Copy], ir.TensorBox | None], Results | None]] = []
"""The templates of casts, which return None for those that they do not make, in the order to ask them."""

Known = Sequence[ir.TensorBox | None] | None
"""A tensor for each copy, None for those that need none."""

PACKED_TEMPLATES: list[Callable[..., Results]] = []
"""The template of packed copies, if it is loaded."""


@register_lowering(ops.cast, type_promotion_kind=None)
def lower_cast(
    x: ir.TensorBox,
    words: Sequence[str],
    seed: ir.TensorBox | None = None,
    stream: int = 0,
    scales: Known = None,
    amaxes: Known = None,
    y: ir.TensorBox | None = None,
) -> Results:
    """The tensors of the copies of x, then of y."""
    copies, none = [Copy.of(word) for word in words], [None] * len(words)
    if copies[0].format.packed:
        (template,) = PACKED_TEMPLATES
        return template(x, copies, seed, stream, amaxes or none)
    if all(copy.is_mx for copy in copies):
        attempts = (template(x, copies, y) for template in TEMPLATES)
        if (results := next(filter(None, attempts), None)) is not None:
            return results
    if y is not None:
        return [*lower_cast(x, words), *lower_cast(y, words)]
    lowered = [
        cpp.cast(x, copy) or casts.lower(x, copy)
        if copy.is_mx
        else _general(x, copy, seed, stream, scale, amax)
        for copy, scale, amax in zip(copies, scales or none, amaxes or none, strict=True)
    ]
    return [tensor for tensors in lowered for tensor in tensors]


def _general(
    x: ir.TensorBox,
    copy: Copy,
    seed: ir.TensorBox | None,
    stream: int,
    scale: ir.TensorBox | None,
    amax: ir.TensorBox | None,
) -> Results:
    """A copy in another format than MXFP8, or of random elements."""
    assert copy.layout is ScaleLayout.ROW_MAJOR, f"no loops make {copy}"
    if scale is None:
        scale = general.scales(x, copy, amax)
    elif copy.part is CopyPart.CODES and copy.dtype is None:
        scale = _CLONE(scale)
    if copy.part is CopyPart.SCALES:
        return [scale]
    drawn = seed, stream, amax
    if copy.dtype is not None:
        return [general.values(x, scale, copy, *drawn)]
    stored = general.elements_over(x, scale, copy, *drawn)
    return [stored] if copy.part is CopyPart.ELEMENTS else [stored, scale]
