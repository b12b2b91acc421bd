"""reuse: read a stored or gathered weight directly, if it has the format that a product casts it to.

    cast(decode(q, s)) → q, s                     same dimension, element type of q, rceil
    cast(decode(p, s)) → codes of p, s            the same for packed codes p
    matmul(…, cast(decode(p, s, g)), known_scale(…))  →  codes of p, s, 1/g       two levels
    cast(decode(q, s)) → q, rows of s             32×32 tiles, element type and rounding of q

A second cast of a block of stored values changes nothing: its rceil scale is not larger than the stored scale
and never saturates, so every element is exact again. With other roundings, or through a dtype that does not
have all values (FP16), a second cast may change values, so it stays. No rank has the whole source of a
gathered weight, so a cast to its format, with any rounding, is the gathered cast. Any other use of a gathered
weight is an error, because it would read values that the policy does not specify. Numerics do not change.

A second cast to two levels may change elements, because scales are rounded; this pass reads the stored codes.
Their values do not depend on the choice of scales that the second cast would make ("4 over 6").
A grouped product has one tensor scale, so it casts weights with several tensor scales again.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import fx

from mxcompile import ops
from mxcompile.errors import PolicyError
from mxcompile.formats import BLOCK, Tile
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import aten
from mxcompile.graph.reshapes import producing_call
from mxcompile.graph.tags import numel, set_tag, tag_of, value_of
from mxcompile.graph.transpose import transpose, untransposed
from mxcompile.models.names import module_of
from mxcompile.ops.view import Cast, Decode, Dequantize, Product, arguments_of, result_of, results_of

_EXACT = frozenset({torch.bfloat16, torch.float32})
"""Dtypes that represent every stored element times a power of two, extreme scales aside."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reuse:
    """Removes casts of weights that are stored or gathered in the format of the cast."""

    name: ClassVar[str] = "reuse"

    def apply(self, graph: fx.Graph) -> None:
        """Replaces the casts of `graph` that change nothing by the stored codes and scales."""
        build = Builder(graph, self.name)
        _read_tiles(graph, build)
        for product in Product.calls(graph):
            _read_two_level(product, build)
        for cast in [node for node in graph.nodes if node.target is ops.cast]:
            match = _stored(cast)
            if match is None or match[0].global_scale is not None:
                continue
            dequantize, swapped = match
            with graph.inserting_before(cast):
                parts = _elements(dequantize, build), dequantize.scale
                operands = [transpose(part, build) if swapped else part for part in parts]
            build.replace_results(cast, operands)
        for product in Product.calls(graph):
            tag = tag_of(product.node)
            if tag is not None and tag.stored is not None and "w" in tag.tensors:
                call, _ = producing_call(product.sides[tag.tensors.index("w")][0])
                set_tag(product.node, replace(tag, recast=call.target is ops.cast))
        dead.eliminate(graph)


def _read_two_level(product: Product, build: Builder) -> None:
    """Makes `product` read operands that are stored in two levels directly."""
    if product.tensors is None or len(product.tensors) != len(product.sides):
        return
    sides, scales = [*product.sides], [*product.tensors]
    with build.graph.inserting_before(product.node):
        for index, (qdata, _) in enumerate(product.sides):
            base, swapped = untransposed(qdata)
            cast, _ = result_of(base)
            match = _stored(cast)
            whole = None if match is None else match[0].global_scale
            if match is None or whole is None:
                continue
            dequantize, turned = match
            numbers = numel(value_of(whole).shape)
            if numbers != 1 and product.is_grouped:
                continue
            elements, scale = _elements(dequantize, build), dequantize.scale
            if swapped != turned:
                elements, scale, whole = (transpose(part, build) for part in (elements, scale, whole))
            sides[index] = elements, scale
            if numbers == 1:
                whole = build.call(aten.reshape.default, whole, [1], like=product.node)
            scales[index] = build.call(aten.reciprocal.default, whole, like=product.node)
    if scales == [*product.tensors]:
        return
    (a, scale_a), (b, scale_b) = sides
    product.node.args = product.arguments(a=a, scale_a=scale_a, b=b, scale_b=scale_b, tensors=scales)
    product.node.kwargs = {}


def _stored(node: fx.Node | None) -> tuple[Dequantize, bool] | None:
    """Returns the decode that `node` casts back to the stored format, if no value changes, else None.

    The second result is whether `node` casts the transpose of the decoded values.
    """
    if (cast := Cast.from_node(node)) is None:
        return None
    source, swapped = untransposed(cast.x)
    dequantize = Dequantize.from_node(source)
    if dequantize is None or cast.form.unchosen != dequantize.form.unpacked:
        return None
    if dequantize.dtype not in _EXACT and dequantize.global_scale is None:
        return None
    rank = value_of(dequantize.qdata).ndim
    along = cast.side % rank
    if swapped and along >= rank - 2:
        along = 2 * rank - 3 - along
    same = value_of(dequantize.scale).ndim == rank and along == dequantize.block_dim % rank
    return (dequantize, swapped) if same else None


def _elements(stored: Dequantize, build: Builder) -> fx.Node:
    """Returns the codes of `stored`, one per byte, as a cast returns them."""
    if not stored.form.packed:
        return stored.qdata
    args = stored.block_dim, stored.fmt, torch.uint8
    return build.call(ops.decode, stored.qdata, None, *args, like=stored.node)


def _read_tiles(graph: fx.Graph, build: Builder) -> None:
    """Makes casts of weights gathered in tiles read the tiles. Raises `PolicyError` for other formats."""
    for values in Decode.calls(graph):
        form = values.form
        if form.tile != Tile.SQUARE or values.scale is None:
            continue
        for user in list(values.node.users):
            cast = Cast.from_node(user)
            if cast is None or not cast.copy.is_mx or cast.form != form:
                raise PolicyError(
                    f"the weight of {module_of(user)[0]} was gathered in 32×32 tiles of {form.elem.dtype},"
                    f" scales rounded {form.rounding}, but {user.target} needs another format: give"
                    " quantize_gathers_ the policy of this compile"
                )
            for index, result in list(results_of(user)):
                if index == 0:
                    result.replace_all_uses_with(values.qdata)
                else:
                    _read_scales(result, values.scale, build)
    dead.eliminate(graph)


def _read_scales(scales: fx.Node, tiles: fx.Node, build: Builder) -> None:
    """Replaces `scales`, which has the scale of a tile in each of its rows, by reads of `tiles`."""
    value = value_of(scales)
    rows, call = value.ndim - 2, build.call
    for user in list(scales.users):
        sliced = arguments_of(user) if user.target is aten.slice.Tensor else {}
        if sliced and sliced["dim"] == rows and sliced["step"] == BLOCK:
            user.replace_all_uses_with(tiles)
    if not any(user.users for user in scales.users):
        return
    with build.graph.inserting_before(scales):
        row = build.range(value.shape[rows], value.device, scales)
        tile = call(aten.div.Tensor_mode, row, BLOCK, like=scales, rounding_mode="floor")
        repeated = call(aten.index.Tensor, tiles, [*[None] * rows, tile], like=scales)
    scales.replace_all_uses_with(repeated)
