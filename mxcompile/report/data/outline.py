"""The part of a model's graph that a report draws.

A node is a matmul, an attention, a cast of an activation or gradient, or "glue": the other operators between
these (a norm, an activation, a residual sum), one node per module and position in the flow. Weights, masks
and position ids have no nodes.

A block contains the nodes whose paths are equal up to a number: ``layers.7`` contains ``layers.7.mlp.up``.
Blocks nest. Blocks with equal nodes are folded: one node stands for the same node of every block, and an edge
may lead back, from one block to the next. The time is linear in the nodes and in the depth of blocks.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

KINDS = ("gemm", "attention", "cast", "glue", "input")
PHASES = ("forward", "backward")
MAX_NODES = 300
"""Largest number of nodes per phase of a picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutlineNode:
    """One node of the picture.

    kind: see `KINDS`. phase: see `PHASES`. names: full module paths of all layers that the node stands for.
    label: a short title. detail: operators of glue, format and layout of a cast. shape: sizes of the first
    result, ``2×128×512``. role, gemm, precision: fields of the record of a matmul or attention. source:
    ``file:line``.
    """

    kind: str
    phase: str
    names: tuple[str, ...]
    label: str
    detail: str = ""
    shape: str = ""
    role: str = ""
    gemm: str = ""
    precision: str = ""
    source: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outline:
    """The picture of one compiled graph.

    nodes: nodes in the order of the flow. edges: pairs of indices into `nodes`; an edge that leads back or to
    its own node connects a block to the next equal block. omitted: number of nodes that are not shown.
    """

    nodes: tuple[OutlineNode, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    omitted: int = 0

    def fault(self) -> str:
        """Returns the JSON path and a description of the first invalid entry; "" if all are valid."""
        for index, node in enumerate(self.nodes):
            if not node.names:
                return f".nodes[{index}].names: expected at least one name"
        for index, edge in enumerate(self.edges):
            if max(edge) >= len(self.nodes):
                return f".edges[{index}]: node {max(edge)} is not among the {len(self.nodes)}"
        return ""

    def __add__(self, other: Outline) -> Outline:
        """Returns both outlines side by side."""
        shift = len(self.nodes)
        return Outline(
            nodes=self.nodes + other.nodes,
            edges=self.edges + tuple((a + shift, b + shift) for a, b in other.edges),
            omitted=self.omitted + other.omitted,
        )

    def only_backward(self, index: int) -> bool:
        """Whether only backward reads the forward node `index`."""
        readers = {self.nodes[b].phase for a, b in self.edges if a == index}
        return self.nodes[index].phase == "forward" and readers == {"backward"}

    def widened(self, copies: Callable[[str], Iterable[str]]) -> Outline:
        """Returns the outline with the `copies` of each name added: the equal layers that were not traced."""
        nodes = []
        for node in self.nodes:
            names = (copy for name in node.names for copy in (name, *copies(name)))
            nodes.append(dataclasses.replace(node, names=tuple(names)))
        return dataclasses.replace(self, nodes=tuple(nodes))


def folded(outline: Outline) -> Outline:
    """Returns `outline` with equal blocks folded and at most `MAX_NODES` nodes per phase."""
    keys: list[Any] = [None] * len(outline.nodes)  # nodes with equal keys are folded
    for phase in PHASES:
        chosen = [at for at, node in enumerate(outline.nodes) if node.phase == phase]
        places = _places([outline.nodes[at] for at in chosen], "", {})
        for at, nested in zip(chosen, places, strict=True):
            keys[at] = phase, nested
    members: dict[Any, list[OutlineNode]] = {}
    for node, key in zip(outline.nodes, keys, strict=True):
        members.setdefault(key, []).append(node)
    room = Counter(dict.fromkeys(PHASES, MAX_NODES))
    index: dict[Any, int] = {}
    for key, nodes in members.items():
        if room[nodes[0].phase]:
            room[nodes[0].phase] -= 1
            index[key] = len(index)
    ends = ((keys[a], keys[b]) for a, b in outline.edges)
    names = {key: dict.fromkeys(name for node in members[key] for name in node.names) for key in index}
    return Outline(
        nodes=tuple(dataclasses.replace(members[key][0], names=tuple(names[key])) for key in index),
        edges=tuple(sorted({(index[a], index[b]) for a, b in ends if a in index and b in index})),
        omitted=outline.omitted + len(members) - len(index),
    )


def _places(nodes: Sequence[OutlineNode], outer: str, kinds: dict[Any, int]) -> list[Any]:
    """Returns the keys of the nodes of the block `outer`. Equal blocks inside it have equal keys.

    kinds: maps the content of a block to a number, and gains new contents. Equal nodes outside inner blocks
    differ in their keys by the number of equal nodes before them.
    """
    blocks: defaultdict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        blocks[inner_block(node.names[0].removeprefix(outer).removeprefix("."))].append(index)
    keys: list[Any] = [None] * len(nodes)
    seen: Counter[Any] = Counter()
    for index in blocks.pop("", []):
        n = nodes[index]
        path = n.names[0].removeprefix(outer)
        like = path, n.kind, n.label, n.detail, n.shape, n.role, n.gemm, n.precision
        keys[index] = like, seen[like]
        seen[like] += 1
    for block, indices in blocks.items():
        full = f"{outer}.{block}" if outer else block
        inside = _places([nodes[i] for i in indices], full, kinds)
        content = block.rpartition(".")[0], frozenset(Counter(inside).items())
        kind = kinds.setdefault(content, len(kinds))
        for index, key in zip(indices, inside, strict=True):
            keys[index] = kind, key
    return keys


def inner_block(path: str) -> str:
    """Returns `path` up to its first number, "" without a number: ``layers.7.mlp.up`` → ``layers.7``."""
    steps = path.split(".")
    numbers = (position for position, step in enumerate(steps) if step.isdecimal())
    return ".".join(steps[: next(numbers, -1) + 1])
