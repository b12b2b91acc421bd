"""Recurrences over tokens that are spelled out, one step after the other.

    h[t] = a[t] · h[t − 1] + x[t]

An operator that combines different rows of one layer's result is a step. An operator that combines features
of one row (rotary embedding combines pairs) is not a step: its arguments select another dimension (see
`axes`).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from torch import fx

from mxcompile.graph.opsets import argument, aten, packet
from mxcompile.graph.tags import Kind, tag_of
from mxcompile.ops.view import argument_of, result_of
from mxcompile.passes.roles.axes import COLUMN, ROW, axes

_Selection = tuple[fx.Node, int]


class Recurrences:
    """The selections that every visited value is computed from, and the recurrences that they form."""

    def __init__(self) -> None:
        self._taken: dict[fx.Node, dict[_Selection, Any]] = {}
        self._first: dict[_Selection, fx.Node] = {}
        self._over_rows: dict[_Selection, bool] = {}

    def visit(self, node: fx.Node, arguments: Sequence[fx.Node], sources: Iterable[fx.Node]) -> list[fx.Node]:
        """Returns the first steps of the recurrences that `node` is a step of, a node for each recurrence.

        sources: sources of `node`.
        """
        if (selection := _selection(node)) is not None:
            source, dim, index = selection
            self._taken[node] = {(source, dim): index}
            return []
        if self._taken.keys().isdisjoint(arguments):
            return []
        merged: dict[_Selection, Any] = {}
        layers: dict[fx.Node, None] = {}
        for read in arguments:
            for key, index in self._taken.get(read, merged).items():
                if merged.setdefault(key, index) != index and self._is_over_rows(key, sources):
                    merged[key] = index
                    layers[self._first.setdefault(key, node)] = None
        if merged:
            self._taken[node] = merged
        return list(layers)

    def _is_over_rows(self, key: _Selection, sources: Iterable[fx.Node]) -> bool:
        if key not in self._over_rows:
            layers = [node for node in sources if (tag := tag_of(node)) and tag.kind is Kind.LINEAR]
            sides = [axes(*key, layer) for layer in layers]
            self._over_rows[key] = any(axis & ROW and not axis & COLUMN for axis in sides)
        return self._over_rows[key]


def _selection(node: fx.Node) -> tuple[fx.Node, int, Any] | None:
    """Returns the tensor, dimension and index that `node` selects, or None."""
    if packet(node) is aten.select:
        return argument(node), argument_of(node, "dim"), argument_of(node, "index")
    unbound, index = result_of(node)
    if unbound is not None and packet(unbound) is aten.unbind:
        return argument(unbound), argument_of(unbound, "dim"), index
    return None
