"""squares: find the weights that only casts to 32×32 tiles read, in forward and backward.

    fprop   matmul(cast(x), cast(w, tiles))      both GEMMs read one cast of w,
    dgrad   matmul(cast(dy), cast(w, tiles))     with one scale for 32×32 elements

Ranks can gather the cast of such a weight. Reads a graph after the passes and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import Kind, tag_of
from mxcompile.models.names import GraphInput
from mxcompile.ops.view import Cast
from mxcompile.passes.account import stored_weight
from mxcompile.passes.weights import parameter_path
from mxcompile.policy import Gemm


@dataclass(frozen=True, kw_only=True, slots=True)
class TileUse:
    """The use of a layer's weight in one graph.

    path: parameter path, relative to the graph's frame. role: the layer's role. elem_dtype, rounding: format
    of the only cast to tiles; None and "" if other nodes read the weight. reason: reason for either.
    """

    path: str
    role: str
    reason: str
    elem_dtype: torch.dtype | None = None
    rounding: str = ""


def tile_uses(graph: fx.Graph, inputs: Sequence[GraphInput]) -> Iterator[TileUse]:
    """Yields the uses of parameters among `inputs` that are weights of forward GEMMs of `graph`."""
    seen: set[fx.Node] = set()
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is None or tag.kind is not Kind.LINEAR or tag.gemm is not Gemm.FPROP:
            continue
        weight = stored_weight(node, tag.tensors.index("w"))
        path = parameter_path(weight, inputs)
        if weight is None or not path or weight in seen:
            continue
        seen.add(weight)
        assert tag.choice is not None
        use = TileUse(path=path, role=str(tag.role), reason=tag.choice.reason)
        yield use if tag.formats is None else _cast(use, weight)


def _cast(use: TileUse, weight: fx.Node) -> TileUse:
    """Returns `use` with the only cast that reads `weight`, or with a reason that names another reader."""
    casts = set()
    for user in weight.users:
        cast = Cast.from_node(user)
        if cast is None or not cast.copy.is_mx:
            return replace(use, reason=f"{packet(user) or user.op} reads it too")
        if not cast.copy.is_square:
            reason = "its blocks are rows; `weight_block: 32x32` lets one copy serve fprop and dgrad"
            return replace(use, reason=reason)
        casts.add((cast.copy.elem.dtype, str(cast.copy.rounding)))
    if len(casts) != 1:
        return replace(use, reason="its GEMMs cast it in different ways")
    ((elem_dtype, rounding),) = casts
    return replace(use, elem_dtype=elem_dtype, rounding=rounding)
