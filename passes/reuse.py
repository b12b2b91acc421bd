"""reuse: a weight that is stored in the format a product wants is read as it is stored.

    quantize(dequantize(q, s)) → q, s    along the same dimension, in the elements of q, rounding rceil

Casting a block of stored values again changes nothing: rceil's scale for it is no larger and never saturates,
so that every element is exact again. Other roundings may change it, and so may values that do not exist in
the dtype between, FP16 say: those casts stay. Numerics do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.formats import Rounding
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument
from mxcompile.graph.tags import tensor
from mxcompile.graph.transpose import transpose, untransposed

_EXACT = frozenset({torch.bfloat16, torch.float32})
"""Dtypes that have every FP8 element times a power of two, extreme scales aside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reuse:
    """No options."""

    name: ClassVar[str] = "reuse"

    def apply(self, graph: fx.Graph) -> None:
        """Replace the casts of `graph` that change nothing by what they are casts of."""
        build = Builder(graph, self.name)
        for cast in graph.find_nodes(op="call_function", target=ops.quantize):
            parts = _stored(cast)
            if parts is None:
                continue
            *stored, swapped = parts
            with graph.inserting_before(cast):
                made = [transpose(part, build) if swapped else part for part in stored]
            for result in list(cast.users):
                result.replace_all_uses_with(made[result.args[1]])
        graph.eliminate_dead_code()


def _stored(cast: fx.Node) -> tuple[fx.Node, fx.Node, bool] | None:
    """Elements and scales of which `cast` is a cast in their own format, and whether it is of a transpose."""
    made, dim, elem_dtype, rounding, *options = cast.args
    if not isinstance(made, fx.Node) or any(options) or rounding != Rounding.RCEIL:
        return None
    source, swapped = untransposed(made)
    if source.target is not ops.dequantize or source.args[3] not in _EXACT:
        return None
    q, s = argument(source, 0), argument(source, 1)
    values, scales = tensor(q), tensor(s)
    assert values is not None
    assert scales is not None
    rank = values.ndim
    along = int(dim) % rank  # type: ignore[arg-type]
    if swapped and along >= rank - 2:
        along = 2 * rank - 3 - along
    same = values.dtype is elem_dtype and scales.ndim == rank
    same = same and along == int(source.args[2]) % rank  # type: ignore[arg-type]
    return (q, s, swapped) if same else None
