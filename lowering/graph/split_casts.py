"""split_casts: elements and scales of a cast made apart, so that what needs one of them does not make both.

    encode(x)  →  scale_of(x), encode_with(x, scale)

For casts in other formats than MXFP8, where no template makes both. Numerics do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, LoweringPass, Reasons


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitCasts(LoweringPass):
    """For all targets."""

    name: ClassVar[str] = "split_casts"

    def apply(self, graph: fx.Graph) -> Reasons:
        """Split the casts of `graph`; a part that nobody reads disappears."""
        build = Builder(graph, self.name)
        for node in graph.find_nodes(op="call_function", target=ops.encode):
            _split(build, node)
        graph.eliminate_dead_code()
        return NO_REASONS


def _split(build: Builder, cast: fx.Node) -> None:
    results: dict[Any, fx.Node] = {user.args[1]: user for user in cast.users}
    with build.graph.inserting_before(cast):
        given = cast.args[5] if len(cast.args) > 5 else None
        scale = given if given is not None else build.call(ops.scale_of, *cast.args[:3], like=cast)
        parts: list[Any] = [None, scale]
        if 0 in results and results[0].users:
            source, *how = cast.args[:5]
            parts[0] = build.call(ops.encode_with, source, scale, *how, like=cast)
    for index, user in results.items():
        part = parts[index]
        if part is not None:
            user.replace_all_uses_with(part)
        build.graph.erase_node(user)
    build.graph.erase_node(cast)
