"""outline: draw a graph, after the passes, as the picture in its report.

    every node of the graph → matmul, cast, glue or nothing     (one sweep)
    glue → one node per module, depth and step                  (depth: matmuls and casts before it)

The pair (depth, step) grows along every edge between two nodes, so joining glue never makes a cycle. The
graph does not change. Values computed from parameters, indices and constants alone are left out.
`report.data.outline` folds equal blocks.
"""

from __future__ import annotations

import operator
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import networkx as nx
import torch
from torch import fx

from mxcompile import ops
from mxcompile.graph.opsets import STREAM_SOURCES, SUMS, TRANSPARENT, packet
from mxcompile.graph.tags import Kind, hint, tags_of, tensor
from mxcompile.models.names import GraphInput, module_of, source_of
from mxcompile.ops.view import Cast
from mxcompile.passes.roles.flow import Depends, dependencies
from mxcompile.report import Outline, OutlineNode, folded
from mxcompile.report.data.outline import inner_block

_Edges = set[tuple[int, int]]


def outline(graph: fx.Graph, inputs: Sequence[GraphInput] = ()) -> Outline:
    """Returns the picture of `graph`. inputs: inputs of the captured graph."""
    drawing = _Drawing(graph, inputs)
    for node in graph.nodes:
        drawing.add(node)
    return folded(_sorted(drawing.drafts(), drawing.edges))


