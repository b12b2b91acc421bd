"""Linear layers among matrix products: one operand is a weight, and the result is not a distance.

A weight is computed from parameters alone and stored as a matrix, or picked from a stored stack of matrices,
as experts are. Not weights: parameters concatenated with values computed from them, and the parameter of

    |x − w|² = |x|² − 2·x·wᵀ + |w|²

written out (codebooks, prototypes) or as in `torch.cdist`: [−2x, |x|², 1] · [w, 1, |w|²]ᵀ. The result is a
small difference of large terms, which a cast would destroy.
"""

from __future__ import annotations

from itertools import chain
from typing import Any

from torch import fx

from mxcompile.graph.opsets import SUMS, TRANSPARENT, aten, packet
from mxcompile.graph.tags import numel, tensor, value_of
from mxcompile.ops.view import argument_of
from mxcompile.passes.roles.flow import Depends, origin, picked_stack, stored

_NEAR = 6
"""Most operators between a product and the norms that it is added to."""
_SCALED = TRANSPARENT | SUMS | {aten.mul, aten.div, aten.neg}
_SQUARES = frozenset({aten.pow, aten.mul, aten.sum, aten.linalg_vector_norm, aten.square})


class Weights:
    """Finds weights among operands. depends: dependencies of every node."""

    def __init__(self, depends: dict[fx.Node, Depends]) -> None:
        self._depends = depends

    def is_weight(self, node: Any) -> bool:
        """Whether `node`, an operand of a product, is a weight."""
        if not isinstance(node, fx.Node):
            return False
        stack = picked_stack(origin(node))
        if stack is not None and self._depends[stack] == Depends.PARAMETER:
            return True
        source = origin(node)
        value = tensor(source)
        if self._depends[node] != Depends.PARAMETER or value is None:
            return False
        pieces = argument_of(source, "tensors") if packet(source) is aten.cat else ()
        if any(packet(origin(piece)) is not None for piece in pieces):  # composed of computed values
            return False
        if value.ndim >= 2:
            return True
        shape = value_of(node).shape  # a part of a flat parameter is a weight if it is a matrix
        return len(shape) > 1 and 1 not in shape[-2:] and numel(shape) <= numel(value.shape)

    def makes_layer(self, node: fx.Node, data: Any, weight: Any) -> bool:
        """Whether `node` multiplies `data`, which depends on data or gradients, by `weight` as a layer."""
        moving = Depends.DATA | Depends.GRADIENT
        if not isinstance(data, fx.Node) or not self._depends[data] & moving:
            return False
        return not self._is_distance(node, stored(weight))

    def makes_layer_of_parameters(self, node: fx.Node) -> bool:
        """Whether `node`, computed from parameters and constants alone, is a layer (see `dependencies`)."""
        moves = (Depends.DATA in self._depends[argument] for argument in node.all_input_nodes)
        return Depends.DATA in self._depends[node] and not any(moves)

    def _is_distance(self, node: fx.Node, parameter: fx.Node) -> bool:
        """Whether the sum of squares of `parameter` is added to the result of `node`."""
        seen, front = {node}, [node]
        for _ in range(_NEAR):
            users = [user for n in front for user in n.users if user not in seen and packet(user) in _SCALED]
            for user in users:
                others = [other for other in user.all_input_nodes if other not in seen]
                summed = (other.all_input_nodes for other in others if packet(other) in SUMS)
                terms = chain(others, *summed) if packet(user) in SUMS else ()
                if any(self._is_norm(term, parameter) for term in terms):
                    return True
            seen.update(users)
            front = users
        return False

    def _is_norm(self, node: fx.Node, parameter: fx.Node) -> bool:
        """Whether `node` is computed from squares of `parameter` alone."""
        if self._depends[node] != Depends.PARAMETER:
            return False
        squared = False
        for _ in range(_NEAR):
            if node is parameter:
                return squared
            op = packet(node)
            if op not in _SQUARES and op not in TRANSPARENT:
                return False
            squared |= op in _SQUARES
            node = node.all_input_nodes[0]
        return False
