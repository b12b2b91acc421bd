"""Checking between passes that a graph is well-formed, at a small part of the price of ``graph.lint()``."""

from __future__ import annotations

from torch import fx

from mxcompile.errors import VerificationError


def check(graph: fx.Graph, after: str) -> None:
    """Raise `VerificationError` if ``graph.lint()`` finds a fault, after the pass called `after`.

    Torch's lint writes a message for every argument of every node before it looks. Here it is called only
    for a graph that `_is_sound` doubts, and says what the fault is.
    """
    if _is_sound(graph):
        return
    try:
        graph.lint()
    except (RuntimeError, AssertionError, ValueError) as error:
        raise VerificationError(f"after {after}: {error}") from error


def _is_sound(graph: fx.Graph) -> bool:
    """Whether everything that lint asks for certainly holds.

    Nodes belong to `graph` and are in its side table, read only what comes before them, have names of their
    own and call what can be called. A graph with calls of methods or modules is not looked at further.
    """
    known: set[fx.Node] = set()
    alike: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.graph is not graph or not known.issuperset(node.all_input_nodes):
            return False
        known.add(node)
        kind = id(node.target) if node.op == "call_function" else node.op
        alike.setdefault(kind, []).append(node)
    if len({node.name for node in known}) != len(known):
        return False
    return all(_are_legal(nodes) and _are_filed(nodes) for nodes in alike.values())


def _are_filed(nodes: list[fx.Node]) -> bool:
    """Whether the graph finds `nodes`, all calls of one function or all of another operation."""
    first = nodes[0]
    target = first.target if first.op == "call_function" else None
    return set(first.graph.find_nodes(op=first.op, target=target, sort=False)).issuperset(nodes)


def _are_legal(nodes: list[fx.Node]) -> bool:
    """Whether each of `nodes`, of one kind, is a call, an input, the output or an attribute that exists."""
    if nodes[0].op == "call_function":
        return callable(nodes[0].target)
    return all(map(_is_legal, nodes))


def _is_legal(node: fx.Node) -> bool:
    """Whether `node`, no call of a function, is an input, the output or an attribute that exists."""
    if not isinstance(node.target, str):
        return False
    if node.op != "get_attr":
        return node.op in ("placeholder", "output")
    holder = node.graph.owning_module
    for atom in node.target.split(".") if holder is not None else ():
        holder = getattr(holder, atom, None)
        if holder is None:
            return False
    return True