@dataclass(kw_only=True, slots=True)
class _Draft:
    """A node before folding. position: depth and step. operators: for glue, its operators in graph order."""

    node: OutlineNode
    position: tuple[int, int]
    operators: dict[str, None] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The module path."""
        return self.node.names[0]

    def change(self, **changes: Any) -> None:
        """Replaces fields of the node."""
        self.node = replace(self.node, **changes)


class _Drawing:
    """State of the sweep: the drafts, and the draft of every value."""

    def __init__(self, graph: fx.Graph, inputs: Sequence[GraphInput]) -> None:
        self._depends = dependencies(graph, inputs)
        self._drafts: list[_Draft] = []
        self._made_by: dict[fx.Node, int] = {}
        self._path: dict[fx.Node, tuple[str, str]] = {}
        self._glue: dict[tuple[str, str, tuple[int, int]], int] = {}
        self._with_matmuls: set[str] = set()
        self.edges: _Edges = set()

    def add(self, node: fx.Node) -> None:
        """Adds `node`, whose arguments were added before."""
        if node.op == "placeholder":
            self._add_input(node)
        if node.op != "call_function":
            return
        op = packet(node)
        sources = list(dict.fromkeys(self._made_by[n] for n in node.all_input_nodes if n in self._made_by))
        if tags_of(node):
            self._link(node, sources, self._matmul(node, sources))
        elif not sources and op not in STREAM_SOURCES:
            return
        elif op in TRANSPARENT or op is operator.getitem or self._is_recomputed(node):
            self._link(node, [], max(sources, key=lambda source: self._drafts[source].position))
        elif op in ops.CASTS:
            self._link(node, sources, self._cast(node, sources))
        else:
            self._link(node, sources, self._join_glue(node, sources))

    def drafts(self) -> list[_Draft]:
        """Returns all drafts. Sets the labels of glue, and the names of casts that several blocks read."""
        for draft in self._drafts:
            if draft.node.kind == "glue":
                names = list(draft.operators)
                draft.change(detail=", ".join(names))
                if draft.name in self._with_matmuls or not draft.node.label:
                    draft.change(label=" · ".join(names[:3]) + (" …" if len(names) > 3 else ""))
        readers: defaultdict[int, set[str]] = defaultdict(set)
        for source, index in self.edges:
            if self._drafts[source].node.kind == "cast":
                readers[source].add(inner_block(self._drafts[index].name))
        for source, index in self.edges:
            if len(readers[index]) > 1:
                self._drafts[index].change(names=self._drafts[source].node.names)
        return self._drafts

    def _link(self, node: fx.Node, sources: Iterable[int], index: int) -> None:
        self._made_by[node] = index
        self.edges.update((source, index) for source in sources if source != index)

    def _node(self, kind: str, node: fx.Node, path: str, label: str, **about: Any) -> OutlineNode:
        value: Any = node.meta.get("val")
        if isinstance(value, list | tuple):
            value = value[0] if value else None
        shape = "×".join(str(hint(size)) for size in value.shape) if isinstance(value, torch.Tensor) else ""
        phase = self._phase(node)
        return OutlineNode(kind=kind, phase=phase, names=(path,), label=label, shape=shape, **about)

    def _append(self, node: OutlineNode, position: tuple[int, int]) -> int:
        self._drafts.append(_Draft(node=node, position=position))
        return len(self._drafts) - 1

    def _after(self, sources: Iterable[int]) -> int:
        """Returns the depth of a node that reads `sources`."""
        drafts = (self._drafts[source] for source in sources)
        return max((draft.position[0] + (draft.node.kind != "glue") for draft in drafts), default=0)

    def _is_recomputed(self, node: fx.Node) -> bool:
        """Whether `node`, not a cast, is part of a derivative that backward computes from forward values."""
        late = node.meta.get("partitioner_tag") == "is_backward"
        return late and packet(node) not in ops.CASTS and self._phase(node) == "forward"

    def _phase(self, node: fx.Node) -> str:
        return "backward" if Depends.GRADIENT in self._depends[node] else "forward"

    def _module(self, node: fx.Node) -> tuple[str, str]:
        """Returns module path and class; a sum of gradients takes them from its last summand."""
        path, owner = module_of(node)
        if not path and self._phase(node) == "backward":
            entries = (self._path.get(n) or module_of(n) for n in reversed(node.all_input_nodes))
            path, owner = next((entry for entry in entries if entry[0]), ("", ""))
        self._path[node] = path, owner
        return path, owner

    def _add_input(self, node: fx.Node) -> None:
        value = tensor(node)
        moving = Depends.DATA | Depends.GRADIENT
        if value is not None and value.is_floating_point() and self._depends[node] & moving:
            label = "input" if self._phase(node) == "forward" else "gradient"
            new_node = self._node("input", node, "", label)
            self._made_by[node] = self._append(new_node, (0, 0))

    def _matmul(self, node: fx.Node, sources: list[int]) -> int:
        tags = tags_of(node)
        tag = tags[0]
        self._module(node)
        path = tag.name
        while path:
            self._with_matmuls.add(path)
            path = path.rpartition(".")[0]
        formula = tag.role.row.formula if tag.kind is Kind.PRODUCT else ""
        label = formula or tag.name.rpartition(".")[2] or "(root)"
        kind, label = ("attention", "attention") if tag.kind is Kind.ATTENTION else ("gemm", label)
        assert tag.choice is not None
        about = {"role": tag.role, "gemm": tag.gemm, "precision": tag.choice.precision, "source": tag.source}
        words = {key: str(word) for key, word in about.items()}
        return self._append(self._node(kind, node, tag.name, label, **words), (self._after(sources), 0))

    def _cast(self, node: fx.Node, sources: list[int]) -> int:
        label = detail = _operator(node)
        if (cast := Cast.from_node(node)) is not None:
            layout = "rowwise" if cast.side == -1 else "columnwise"
            label, detail = f"{cast.form.elem} {layout}", f"{cast.form}, {layout}"
        path, _ = self._module(node)
        new_node = self._node("cast", node, path, label, detail=detail, source=source_of(node))
        return self._append(new_node, (self._after(sources), 0))

    def _join_glue(self, node: fx.Node, sources: list[int]) -> int:
        path, owner = self._module(node)
        depth = self._after(sources)
        before = [self._drafts[source] for source in sources if self._drafts[source].node.kind == "glue"]
        steps = (d.position[1] + (d.name != path) for d in before if d.position[0] == depth)
        position = depth, max(steps, default=0)
        key = self._phase(node), path, position
        if key not in self._glue:
            new_node = self._node("glue", node, path, owner, source=source_of(node))
            self._glue[key] = self._append(new_node, position)
        index = self._glue[key]
        self._drafts[index].operators[_operator(node)] = None
        return index


def _operator(node: fx.Node) -> str:
    """Returns a short name: ``add`` for ``aten.add.Tensor``."""
    if packet(node) in SUMS:
        return "add"
    return str(packet(node)).rpartition(".")[2].strip("_")


def _sorted(drafts: list[_Draft], edges: _Edges) -> Outline:
    """Returns the drafts in a topological order close to the program's, without unread inputs."""
    flow: nx.DiGraph[int] = nx.DiGraph()
    flow.add_nodes_from(index for index, draft in enumerate(drafts) if draft.node.kind != "input")
    flow.add_edges_from(sorted(edges))
    made_from = {b: a for a, b in sorted(edges) if drafts[b].node.kind == "cast"}
    order = list(nx.lexicographical_topological_sort(flow, key=lambda index: made_from.get(index, index)))
    position = {index: number for number, index in enumerate(order)}
    return Outline(
        nodes=tuple(drafts[index].node for index in order),
        edges=tuple(sorted((position[a], position[b]) for a, b in edges)),
    )
