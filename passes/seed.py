"""seed: give stochastic casts a seed, and each a stream of random numbers.

    cast(x, copy)  →  cast(x, copy, draw_seed(), number)

Each run of the graph draws one seed from torch's generator, so `torch.manual_seed` makes runs reproducible.
Streams are numbered in graph order, after `share` merged equal casts, so that rounding errors of two casts
with one seed are independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import argument
from mxcompile.graph.tags import tensor, value_of
from mxcompile.ops.view import Cast


@dataclass(frozen=True, kw_only=True, slots=True)
class Seed:
    """Gives casts with stochastic formats a seed and a stream of random numbers."""

    name: ClassVar[str] = "seed"

    def apply(self, graph: fx.Graph) -> None:
        """Sets seed and stream of the stochastic casts of `graph`."""
        views = map(Cast.from_node, graph.find_nodes(op="call_function", target=ops.cast))
        casts = [cast for cast in views if cast is not None and cast.form.stochastic and cast.seed is None]
        if not casts:
            return
        seed = _drawn(graph, casts[0].node)
        for stream, cast in enumerate(casts):
            cast.node.args = cast.arguments(seed=seed, stream=stream)


def _drawn(graph: fx.Graph, cast: fx.Node) -> fx.Node:
    """Draws a seed on the device of `cast`, right behind the inputs: forward or backward may contain it."""
    source = value_of(argument(cast))
    inputs = graph.find_nodes(op="placeholder")
    same = [node for node in inputs if (value := tensor(node)) is not None and value.device == source.device]
    candidates = [node for node in same if "tangents" not in str(node.target)]
    # estimates count the bytes of `like` as read
    like = min(candidates, key=lambda node: value_of(node).ndim, default=argument(cast))
    after = inputs[-1] if like.op == "placeholder" else like
    with graph.inserting_after(after):
        drawn = Builder(graph, Seed.name).call(ops.draw_seed, like, like=cast)
    for key in ("recompute", "ac_graph_id"):  # checkpointing must not draw a second seed
        drawn.meta.pop(key, None)
    return drawn
