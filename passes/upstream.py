"""upstream: find the saved values of forward that the inputs of layers are computed from.

A layer with ``saved: mxfp8`` reaches back from its input to these saved values:

    qkv, ffn_in, …        the nearest values: the residual stream before the norm
    attn_out, ffn_out, …  all values up to other linear layers: gate and up; attention's result, q, k and v

Left out are values that do not depend on a linear layer, embedding or input of the model (masks, rotary
tables), results of layers whose role presets do not quantize (router, head, …), and exponents, because their
error becomes a factor. So the search does not reach the scores and row statistics of a written-out attention,
nor the logits.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from torch import fx

from mxcompile.graph.attention import ATTENTION_FORWARD
from mxcompile.graph.opsets import EXPONENTIALS, STREAM_SOURCES, packet
from mxcompile.graph.shapes import qkv
from mxcompile.graph.tags import GemmTag, Kind, tag_of, tagged, tags_of, tensor
from mxcompile.models.names import GraphInput
from mxcompile.passes.roles.flow import Depends, dependencies, viewed
from mxcompile.policy import Gemm, Saved


def upstream(
    graph: fx.Graph, inputs: Sequence[GraphInput], kept: Collection[fx.Node]
) -> dict[fx.Node, GemmTag]:
    """Returns the saved values of `kept` that layers reach, each with the tag of the first such layer."""
    streams = _streams(graph, inputs)
    by_value: dict[fx.Node, list[fx.Node]] = {}
    for node in kept:
        by_value.setdefault(viewed(node), []).append(node)
    reached: dict[fx.Node, GemmTag] = {}
    seen: set[tuple[fx.Node, bool, bool]] = set()
    for node, tag in tagged(graph):
        if tag.gemm is not Gemm.FPROP or tag.saved is not Saved.MXFP8:
            continue
        for value in _reached(node, by_value, seen, behind=tag.role.row.ends_branch):
            if value in streams:
                for saved in by_value[value]:
                    reached.setdefault(saved, tag)
    return reached


def _streams(graph: fx.Graph, inputs: Sequence[GraphInput]) -> set[fx.Node]:
    """Returns the values of `graph` that come from linear layers to quantize, embeddings or inputs."""
    depends = dependencies(graph, inputs)
    streams: set[fx.Node] = set()
    for node in graph.nodes:
        tag = tag_of(node)
        if node.op == "placeholder":
            value = tensor(node)
            is_stream = depends[node] is Depends.DATA and value is not None and value.is_floating_point()
        elif tag is not None and tag.kind is Kind.LINEAR:
            is_stream = tag.role.row.quantized
        else:
            is_stream = packet(node) in STREAM_SOURCES or not streams.isdisjoint(node.all_input_nodes)
        if is_stream:
            streams.add(node)
    return streams


def _reached(
    layer: fx.Node, values: Collection[fx.Node], seen: set[tuple[fx.Node, bool, bool]], *, behind: bool
) -> Iterable[fx.Node]:
    """Yields the nearest `values` that `layer` is computed from; with `behind`, all up to other layers."""
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
        if tags:  # a product of two activations: its operands are not exponents
            counts = True
        elif packet(node) in EXPONENTIALS:
            counts = False
        operands = qkv(node) if packet(node) in ATTENTION_FORWARD else node.all_input_nodes
        pending += [(arg, counts) for arg in operands if isinstance(arg, fx.Node)]
