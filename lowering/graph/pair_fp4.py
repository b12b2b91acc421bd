"""pair_fp4: one read of a tensor for both of its packed copies, and one for the amax of both.

    encode_packed(x, −1), encode_packed(x, −2)            →  encode_packed_both(x)
    largest(x), hadamard_largest(x)[1]                    →  hadamard_largest(x)[0], hadamard_largest(x)[1]

For chips with packed FP4 operands. Casts to random elements stay apart, because their random numbers take the
registers of the second copy. So do two copies if one needs an amax that is computed behind the other.
Numerics do not change.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.graph import dead
from mxcompile.graph.build import Builder
from mxcompile.graph.tags import tensor
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, LoweringPass, Reasons
from mxcompile.lowering.graph.vendor_fp4 import FP4_CASTS
from mxcompile.ops.view import arguments_of, results_of


@dataclass(frozen=True, kw_only=True, slots=True)
class PairFP4(LoweringPass):
    """For chips with a GEMM of packed FP4 operands."""

    name: ClassVar[str] = "pair_fp4"
    templates: ClassVar[tuple[str, ...]] = FP4_CASTS

    @property
    def applies(self) -> bool:
        """Where casts write packed copies."""
        return bool(self.target.fp4_scales)

    def apply(self, graph: fx.Graph) -> Reasons:
        """Merge the pairs of `graph`, each where its first node was."""
        build = Builder(graph, self.name)
        for node in list(graph.find_nodes(op="call_function", target=ops.hadamard_largest)):
            _share_amax(build, node)
        waiting: dict[Any, fx.Node] = {}
        for node in list(graph.find_nodes(op="call_function", target=ops.encode_packed)):
            key = _key(node)
            other = waiting.get(key)
            if other is None or _side(other) == _side(node) or not _is_ready(node, before=other):
                waiting[key] = node
            else:
                _merge(build, first=waiting.pop(key), second=node)
        dead.eliminate(graph)
        return NO_REASONS


def _share_amax(build: Builder, both: fx.Node) -> None:
    """Let `both` compute the amax of the tensor that `largest` computes."""
    source = both.args[0]
    assert isinstance(source, fx.Node)
    plain = next((user for user in source.users if user.target is ops.largest), None)
    if plain is None:
        return
    if plain < both:
        plain.prepend(both)
        for _, result in sorted(results_of(both)):
            both.append(result)
    with build.graph.inserting_after(both):
        first = build.call(operator.getitem, both, 0, like=plain)
    build.replace(plain, first)


def _key(cast: fx.Node) -> tuple[Any, ...]:
    """Source, format and scale layout, alike in both copies of a tensor; alone for random elements."""
    given = arguments_of(cast)
    form = Format.of(given["fmt"])
    return given["x"], form.untransformed, given["scale_layout"], cast if form.stochastic else None


def _side(cast: fx.Node) -> int:
    """The dimension of blocks, counted from the last, which is −1."""
    given = arguments_of(cast)
    value = tensor(given["x"])
    assert value is not None
    dim: int = given["block_dim"]
    return dim if dim < 0 else dim - value.ndim


def _is_ready(cast: fx.Node, *, before: fx.Node) -> bool:
    """Whether all that `cast` reads is there at `before`, and `cast` has a transform along columns alone."""
    form = Format.of(arguments_of(cast)["fmt"])
    is_placed = form.hadamard is None or _side(cast) == -2
    return is_placed and all(node < before for node in cast.all_input_nodes)


def _merge(build: Builder, *, first: fx.Node, second: fx.Node) -> None:
    casts = sorted((first, second), key=_side, reverse=True)
    rows, columns = map(arguments_of, casts)
    given = rows["fmt"], columns["fmt"], rows["amax"], columns["amax"], rows["scale_layout"]
    with build.graph.inserting_before(first):
        both = build.call(ops.encode_packed_both, rows["x"], *given, like=first)
        results = [build.call(operator.getitem, both, index, like=first) for index in range(4)]
    for cast, outputs in zip(casts, (results[:2], results[2:]), strict=True):
        for place, user in list(results_of(cast)):
            build.replace(user, outputs[place])
        build.graph.erase_node(cast)
