"""Data flow: the kinds of inputs that every value of a graph depends on, and the tensors behind views."""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from enum import Flag, auto
from typing import Any

import torch
from torch import fx, nn

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph.opsets import (
    BIASED,
    MATMULS,
    PICKS,
    RANDOM,
    REPEATS,
    TRANSPARENT,
    VIEWS,
    ancestors,
    aten,
    packet,
)
from mxcompile.graph.tags import GemmTag, numel, tag_of, tensor, value_of
from mxcompile.graph.transpose import readers
from mxcompile.models.names import GraphInput
from mxcompile.ops.view import Decode, argument_of


class Depends(Flag):
    """The kinds of inputs that a value is computed from; a constant has no flag."""

    NOTHING = 0
    PARAMETER = auto()  # parameters and buffers
    DATA = auto()  # other inputs and random numbers
    GRADIENT = auto()  # gradients of the result: the value belongs to backward
    TANGENT = auto()  # tangents of inputs: it belongs to a forward-mode derivative


DERIVATIVE = Depends.GRADIENT | Depends.TANGENT
DERIVATIVE_KEY = "mxcompile_derivative"
"""Key of the ``custom`` metadata: flags of a node in a derivative that the compiled code takes itself."""

WEIGHT_KEY = "mx_weight"
"""`node.meta` key of an input that is not a parameter but a weight (see `unregistered`)."""

_RANDOM, _REPEATS, _PRODUCT, _VIEW = 1, 2, 4, 8
_KINDS = ((_RANDOM, RANDOM), (_REPEATS, REPEATS), (_PRODUCT, MATMULS), (_VIEW, VIEWS))
_NOISE = 16
"""Mark of random numbers, beside the flags of `Depends`."""
_BY_MARK = tuple(
    Depends(mark % _NOISE) | (Depends.DATA if mark & _NOISE else Depends.NOTHING)
    for mark in range(2 * _NOISE)
)
"""The dependencies of a value by its mark: random numbers are data."""
_NOISES = RANDOM - {aten.native_dropout}
"""Operators whose random numbers do not contain the values of their input."""


def dependencies(
    graph: fx.Graph, inputs: Sequence[GraphInput], weights: Collection[fx.Node] = ()
) -> dict[fx.Node, Depends]:
    """Returns the dependencies of every node of `graph`.

    inputs: inputs of the captured graph. weights: placeholders that count as parameters, beside the weights
    that the pass `unregistered` marked.

    A view of a weight is a weight in a derivative too, where autograd transposes it.

    The result of a layer that reads only parameters is data (a query repeated for each sample, positions),
    but a product of parameters may also be a weight (a low-rank update). It is a layer if the model calls
    ``F.linear``, if it has a bias, or if its input is repeated.

    Random numbers are data, except in the weight of a product: a weight with a dropout or noise is a weight.
    """
    marks: dict[fx.Node, int] = {}
    kinds: dict[int, int] = {}
    repeated: set[fx.Node] = set()
    noisy: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            marks[node] = _PARAMETER if node in weights else _of_placeholder(node, inputs).value
            continue
        if node.op == "get_attr":
            marks[node] = _PARAMETER if tensor(node) is not None else 0
            continue
        if (kind := kinds.get(id(node.target))) is None:
            op = packet(node)
            kind = kinds[id(node.target)] = sum(bit for bit, members in _KINDS if op in members)
        flags = _NOISE if kind & _RANDOM else 0
        arguments = node.all_input_nodes
        for argument in arguments:
            flags |= marks[argument]
        if "custom" in node.meta and not (flags == _PARAMETER and kind & _VIEW):
            flags |= node.meta["custom"].get(DERIVATIVE_KEY, 0)
        if flags == _PARAMETER:
            if kind & _REPEATS or not repeated.isdisjoint(arguments):
                repeated.add(node)
            if kind & _PRODUCT and _is_layer(node, repeated):
                flags |= _DATA
        elif flags & _NOISE and kind & _PRODUCT:
            if not flags & DERIVATIVE.value:
                noisy |= _noisy_weight(node, marks)
            flags |= _DATA
        marks[node] = flags
    for node in noisy:
        marks[node] = _PARAMETER
    return {node: _BY_MARK[mark] for node, mark in marks.items()}


