"""Fast verification of graphs between passes, at a small fraction of the cost of ``graph.lint()``."""

from __future__ import annotations

from torch import fx

from mxcompile.errors import VerificationError


def check(graph: fx.Graph, after: str) -> None:
    """Raises `VerificationError` if ``graph.lint()`` finds a fault after the pass named `after`.

    Torch's lint formats a message for every argument of every node before it checks it. Lint therefore runs
    only on graphs that fail `_is_sound`, to name the fault.
    """
    if _is_sound(graph):
        return
    try:
        graph.lint()
    except (RuntimeError, AssertionError, ValueError) as error:
        raise VerificationError(f"after {after}: {error}") from error


def _is_sound(graph: fx.Graph) -> bool:
    """Whether `graph` certainly passes lint.

    Nodes belong to `graph` and its side table, read only earlier nodes, have unique names and call callables.
    Returns False for any graph that calls methods or modules.
    """
    defined: set[fx.Node] = set()
    alike: dict[object, list[fx.Node]] = {}
    for node in graph.nodes:
        if node.graph is not graph or not defined.issuperset(node.all_input_nodes):
            return False
        defined.add(node)
        kind = id(node.target) if node.op == "call_function" else node.op
        alike.setdefault(kind, []).append(node)
    if len({node.name for node in defined}) != len(defined):
        return False
    for nodes in alike.values():
        op, target = nodes[0].op, nodes[0].target
        is_call = op == "call_function"
        if not (callable(target) if is_call else all(map(_is_legal, nodes))):
            return False
        filed = graph.find_nodes(op=op, target=target if is_call else None, sort=False)
        if not set(filed).issuperset(nodes):
            return False
    return True


def _is_legal(node: fx.Node) -> bool:
    """Whether `node`, which calls no function, is an input, the output or an existing attribute."""
    if not isinstance(node.target, str):
        return False
    if node.op != "get_attr":
        return node.op in ("placeholder", "output")
    holder = node.graph.owning_module
    for atom in node.target.split(".") if holder is not None else ():
        if (holder := getattr(holder, atom, None)) is None:
            return False
    return True
