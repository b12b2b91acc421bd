"""weights: find the weights that can be stored or gathered in the format that products cast them to.

    matmul(cast(x), cast(view(w), along K))  →  w: dimension of w that is K, format

A weight can be stored quantized if linear layers read it only in this way.

    fprop   matmul(cast(x), cast(w, tiles))      both GEMMs read one cast of w,
    dgrad   matmul(cast(dy), cast(w, tiles))     with one scale for 32×32 elements

Ranks can gather the cast of such a weight, if nothing else reads it, in forward and backward. The functions
read a graph after the passes, count bytes of weights and change nothing.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import fx

from mxcompile import ops
from mxcompile.formats import Format, Tile, stored_form
from mxcompile.graph.dims import before
from mxcompile.graph.opsets import TRANSPARENT, ancestors, argument, aten, packet
from mxcompile.graph.shapes import operands
from mxcompile.graph.tags import GemmTag, Kind, bytes_of, numel, tag_of, tagged, tensor, value_of
from mxcompile.models.names import GraphInput
from mxcompile.ops.view import Cast, Product, Unpack, result_of
from mxcompile.passes.account import stored_weight
from mxcompile.passes.roles.flow import graph_input, plain_descriptor
from mxcompile.policy import Gemm
from mxcompile.storage.cast import empty

OTHER_FORMAT = (
    "stored weights have a scale for 32 elements along K (MXFP8, MXINT8, MXFP4) or for 16 (NVFP4):"
    " this {} has other scales"
)
"""Reason why the weight of a quantized GEMM cannot be stored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WeightUse:
    """The use of a weight in one forward GEMM, in the lookup of an embedding, or in a whole graph.

    path: parameter path, relative to the graph's frame. layer: name of the layer, or the embedding's path.
    role: the layer's role. block_dim: contracted dimension of the parameter, not negative. rank: number of
    its dimensions. form: format of the cast or of the stored weight; None if the GEMM does not cast the
    weight itself. square: whether the cast has square tiles; `form` then has a scale for each row of a tile.
    reason: reason of the choice, or why the weight cannot be stored. is_lookup: whether it is an embedding.
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
    """Yields the uses of parameters among `inputs` in forward GEMMs of `graph`, and in embeddings."""
    for node in graph.nodes:
        tag = tag_of(node)
        if packet(node) is aten.embedding:
            if path := parameter_path(_source(node.args[0])[0], inputs):
                yield WeightUse(
                    path=path, layer=path, role="embedding", reason="role embedding", is_lookup=True
                )
        elif tag is not None and tag.kind is Kind.LINEAR and tag.gemm is Gemm.FPROP:
            yield from _of_gemm(node, tag, inputs)


def _of_gemm(node: fx.Node, tag: GemmTag, inputs: Sequence[GraphInput]) -> Iterator[WeightUse]:
    side, common = tag.tensors.index("w"), _about(tag)
    if packet(node) not in ops.PRODUCTS:
        if path := parameter_path(_source(operands(node)[side])[0], inputs):
            yield WeightUse(path=path, **common)
        return
    product = Product.read(node)
    cast, block = _source(product.sides[side][0], -1 - side)
    unpack = Unpack.from_node(cast)
    if path := parameter_path(cast if unpack is None else unpack.qdata, inputs):
        stored = value_of(cast)
        form: Format | None = stored_form(stored.dtype) if unpack is None else unpack.form.unpacked
        common |= {"block_dim": block or 0, "rank": stored.ndim}
        yield WeightUse(path=path, form=form, **common)
        return
    cast_node, _ = result_of(cast)
    if cast_node is None:
        return
    side, form, square = _stored_cast(cast_node)
    parameter, block = _source(argument(cast_node), side)
    if not (path := parameter_path(parameter, inputs)):
        return
    if form is None:
        assert tag.choice is not None
        common["reason"] = OTHER_FORMAT.format(tag.choice.precision)
    elif block is None:
        common["reason"], form, square = "its blocks do not run along one of its dimensions", None, False
    else:
        common |= {"block_dim": block, "rank": value_of(parameter).ndim}
    yield WeightUse(path=path, form=form, square=square, **common)


def _about(tag: GemmTag) -> dict[str, Any]:
    """Returns the fields of a `WeightUse` that follow from the tag of the layer alone."""
    assert tag.choice is not None
    return {"layer": tag.name, "role": str(tag.role), "reason": tag.choice.reason}


def _stored_cast(node: fx.Node) -> tuple[int, Format | None, bool]:
    """Returns (negative dimension of the blocks, format, whether its tiles are square) of the cast `node`.

    The format is None if weights cannot be stored in it.
    """
    if (cast := Cast.from_node(node)) is None:
        return -1, None, False
    form, square = cast.form, cast.form.tile.is_square and (cast.copy.is_mx or cast.form.two_level)
    if square:
        form = replace(form, tile=Tile(1, form.tile.along))
    return (cast.side, form, square) if form.storable else (-1, None, False)


def common_cast(own_uses: Sequence[WeightUse]) -> WeightUse:
    """Returns a use with the cast that all uses of a weight share, or with the reason for none."""
    keeping = next((use for use in own_uses if use.form is None), None)
    if keeping is not None:
        return keeping
    if len({(use.block_dim, use.form, use.square) for use in own_uses}) > 1:
        return replace(own_uses[0], form=None, reason="its GEMMs cast it in different ways")
    return own_uses[0]


def weight_bytes(
    graph: fx.Graph, inputs: Sequence[GraphInput], count: Callable[[str], int]
) -> tuple[tuple[str, int, int, int], ...]:
    """Returns (layer, bytes, bytes in BF16, bytes after `quantize_weights_`) of each linear layer's weight.

    count: number of layers that the module at a path stands for.
    """
    layers: dict[fx.Node, GemmTag] = {}
    for node, tag in tagged(graph):
        if tag.kind is Kind.LINEAR and tag.gemm is Gemm.FPROP:
            weight = stored_weight(node, tag.tensors.index("w"))
            if weight is not None and tensor(weight) is not None:
                layers.setdefault(weight, tag)
    casts: defaultdict[str, list[WeightUse]] = defaultdict(list)
    for use in weight_uses(graph, inputs):
        if not use.is_lookup:
            casts[use.path].append(use)
    parts: defaultdict[Any, list[fx.Node]] = defaultdict(list)
    for node in graph.find_nodes(op="placeholder"):
        parts[plain_descriptor(node.meta.get("desc"))].append(node)
    rows = []
    for weight, tag in layers.items():
        num_bytes = _num_bytes(weight, inputs, parts)
        own_uses = casts.get(parameter_path(weight, inputs))
        quantized = _quantized_bytes(weight, inputs, common_cast(own_uses)) if own_uses else None
        in_bf16 = 2 * numel(value_of(weight).shape) * (1 if tag.stored is None else tag.stored.elem.per_byte)
        times, after = count(tag.name), num_bytes if quantized is None else quantized
        rows.append((tag.name, times * num_bytes, times * in_bf16, times * after))
    return tuple(rows)


def _num_bytes(weight: fx.Node, inputs: Sequence[GraphInput], parts: Mapping[Any, Sequence[fx.Node]]) -> int:
    """Returns the bytes of the tensors that store `weight`.

    A computed weight counts as its inputs, if they are smaller than its value. parts: the inputs of the graph
    by the tensor that they are parts of.
    """

    def size(node: fx.Node) -> int:
        num_bytes = getattr(graph_input(node, inputs), "held_bytes", None)
        return bytes_of(tensor(node)) if num_bytes is None else num_bytes

    sources = {node for node in ancestors(weight) if node.op == "placeholder"}
    if weight not in sources and not all(parameter_path(node, inputs) for node in sources):
        return bytes_of(tensor(weight))
    for descriptor in {plain_descriptor(node.meta.get("desc")) for node in sources} - {None}:
        sources.update(parts[descriptor])
    stored = sum(map(size, sources))
    return stored if weight in sources or not stored else min(stored, bytes_of(tensor(weight)))


def _quantized_bytes(weight: fx.Node, inputs: Sequence[GraphInput], use: WeightUse) -> int | None:
    """Returns the bytes of the plain parameter `weight`, stored as `use` casts it; None if it cannot be."""
    value, captured, desc = value_of(weight), graph_input(weight, inputs), weight.meta.get("desc")
    is_parameter = captured is not None and captured.is_parameter and captured.held_bytes is None
    is_plain = is_parameter and plain_descriptor(desc) is desc
    if not is_plain or not value.dtype.is_floating_point or value.dtype.itemsize == 1:
        return None
    if use.form is None or use.square or use.form.elem.unstorable(value.shape[use.block_dim]):
        return None
    return empty(value.shape, use.block_dim, use.form, value.dtype, "meta").stored_bytes


def parameter_path(node: Any, inputs: Sequence[GraphInput]) -> str:
    """Returns the path of the parameter `node`, "" if it is not a parameter."""
    if not isinstance(node, fx.Node) or node.op != "placeholder":
        return ""
    captured = graph_input(node, inputs)
    return captured.path if captured is not None and captured.static else ""


def _source(node: Any, dim: int = -1) -> tuple[Any, int | None]:
    """Returns the source behind views, casts and copies, and its dimension that corresponds to `dim`.

    The dimension is None if no dimension of the source has exactly the elements of `dim`.
    """
    value = tensor(node)
    dims = frozenset({dim % value.ndim}) if value is not None and value.ndim else frozenset()
    while isinstance(node, fx.Node) and packet(node) in TRANSPARENT and isinstance(node.args[0], fx.Node):
        dims = before(node, node.args[0], dims)
        node = node.args[0]
    source = tensor(node)
    if value is None or source is None or len(dims) != 1:
        return node, None
    (index,) = dims
    return node, index if source.shape[index] == value.shape[dim] else None


def tile_uses(graph: fx.Graph, inputs: Sequence[GraphInput]) -> Iterator[WeightUse]:
    """Yields the use in `graph` of each parameter among `inputs` that is the weight of a forward GEMM.

    The form is the format of the only cast to 32×32 tiles, None if other nodes read the weight.
    """
    seen: set[fx.Node] = set()
    for node, tag in tagged(graph):
        if tag.kind is not Kind.LINEAR or tag.gemm is not Gemm.FPROP:
            continue
        weight = stored_weight(node, tag.tensors.index("w"))
        path = parameter_path(weight, inputs)
        if weight is None or not path or weight in seen:
            continue
        seen.add(weight)
        use = WeightUse(path=path, **_about(tag))
        yield use if tag.formats is None else _cast(use, weight)


def _cast(use: WeightUse, weight: fx.Node) -> WeightUse:
    """Returns `use` with the only cast that reads `weight`, or with a reason that names another reader."""
    forms: dict[object, Format] = {}
    for user in weight.users:
        cast = Cast.from_node(user)
        if cast is None or not cast.copy.is_mx:
            return replace(use, reason=f"{packet(user) or user.op} reads it too")
        if not cast.copy.is_square:
            reason = "its blocks are rows; `weight_block: 32x32` lets one copy serve fprop and dgrad"
            return replace(use, reason=reason)
        forms[cast.form.elem, cast.form.rounding] = cast.form
    if len(forms) != 1:
        return replace(use, reason="its GEMMs cast it in different ways")
    return replace(use, form=forms.popitem()[1])