def _noisy_weight(product: fx.Node, marks: Mapping[fx.Node, int]) -> set[fx.Node]:
    """Returns the weight of the forward `product`, and values that it is computed from, if it is noisy.

    A noisy weight is computed from random numbers and parameters, at least one of its own size.
    """
    data, weight = product.args[packet(product) in BIASED :][:2]
    if not isinstance(data, fx.Node) or not isinstance(weight, fx.Node):
        return set()
    if marks[weight] != _PARAMETER | _NOISE or marks[data] & (_PARAMETER | _DATA) == _PARAMETER:
        return set()
    values = ancestors(weight, lambda node: packet(node) in _NOISES)
    size = numel(value_of(weight).shape)
    sizes = {numel(value_of(node).shape) for node in values if node.op != "call_function"}
    return {node for node in values if marks[node] & _PARAMETER} if size in sizes else set()


_PARAMETER, _DATA = Depends.PARAMETER.value, Depends.DATA.value


def is_derivative(node: fx.Node) -> bool:
    """Whether `node` is part of a derivative that the compiled code takes itself (``torch.func.grad``)."""
    return DERIVATIVE_KEY in node.meta.get("custom", ())


def _is_layer(node: fx.Node, repeated: set[fx.Node]) -> bool:
    """Whether `node`, a product of parameters, is a layer: ``F.linear``, x·w + b, or x·w with x repeated."""
    biased = packet(node) in BIASED
    x, w = node.args[biased], node.args[biased + 1]
    if not isinstance(x, fx.Node) or not isinstance(w, fx.Node) or w in repeated:
        return False
    is_stored = origin(w).op in ("placeholder", "get_attr")
    return is_stored and (biased or x in repeated or calls_linear(node))


def calls_linear(node: fx.Node) -> bool:
    """Whether `node` comes from a call of ``F.linear``, directly or in `nn.Linear` beside calls of hooks."""
    name, call = (node.meta.get("source_fn_stack") or [("", "")])[-1]
    if isinstance(call, type):
        return issubclass(call, nn.Linear) and str(name).startswith("linear")
    return bool(getattr(call, "__name__", call) == "linear")


def _of_placeholder(node: fx.Node, inputs: Sequence[GraphInput]) -> Depends:
    if "tangents" in str(node.target):
        return Depends.GRADIENT
    if tensor(node) is None:
        return Depends.NOTHING
    captured = graph_input(node, inputs)
    is_weight = WEIGHT_KEY in node.meta or (captured is not None and captured.static)
    return Depends.PARAMETER if is_weight else Depends.DATA


def graph_input(node: fx.Node, inputs: Sequence[GraphInput]) -> GraphInput | None:
    """Returns the captured input of the placeholder `node` of a joint or inference graph, or None.

    AOTAutograd's descriptor of a placeholder has the position of a plain input, the name of a lifted
    parameter, or, for a tensor subclass (a DTensor), the attribute and the descriptor of the subclass.
    """
    return input_of(node.meta.get("desc"), inputs)


def input_of(descriptor: Any, inputs: Sequence[GraphInput]) -> GraphInput | None:
    """Returns the captured input that AOTAutograd's `descriptor` describes, or None."""
    descriptor = plain_descriptor(descriptor)
    if isinstance(descriptor, GraphInput):
        return descriptor
    index = getattr(descriptor, "idx", None)
    if isinstance(index, int) and index < len(inputs):
        return inputs[index]
    target = getattr(descriptor, "target", None)
    if isinstance(target, str):
        return GraphInput(path=target, static=True)
    return None


def input_index(node: fx.Node) -> int | None:
    """Returns the position of `node` among the captured graph's inputs, None if it is not a plain input."""
    index = getattr(plain_descriptor(node.meta.get("desc")), "idx", None)
    return index if isinstance(index, int) else None


