"""The part of a model's graph that a report draws.

A node is a matmul, an attention, a cast of an activation or gradient, or everything else that lies between
those, one node per module and place in the flow ("glue": a norm, an activation, a residual sum). Weights,
masks and positions are not in it.

A block is what shares its path up to a number: ``layers.7`` of ``layers.7.mlp.up``; inside it lie others.
Equal blocks are folded: each of their nodes becomes one that stands for all, and an edge may lead back, from
a block to the next. Blocks are equal if they hold equal nodes. Linear in the nodes and the depth of blocks.
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
"""Of each phase: more make no picture."""


@dataclass(frozen=True, kw_only=True, slots=True)
class OutlineNode:
    """One node of the picture.

    kind: see `KINDS`. phase: see `PHASES`. names: full module paths of all it stands for, for a matmul those
    of its records. label: a short title. detail: operators of glue, format and layout of a cast. shape: sizes
    of its first result, ``2×128×512``. role, gemm, precision: as in the record, of a matmul or attention.
    source: ``file:line``.
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

    nodes: in the order of the flow. edges: pairs of positions in `nodes`; one that leads back or to itself is
    from a layer to the next equal one. omitted: how many nodes more there were.
    """

    nodes: tuple[OutlineNode, ...] = ()
    edges: tuple[tuple[int, int], ...] = ()
    omitted: int = 0

    def fault(self) -> str:
        """Returns what in an outline from a file cannot be drawn, as JSON path and sentence; else ""."""
        for index, node in enumerate(self.nodes):
            if not node.names:
                return f".nodes[{index}].names: expected at least one name"
        for index, edge in enumerate(self.edges):
            if max(edge) >= len(self.nodes):
                return f".edges[{index}]: node {max(edge)} is not among the {len(self.nodes)}"
        return ""

    def __add__(self, other: Outline) -> Outline:
        """Both, side by side."""
        shift = len(self.nodes)
        return Outline(
            nodes=self.nodes + other.nodes,
            edges=self.edges + tuple((a + shift, b + shift) for a, b in other.edges),
            omitted=self.omitted + other.omitted,
        )

    def only_backward(self, index: int) -> bool:
        """Whether node `index`, of forward, is read in backward alone."""
        readers = {self.nodes[b].phase for a, b in self.edges if a == index}
        return self.nodes[index].phase == "forward" and readers == {"backward"}

    def widened(self, copies: Callable[[str], Iterable[str]]) -> Outline:
        """With every name joined by its `copies`: layers that are equal to it and were not traced."""
        return dataclasses.replace(
            self,
            nodes=tuple(
                dataclasses.replace(
                    node, names=tuple(one for name in node.names for one in (name, *copies(name)))
                )
                for node in self.nodes
            ),
        )


def folded(outline: Outline) -> Outline:
    """`outline` with equal blocks joined, and no more than `MAX_NODES` nodes of each phase."""
    keys = _keys(outline.nodes)
    members: dict[Any, list[OutlineNode]] = {}
    for node, key in zip(outline.nodes, keys, strict=True):
        members.setdefault(key, []).append(node)
    room = Counter(dict.fromkeys(PHASES, MAX_NODES))
    place: dict[Any, int] = {}
    for key, nodes in members.items():
        if room[nodes[0].phase]:
            room[nodes[0].phase] -= 1
            place[key] = len(place)
    ends = ((keys[a], keys[b]) for a, b in outline.edges)
    return Outline(
        nodes=tuple(_joined(members[key]) for key in place),
        edges=tuple(sorted({(place[a], place[b]) for a, b in ends if a in place and b in place})),
        omitted=outline.omitted + len(members) - len(place),
    )


def _joined(nodes: Sequence[OutlineNode]) -> OutlineNode:
    names = dict.fromkeys(name for node in nodes for name in node.names)
    return dataclasses.replace(nodes[0], names=tuple(names))


def _keys(nodes: Sequence[OutlineNode]) -> list[Any]:
    """For every node what it is joined by: what its block equals, and its place there."""
    keys: list[Any] = [None] * len(nodes)
    for phase in PHASES:
        chosen = [index for index, node in enumerate(nodes) if node.phase == phase]
        for index, key in zip(chosen, _places([nodes[i] for i in chosen], "", {}), strict=True):
            keys[index] = phase, key
    return keys


def _places(nodes: Sequence[OutlineNode], outer: str, kinds: dict[Any, int]) -> list[Any]:
    """Keys of the nodes of the block `outer`; equal blocks inside it have equal keys.

    kinds: a number for every different block. A node of no inner block is told from others like it by how
    many came before.
    """
    blocks: defaultdict[str, list[int]] = defaultdict(list)
    for index, node in enumerate(nodes):
        blocks[inner_block(node.names[0].removeprefix(outer).removeprefix("."))].append(index)
    keys: list[Any] = [None] * len(nodes)
    seen: Counter[Any] = Counter()
    for index in blocks.pop("", []):
        like = _likeness(nodes[index], outer)
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


def _likeness(node: OutlineNode, block: str) -> tuple[str, ...]:
    """Returns the features that a node shares with its like in a block that equals `block`."""
    path = node.names[0].removeprefix(block)
    return path, node.kind, node.label, node.detail, node.shape, node.role, node.gemm, node.precision


def inner_block(path: str) -> str:
    """`path` up to its first number, "" without one: ``layers.7.mlp.up`` → ``layers.7``."""
    steps = path.split(".")
    numbers = (position for position, step in enumerate(steps) if step.isdecimal())
    return ".".join(steps[: next(numbers, -1) + 1])
