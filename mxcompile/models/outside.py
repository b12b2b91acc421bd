"""Collects the matmuls that run outside of compiled graphs in a graph of their own.

    x @ w[i].T   ─▶   placeholders x, w (with the path of the whole parameter), aten.mm(x, w)

The products are not connected: each one has placeholders for its operands. Passes read the graph like any
other, so the record of a product equals the record of a compiled product, except for its decision.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, fx
from torch.utils._pytree import tree_leaves, tree_map_only

from mxcompile.graph.opsets import PICKS, TRANSPARENT, is_matmul_like, may_be_product
from mxcompile.models.names import GraphInput

_PART_OF = "_mx_part_of"
_PASSED_ON = TRANSPARENT | PICKS


class Outside:
    """Collects products in `graph`. parameters: all paths of each parameter, by ``id``."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.parameters: dict[int, tuple[str, ...]] = {}
        self._inside = 0

    def add(self, parameter: Tensor, path: str) -> None:
        """Registers `path` of `parameter`; a shared parameter has several paths."""
        self.parameters[id(parameter)] = (*self.parameters.get(id(parameter), ()), path)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Ignores operators that run in this context: they are parts of a product with a record."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    def follow(self, func: Any, args: Any, result: Any) -> None:
        """Passes the parameter's paths on to `result`, if `func` only views or slices it."""
        if func._overloadpacket not in _PASSED_ON or not args or not isinstance(args[0], Tensor):
            return
        paths = self._part_of(args[0])
        for leaf in tree_leaves(result) if paths else ():
            if isinstance(leaf, Tensor):
                setattr(leaf, _PART_OF, paths)

    def _part_of(self, value: Tensor) -> tuple[str, ...]:
        """Returns the paths of the parameter that `value` is a view or slice of, or ()."""
        return self.parameters.get(id(value)) or tuple(getattr(value, _PART_OF, ()))

    def takes(self, func: Any) -> bool:
        """Whether a call of `func` may be a product to record. Parts of recorded products are not."""
        if self._inside or not may_be_product(func):
            return False
        return not func._can_decompose() and "backward" not in str(func)

    def note(self, func: Any, args: Any, kwargs: Any, result: Any) -> fx.Node | None:
        """Adds the call of `func` to the graph if it is a product. Returns its node, or None."""

        def operand(value: Tensor) -> fx.Node:
            placeholder = self.graph.placeholder("operand")
            placeholder.meta["val"] = value
            if paths := self._part_of(value):
                placeholder.meta["desc"] = GraphInput(path=paths[0], others=paths[1:], static=True)
            return placeholder

        node = self.graph.call_function(func, *tree_map_only(Tensor, operand, (tuple(args), kwargs)))
        node.meta["val"] = result
        if is_matmul_like(node):
            return node
        for unused in (node, *node.all_input_nodes):
            self.graph.erase_node(unused)
        return None
