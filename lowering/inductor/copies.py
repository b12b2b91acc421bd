"""Inductor lowering of ``mx.cast``: by a template that makes all its copies, else copy by copy.

MXFP8           a kernel of `cpu.casts`, or loops (`casts`)
MXINT8          a kernel of `cpu.casts`, or loops as for other formats
other formats   loops (`general`): scales, then elements over them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch._inductor import ir
from torch._inductor.lowering import lowerings, register_lowering

from mxcompile import ops
from mxcompile.formats import Copy, CopyPart
from mxcompile.lowering import candidates
from mxcompile.lowering.cpu import casts as cpp
from mxcompile.lowering.inductor import casts, general

_CLONE = lowerings[torch.ops.aten.clone.default]

Results = Sequence[ir.TensorBox]

OptionalTensors = Sequence[ir.TensorBox | None]
"""A tensor for each copy, or None."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CastCall:
    """A call of ``mx.cast``. Fields: see `ops.cast`."""

    x: ir.TensorBox
    copies: Sequence[Copy]
    seed: ir.TensorBox | None
    stream: int
    scales: OptionalTensors
    amaxes: OptionalTensors
    y: ir.TensorBox | None


@register_lowering(ops.cast, type_promotion_kind=None)
def lower_cast(
    x: ir.TensorBox,
    names: Sequence[str],
    seed: ir.TensorBox | None = None,
    stream: int = 0,
    scales: OptionalTensors | None = None,
    amaxes: OptionalTensors | None = None,
    y: ir.TensorBox | None = None,
) -> Results:
    """Lowers ``mx.cast``. Returns the tensors of the copies of `x`, then of `y`."""
    copies, none = [Copy.parse(name) for name in names], [None] * len(names)
    scales, amaxes = scales or none, amaxes or none
    call = CastCall(x=x, copies=copies, seed=seed, stream=stream, scales=scales, amaxes=amaxes, y=y)
    results: Results | None = candidates.first("cast", call)
    if results is not None:
        return results
    if y is not None:
        return [*lower_cast(x, names), *lower_cast(y, names)]
    lowered = [
        cpp.cast(x, copy) or (casts.lower(x, copy) if copy.is_mx else _general(call, position))
        for position, copy in enumerate(copies)
    ]
    return [tensor for tensors in lowered for tensor in tensors]


def _general(call: CastCall, position: int) -> Results:
    """Returns the tensors of a copy in another format than MXFP8, or with stochastic elements."""
    x, copy, scale, amax = call.x, call.copies[position], call.scales[position], call.amaxes[position]
    supported = Copy(format=copy.format, dim=copy.dim, dtype=copy.dtype, part=copy.part)
    assert copy == supported, f"no loops make {copy}"
    if copy.part is CopyPart.LARGEST:
        return [general.lower_largest(x)]
    if scale is None:
        scale = general.scales(x, copy, amax)
    elif copy.part is CopyPart.CODES and copy.dtype is None:
        scale = _CLONE(scale)
    if copy.part is CopyPart.SCALES:
        return [scale]
    scaled = general.Scaled(x, scale, copy, call.seed, call.stream, amax)
    if copy.dtype is not None:
        return [scaled.values()]
    stored = scaled.stored()
    return [stored] if copy.part is CopyPart.ELEMENTS else [stored, scale]