def plain_descriptor(descriptor: Any) -> Any:
    """Returns the descriptor of the whole tensor, if `descriptor` is for an attribute of a subclass."""
    while hasattr(descriptor, "base"):
        descriptor = descriptor.base
    return descriptor


def origin(node: fx.Node) -> fx.Node:
    """Returns the node behind views, casts, copies and dequantization, whose values `node` still has."""
    while _is_transparent(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def viewed(node: fx.Node) -> fx.Node:
    """Returns the tensor behind views, also behind an item of an operator that returns several views."""
    while isinstance(source := next(iter(node.args), None), fx.Node) and (
        packet(node) in VIEWS or (packet(node) is operator.getitem and packet(source) in VIEWS)
    ):
        node = source
    return node


def gemms_reading(cast: fx.Node) -> Iterator[GemmTag]:
    """Yields the GEMMs that read the results of `cast`, directly or through other operators."""
    for user, _ in readers(cast, lambda node: node.op == "call_function" and tag_of(node) is None):
        if (tag := tag_of(user)) is not None:
            yield tag


def _is_transparent(node: fx.Node) -> bool:
    return packet(node) in TRANSPARENT or node.target is ops.decode


def stored_as(node: fx.Node) -> Format | None:
    """Returns the format of the stored input that `node` dequantizes; None if it does not."""
    while _is_transparent(node) and isinstance(node.args[0], fx.Node):
        if (values := Decode.from_node(node)) is not None:
            return values.form.as_read.unpacked if origin(node).op == "placeholder" else None
        node = node.args[0]
    return None


def picked_stack(node: fx.Node) -> fx.Node | None:
    """Returns the stack of matrices that `node` picks from along its first dimension, or None.

    ``stack[E, …, n, k][index]``: experts take their weights by a number or a tensor of numbers.
    """
    op = packet(node)
    if op not in PICKS or not isinstance(node.args[0], fx.Node):
        return None
    stack = node.args[0]
    value = tensor(stack)
    if value is None or value.ndim < 3:
        return None
    if op is aten.index_select:
        return stack if argument_of(node, "dim") == 0 else None
    indices = argument_of(node, "indices")
    return stack if len(indices) == 1 and _is_list_of_numbers(indices[0]) else None


def _is_list_of_numbers(index: Any) -> bool:
    value = tensor(index)
    if value is None or value.ndim > 1:
        return False
    return not value.dtype.is_floating_point and value.dtype is not torch.bool


def stored(node: fx.Node) -> fx.Node:
    """Returns the tensor that stores a weight, behind views, casts, copies and the choice of an expert."""
    node = origin(node)
    stack = picked_stack(node)
    return origin(stack) if stack is not None else node


def main_sources(
    graph: fx.Graph, depends: dict[fx.Node, Depends], inputs: Sequence[GraphInput]
) -> dict[fx.Node, fx.Node]:
    """Maps each value that is computed from parameters alone to its main input, the largest.

    ``codes.to(bf16) * scale`` has ``codes``; ``mask * w`` has ``w``, because a parameter wins over another
    input of the same size. Products and concatenations of several inputs have no main input.
    """
    main: dict[fx.Node, fx.Node] = {}

    def rank(source: fx.Node) -> tuple[int, bool]:
        captured = graph_input(source, inputs)
        return numel(value_of(source).shape), captured is not None and captured.is_parameter

    for node in graph.nodes:
        value = tensor(node)
        is_condition = value is not None and value.dtype is torch.bool
        if depends[node] != Depends.PARAMETER or packet(node) in MATMULS or is_condition:
            continue
        sources = dict.fromkeys(main[argument] for argument in node.all_input_nodes if argument in main)
        if node.op in ("placeholder", "get_attr"):
            main[node] = node
        elif len(sources) == 1 or (sources and packet(node) not in (aten.cat, aten.stack)):
            main[node] = max(sources, key=rank)
    return main
