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
    names: set[str] = set()
    table = graph._find_nodes_lookup_table.table
    for node in graph.nodes:
        op, target = node.op, node.target
        if op == "call_function":
            legal, key = callable(target), (op, target)
        else:
            legal, key = _is_legal(node), (op, None)
        if not legal or node.graph is not graph or node not in table[key]:
            return False
        if not known.issuperset(node._input_nodes):
            return False
        known.add(node)
        names.add(node.name)
    return len(names) == len(known)


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
