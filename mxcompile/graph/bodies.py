"""Subgraphs that a node calls: bodies of ``torch.cond``, ``while_loop``, ``scan`` and similar operators.

    cond(pred, true, false, (x, w))    calls true or false with x and w
    scan(step, init, xs, more)         calls step once for each slice of xs

A node calls the graph modules among its ``get_attr`` inputs, so no list of such operators is needed.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.utils._pytree import tree_leaves

from mxcompile.graph.opsets import ancestors, argument, aten, is_matmul_like
from mxcompile.graph.tags import tensor

OWNER_KEY = "mx_owner"
"""``node.meta`` key in a flattened graph: the original node, or the node that calls the original's body."""
CALLS_KEY = "mx_calls"
"""``node.meta`` key in a flattened graph: how often the node of a body runs."""

_CARRIES = {"scan": 1, "while_loop": 2, "while_loop_stack_output": 2}
"""Operators that repeat a body, with the argument index of the values that each run passes to the next."""


def bodies(node: fx.Node) -> list[fx.GraphModule]:
    """Returns the graphs that `node` calls."""
    if node.op != "call_function":
        return []
    owner = node.graph.owning_module
    names = (str(read.target) for read in node.all_input_nodes if read.op == "get_attr")
    values = (getattr(owner, name, None) for name in names)
    return [body for body in values if isinstance(body, fx.GraphModule)]


def is_body(graph: fx.Graph) -> bool:
    """Whether another graph calls `graph`: its outputs lack the descriptors of AOTAutograd's own graphs."""
    return all("desc" not in output.meta for output in graph.find_nodes(op="output"))


def hides_products(node: fx.Node) -> bool:
    """Whether the bodies of `node`, or bodies inside them, contain matrix products."""
    return bool(_with_products(node))


def _with_products(node: fx.Node) -> list[fx.GraphModule]:
    """Returns the bodies of `node` that contain matrix products, directly or in bodies inside them."""
    return [
        body
        for body in bodies(node)
        if any(is_matmul_like(inner) or hides_products(inner) for inner in body.graph.nodes)
    ]


def operands_of(node: fx.Node, body: fx.GraphModule) -> dict[fx.Node, Any]:
    """Maps each input of `body` to the argument that `node` passes to it, or to None without an argument.

    Higher-order operators pass their last arguments to the body.
    """
    inputs = body.graph.find_nodes(op="placeholder")
    operands = tree_leaves(node.args)[-len(inputs) :] if inputs else []
    return dict(zip(inputs, [None] * (len(inputs) - len(operands)) + operands, strict=True))


def flattened(graph: fx.Graph) -> fx.Graph:
    """Returns a copy of `graph` with the bodies that have products inlined before the nodes that call them.

    The copy shows which parameters those products read and where their results go. It is for analysis only,
    because its values are approximate: the call's argument or its first slice replaces a body's input, and
    the result of any body with products replaces the call's result. If one run of a body passes a
    value to the next run, and the first run gets a constant, the value stays an input.
    """
    flat = fx.Graph()
    _Flattening(flat, None, 1).copy(graph, {})
    return flat


class _Flattening:
    """Copies a graph to the end of `flat`.

    owner: node that calls the graph, None for the outermost graph. calls: how often the graph runs.
    """

    def __init__(self, flat: fx.Graph, owner: fx.Node | None, calls: Any) -> None:
        self._flat = flat
        self._owner = owner
        self._calls = calls

    def copy(self, graph: fx.Graph, copies: dict[fx.Node, fx.Node]) -> list[Any]:
        """Copies `graph`, whose inputs map to `copies`. Returns the results if `graph` is a body."""
        returned: dict[fx.Node, list[list[Any]]] = {}
        for node in graph.nodes:
            if node.op == "output" and self._owner is not None:
                return [copies.get(value) for value in tree_leaves(node.args[0])]
            if called := _with_products(node):
                returned[node] = [self._body(node, body, copies) for body in called]
            if node not in copies:
                result = self._result(node, returned)
                copies[node] = result or self._noted(self._flat.node_copy(node, copies.__getitem__), node)
        return []

    def _body(self, node: fx.Node, body: fx.GraphModule, copies: dict[fx.Node, fx.Node]) -> list[Any]:
        """Copies `body`, which `node` calls. Returns its results."""
        inside: dict[fx.Node, fx.Node] = {}
        calls, position = self._calls, _CARRIES.get(getattr(node.target, "__name__", ""))
        passed = [] if position is None else tree_leaves(node.args[position])
        carried = [  # constants, which later runs of the body replace
            value
            for value in passed
            if isinstance(value, fx.Node)
            and all(reached.op not in ("placeholder", "get_attr") for reached in ancestors(value))
        ]
        for inner, outer in operands_of(node, body).items():
            value = tensor(outer)
            if value is None or tensor(inner) is None or outer in carried:
                continue
            if _shape(inner) == _shape(outer):
                inside[inner] = copies[outer]
            elif _shape(inner) == _shape(outer)[1:]:
                inside[inner] = self._slice(copies[outer], inner)
                calls = value.shape[0] * self._calls
        return _Flattening(self._flat, self._owner or node, calls).copy(body.graph, inside)

    def _slice(self, whole: fx.Node, like: fx.Node) -> fx.Node:
        """Returns the first slice of `whole`, as a new input if `whole` is an input.

        A select node would make a stack of layers look like a stack of experts.
        """
        if whole.op != "placeholder":
            return self._call(aten.select.int, whole, 0, 0, like=like)
        first = self._flat.placeholder(str(whole.target))  # passes match gradients to inputs by the target
        first.meta = {**whole.meta, "val": like.meta["val"]}
        return first

    def _result(self, node: fx.Node, returned: Mapping[fx.Node, list[list[Any]]]) -> fx.Node | None:
        """Returns a copied result of a body for `node` if `node` picks a result of a call, else None."""
        if node.target is not operator.getitem or (call := argument(node)) not in returned:
            return None
        index: Any = node.args[1]
        results = [values[index] for values in returned[call] if index < len(values)]
        results = [result for result in results if tensor(result) is not None]
        whole = [result for result in results if _shape(result) == _shape(node)]
        if whole:
            either: fx.Node = whole[0]
            for other in whole[1:]:
                either = self._call(aten.where.self, either, either, other, like=node)
            return either
        slices = [result for result in results if _shape(result) == _shape(node)[1:]]
        return self._call(aten.stack.default, slices[:1], like=node) if slices else None

    def _call(self, target: Any, *args: Any, like: fx.Node) -> fx.Node:
        call = self._flat.call_function(target, args)
        call.meta["val"] = like.meta["val"]
        return self._noted(call, like)

    def _noted(self, copied: fx.Node, node: fx.Node) -> fx.Node:
        copied.meta[OWNER_KEY] = self._owner or node
        if self._owner is not None:
            copied.meta[CALLS_KEY] = self._calls
            copied.meta.pop("seq_nr", None)  # sequence numbers of another trace match nothing here
        return copied


def _shape(node: fx.Node) -> tuple[str, ...]:
    """Returns the shape of the tensor of `node`, symbolic sizes as expressions. Adds no guard."""
    value = tensor(node)
    return () if value is None else tuple(map(str, value.shape))
