"""weights: which inputs of a graph its quantized products cast as they are, and in which format.

    scaled_mm(quantize(x), quantize(view(w), along K))  →  w: along the dimension of w that K is, format

A weight can be stored quantized where this is all that linear layers do with it. Reads a graph after the
passes and changes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from mxcompile import ops
from mxcompile.formats import Format, Tile, stored_form
from mxcompile.graph.dims import before
from mxcompile.graph.opsets import TRANSPARENT, argument, aten, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import GemmTag, Kind, tag_of, tensor, value_of
from mxcompile.models.names import GraphInput
from mxcompile.ops.view import Cast, Product, Unpack, result_of
from mxcompile.passes.flow import graph_input
from mxcompile.policy import Gemm

OTHER_FORMAT = (
    "stored weights are MXFP8 or MXFP4 with a scale for 32 elements along K, or NVFP4 with one for 16, which"
    " this {} is not"
)
"""Why a GEMM that quantizes a weight does not have it stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUse:
    """The use of a weight in one forward GEMM, or in the lookup of an embedding.

    path: of the parameter, relative to the graph's frame. layer: name of the GEMM. role: of it. block_dim:
    non-negative dimension of the parameter that is contracted; rank: how many it has. form: of the cast, or
    of the weight as it is stored; None where the GEMM does not cast the weight as it is. square: whether the
    cast has scales for square tiles, and `form` is that of one for each row of them. reason: for either.
    is_lookup: whether it is an embedding, `layer` then the path.
    """

    path: str
    layer: str
    role: str
    reason: str
    block_dim: int = 0
    rank: int = 0
    form: Format | None = None
    square: bool = False
    is_lookup: bool = False


def weight_uses(graph: fx.Graph, inputs: Sequence[GraphInput]) -> Iterator[WeightUse]:
    """The uses of the parameters among `inputs` in forward GEMMs of `graph`, and in embeddings."""
    for node in graph.nodes:
        tag = tag_of(node)
        if packet(node) is aten.embedding:
            path = _path(_source(node.args[0])[0], inputs)
            if path:
                yield WeightUse(
                    path=path, layer=path, role="embedding", reason="role embedding", is_lookup=True
                )
        elif tag is not None and tag.kind is Kind.LINEAR and tag.gemm is Gemm.FPROP:
            yield from _of_gemm(node, tag, inputs)


def _of_gemm(node: fx.Node, tag: GemmTag, inputs: Sequence[GraphInput]) -> Iterator[WeightUse]:
    assert tag.choice is not None
    side = tag.tensors.index("w")
    known: dict[str, Any] = {"layer": tag.name, "role": str(tag.role), "reason": tag.choice.reason}
    if packet(node) not in ops.PRODUCTS:
        path = _path(_source(operands(node)[side])[0], inputs)
        if path:
            yield WeightUse(path=path, **known)
        return
    product = Product.read(node)
    cast, block = _source(product.sides[side][0], -1 - side)
    unpack = Unpack.of(cast)
    if path := _path(cast if unpack is None else unpack.qdata, inputs):
        stored = value_of(cast)
        form = stored_form(stored.dtype) if unpack is None else unpack.form.unpacked
        known |= {"block_dim": block or 0, "rank": stored.ndim}
        yield WeightUse(path=path, form=form, **known)
        return
    cast_node, _ = result_of(cast)
    if cast_node is None:
        return
    how = _storable(cast_node)
    parameter, block = _source(argument(cast_node), -1 if how is None else how.side)
    path = _path(parameter, inputs)
    if not path:
        return
    if how is None:
        yield WeightUse(path=path, **{**known, "reason": OTHER_FORMAT.format(tag.choice.precision)})
        return
    if block is None:
        yield WeightUse(path=path, **{**known, "reason": "its blocks are not along a dimension of it"})
        return
    whole = value_of(parameter)
    known |= {"block_dim": block, "rank": whole.ndim}
    yield WeightUse(path=path, form=how.form, square=how.square, **known)


@dataclass(frozen=True, kw_only=True, slots=True)
class _StorableCast:
    """A cast in whose format weights are stored. side: the dimension of blocks, counted from the last."""

    side: int
    form: Format
    square: bool = False


def _storable(node: fx.Node) -> _StorableCast | None:
    """The cast that `node` is, None if no weight is stored in its format."""
    cast = Cast.of(node)
    if cast is None:
        return None
    form, square = cast.form, cast.form.tile.is_square and (cast.copy.is_mx or cast.form.two_level)
    if square:
        form = replace(form, tile=Tile(1, form.tile.along))
    return _StorableCast(side=cast.side, form=form, square=square) if form.storable else None


def _path(node: Any, inputs: Sequence[GraphInput]) -> str:
    """Path of the parameter that `node` is, "" for anything else."""
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return ""
    known = graph_input(node, inputs)
    return known.path if known is not None and known.static else ""


def _source(node: Any, dim: int = -1) -> tuple[Any, int | None]:
    """Returns the node of which `node` is a view, cast or copy, and its dimension that is `dim` of `node`.

    None if no dimension of the source has those elements, all of them.
    """
    value = tensor(node)
    dims = frozenset({dim % value.ndim}) if value is not None and value.ndim else frozenset()
    while isinstance(node, fx.Node) and packet(node) in TRANSPARENT and isinstance(node.args[0], fx.Node):
        dims = before(node, node.args[0], dims)
        node = node.args[0]
    source = tensor(node)
    if value is None or source is None or len(dims) != 1:
        return node, None
    (place,) = dims
    return node, place if source.shape[place] == value.shape[dim] else None
