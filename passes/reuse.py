"""reuse: a weight that is stored, or was gathered, in the format a product wants is read as it is.

    quantize(dequantize(q, s)) → q, s                 along the same dimension, in the elements of q, rceil
    quantize(dequantize_tiles(q, s)) → q, rows of s   in 32×32 tiles, in the elements and the rounding of q

Casting a block of stored values again changes nothing: rceil's scale for it is no larger and never saturates,
so that every element is exact again. Other roundings may change it, and so may values that do not exist in
the dtype between, FP16 say: those casts stay. A gathered weight is the cast of a source that nobody has, so
that a cast in the same format is that cast, whatever the rounding; any other use of it is an error, since it
would read values that the policy did not ask for. Numerics do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.errors import PolicyError
from mxcompile.formats import BLOCK, Rounding
from mxcompile.graph.build import Builder
from mxcompile.graph.names import module_of
from mxcompile.graph.opsets import argument, aten
from mxcompile.graph.tags import value_of
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
        _read_tiles(graph, build)
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
    values, scales = value_of(q), value_of(s)
    rank = values.ndim
    along = int(dim) % rank  # type: ignore[arg-type]
    if swapped and along >= rank - 2:
        along = 2 * rank - 3 - along
    same = values.dtype is elem_dtype and scales.ndim == rank
    same = same and along == int(source.args[2]) % rank  # type: ignore[arg-type]
    return (q, s, swapped) if same else None


def _read_tiles(graph: fx.Graph, build: Builder) -> None:
    """Let the casts of weights that were gathered in tiles read the tiles. Raises `PolicyError`."""
    for values in graph.find_nodes(op="call_function", target=ops.dequantize_tiles):
        q, s, rounding = argument(values, 0), argument(values, 1), values.args[2]
        codes = value_of(q)
        for cast in list(values.users):
            if cast.target is not ops.quantize or [*cast.args[2:]] != [codes.dtype, rounding, True]:
                raise PolicyError(
                    f"the weight of {module_of(cast)[0]} was gathered in 32×32 tiles of {codes.dtype}, scales"
                    f" rounded {rounding}, and {cast.target} wants it otherwise: give quantize_gathers_ the"
                    " policy of this compile"
                )
            for result in list(cast.users):
                if result.args[1] == 0:
                    result.replace_all_uses_with(q)
                else:
                    _read_scales(result, s, build)
    graph.eliminate_dead_code()


def _read_scales(scales: fx.Node, tiles: fx.Node, build: Builder) -> None:
    """Let what reads `scales`, those of tiles repeated for every row, read `tiles`."""
    value = value_of(scales)
    rows, call = value.ndim - 2, build.call
    for user in list(scales.users):
        if user.target is aten.slice.Tensor and user.args[1] == rows and user.args[4:] == (BLOCK,):
            user.replace_all_uses_with(tiles)
    if not any(user.users for user in scales.users):
        return
    with build.graph.inserting_before(scales):
        row = build.range(value.shape[rows], value.device, scales)
        tile = call(aten.div.Tensor_mode, row, BLOCK, like=scales, rounding_mode="floor")
        repeated = call(aten.index.Tensor, tiles, [*[None] * rows, tile], like=scales)
    scales.replace_all_uses_with(repeated)
