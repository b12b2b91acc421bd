"""Compiled autograd: maps the GEMMs of its graph to the graphs whose backward it compiles.

    joint graph ─ mark ─▶ backward ─ compiled autograd ─ Dynamo ─ marks ─▶ AOTAutograd ─ set_tags ─▶ lowering

Compiled autograd copies the backward of every compiled graph into one graph with the rest of autograd's work.
Dynamo keeps the ``custom`` metadata of the nodes. AOTAutograd drops it, but keeps the products in order. The
compile of this graph restores the tags, and passes kernel names to the compilations that own the GEMMs.
"""

from __future__ import annotations

import logging
import uuid
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any
from weakref import WeakValueDictionary

from torch import fx

from mxcompile import ops
from mxcompile.graph.attention import ATTENTIONS
from mxcompile.graph.opsets import is_matmul, packet
from mxcompile.graph.tags import GemmTag, set_tag, tags_of

log = logging.getLogger(__name__)

_MARK = "mxcompile"
"""Key in a node's ``custom`` metadata with the key of its backward and the indices of its GEMMs."""


Owner = Any
"""The `Compilation` of a forward and backward; its module imports this module."""


@dataclass(frozen=True, eq=False)
class _Marked:
    """A backward: its owner, and the tags of its GEMMs by index."""

    owner: Owner
    tags: dict[int, GemmTag]


_MARKED: WeakValueDictionary[str, _Marked] = WeakValueDictionary()


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A product in Dynamo's graph. marked: its backward, or None. indices: GEMM indices in it."""

    target: Any
    marked: _Marked | None
    indices: tuple[int, ...]


def mark(backward: fx.Graph, owner: Owner) -> object:
    """Marks the GEMMs of `backward` as owned by `owner`, for the lifetime of the result."""
    nodes = [node for node in backward.nodes if tags_of(node)]
    marked = _Marked(owner, {tag.index: tag for node in nodes for tag in tags_of(node)})
    key = uuid.uuid4().hex  # a cached graph may have marks of another process
    _MARKED[key] = marked
    for node in nodes:
        indices = tuple(tag.index for tag in tags_of(node))
        node.meta["custom"] = {**node.meta.get("custom", {}), _MARK: (key, indices)}
    return marked


def token(products: Iterable[Mark]) -> str:
    """Returns the token (see `reporting.entry`) of a graph with `products`: the tokens of their owners."""
    return " ".join(sorted({p.marked.owner.part.token for p in products if p.marked is not None}))


def marks(graph: fx.Graph) -> Iterator[Mark]:
    """Yields the marks of all products in Dynamo's `graph`, in order."""
    for node in _products(graph):
        key, indices = node.meta.get("custom", {}).get(_MARK, ("", ()))
        yield Mark(target=node.target, marked=_MARKED.get(key), indices=tuple(indices))


class OwnedGemms:
    """The GEMMs of a compiled autograd graph, with their owners."""

    def __init__(self) -> None:
        self._owners: list[tuple[Owner, int]] = []

    def set_tags(self, graph: fx.Graph, products: Iterable[Mark]) -> None:
        """Sets the tags of `products` on the products of `graph`, if both are the same products in order."""
        nodes, new_marks = list(_products(graph)), list(products)
        if [node.target for node in nodes] != [product.target for product in new_marks]:
            log.info(
                "the graph of compiled autograd has other products than its forwards: reports do not list"
                " them"
            )
            return
        for node, product in zip(nodes, new_marks, strict=True):
            if product.marked is not None:
                first = len(self._owners)  # indices are unique in this graph
                tags = (product.marked.tags[index] for index in product.indices)
                set_tag(node, *(replace(tag, index=number) for number, tag in enumerate(tags, first)))
                self._owners += ((product.marked.owner, index) for index in product.indices)

    def name_kernels(self, kernels: Mapping[int, str]) -> None:
        """Passes kernel names to the owners of the GEMMs."""
        named: defaultdict[Owner, dict[int, str]] = defaultdict(dict)
        for index, kernel in kernels.items():
            owner, index_there = self._owners[index]
            named[owner][index_there] = kernel
        for owner, theirs in named.items():
            owner.name_kernels(theirs)


def _products(graph: fx.Graph) -> Iterator[fx.Node]:
    products = ops.PRODUCTS.union(ATTENTIONS)
    for node in graph.nodes:
        if node.op == "call_function" and (is_matmul(node) or packet(node) in products):
            yield node
