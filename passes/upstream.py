"""upstream: which of the values that a forward keeps are what the inputs of layers are made from.

A layer with ``saved: mxfp8`` reaches back from its input to the kept values that it is computed from:

    qkv, ffn_in, …        the nearest of them: the residual stream before the norm
    attn_out, ffn_out, …  all up to other linear layers: gate and up; attention's result, q, k and v

Left out are values that no linear layer, embedding or input of the model went into (masks, rotary tables),
what a layer of a role made that presets leave alone (router, head, …), and what is exponentiated: an error
there is a factor. So the scores and their statistics inside a written-out attention are not reached, nor the
logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from enum import IntEnum

from torch import fx

from mxcompile.graph.attention import ATTENTION_FORWARD
from mxcompile.graph.opsets import EXPONENTIALS, STREAM_SOURCES, packet
from mxcompile.graph.shapes import qkv
from mxcompile.graph.tags import GemmTag, Kind, tag_of, tags_of, tensor
from mxcompile.models.names import GraphInput
from mxcompile.passes.flow import Depends, dependencies, viewed
from mxcompile.policy import Gemm, Saved


class _Origin(IntEnum):
    """The origin of a value: the larger wins where several come together."""

    CONSTANT = 0
    FRAGILE = 1
    STREAM = 2


def upstream(
    graph: fx.Graph, inputs: Sequence[GraphInput], kept: Collection[fx.Node]
) -> dict[fx.Node, GemmTag]:
    """Returns the nodes of `kept`, of the forward `graph`, that layers reach, with the first such layer."""
    origins = _made(graph, inputs)
    by_value: dict[fx.Node, list[fx.Node]] = {}
    for node in kept:
        by_value.setdefault(viewed(node), []).append(node)
    reached: dict[fx.Node, GemmTag] = {}
    seen: set[tuple[fx.Node, bool, bool]] = set()
    for node in graph.nodes:
        tag = tag_of(node)
        if tag is None or tag.gemm is not Gemm.FPROP or tag.saved is not Saved.MXFP8:
            continue
        for value in _reached(node, by_value, seen, behind=tag.role.row.ends_branch):
            if origins[value] is _Origin.STREAM:
                for each in by_value[value]:
                    reached.setdefault(each, tag)
    return reached


def _made(graph: fx.Graph, inputs: Sequence[GraphInput]) -> dict[fx.Node, _Origin]:
    """Returns the origin of every value of `graph`."""
    depends = dependencies(graph, inputs)
    origins: dict[fx.Node, _Origin] = {}
    for node in graph.nodes:
        tag = tag_of(node)
        if node.op == "placeholder":
            value = tensor(node)
            is_stream = depends[node] is Depends.DATA and value is not None and value.is_floating_point()
            origins[node] = _Origin.STREAM if is_stream else _Origin.CONSTANT
        elif tag is not None and tag.kind is Kind.LINEAR:
            origins[node] = _Origin.STREAM if tag.role.row.quantized else _Origin.FRAGILE
        elif packet(node) in STREAM_SOURCES:
            origins[node] = _Origin.STREAM
        else:
            origins[node] = max((origins[arg] for arg in node.all_input_nodes), default=_Origin.CONSTANT)
    return origins


def _reached(
    layer: fx.Node, values: Collection[fx.Node], seen: set[tuple[fx.Node, bool, bool]], *, behind: bool
) -> Iterable[fx.Node]:
    """Returns the ones of `values` behind the operands of `layer`, up to other layers, or the nearest."""
    pending = [(arg, True) for arg in layer.all_input_nodes]
    while pending:
        node, counts = pending.pop()
        if node.op != "call_function" or (node, counts, behind) in seen:
            continue
        seen.add((node, counts, behind))
        if node in values:
            if counts:
                yield node
            if not behind:
                continue
        tags = tags_of(node)
        if packet(node) in STREAM_SOURCES or any(tag.kind is Kind.LINEAR for tag in tags):
            continue
        if tags:  # a product of two activations: what it multiplies is no exponent
            counts = True
        elif packet(node) in EXPONENTIALS:
            counts = False
        pending += [(arg, counts) for arg in _operands(node)]


def _operands(node: fx.Node) -> list[fx.Node]:
    """Returns the nodes that `node` is computed from; of an attention q, k and v alone."""
    if packet(node) in ATTENTION_FORWARD:
        return [arg for arg in qkv(node) if isinstance(arg, fx.Node)]
    return node.all_input_nodes
