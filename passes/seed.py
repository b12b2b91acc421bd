"""seed: give stochastic casts a seed, and each a stream of random numbers.

    cast(x, copy)  →  cast(x, copy, randint(2^32), number)

Each run of the graph draws one seed from torch's generator, so `torch.manual_seed` makes runs reproducible.
Streams are numbered in graph order, after `share` merged equal casts, so that rounding errors of two casts
with one seed are independent.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from mxcompile.formats.stochastic import SEEDS
from mxcompile.graph.build import Builder
from mxcompile.graph.opsets import aten
from mxcompile.graph.tags import value_of
from mxcompile.ops.view import Cast


@dataclass(frozen=True, kw_only=True, slots=True)
class Seed:
    """Gives casts with stochastic formats a seed and a stream of random numbers."""

    name: ClassVar[str] = "seed"

    def apply(self, graph: fx.Graph) -> None:
        """Sets seed and stream of the stochastic casts of `graph`."""
        casts = [cast for cast in Cast.calls(graph) if cast.form.stochastic and cast.seed is None]
        if not casts:
            return
        seed = _drawn(graph, casts[0])
        for stream, cast in enumerate(casts):
            cast.node.args = cast.arguments(seed=seed, stream=stream)


def _drawn(graph: fx.Graph, cast: Cast) -> fx.Node:
    """Draws a seed on the device of `cast`, right behind the inputs: forward or backward may contain it."""
    options = {"dtype": torch.int64, "device": value_of(cast.x).device}
    with graph.inserting_before(next(node for node in graph.nodes if node.op != "placeholder")):
        # Inductor replaces other overloads of randint by its own generator, which has other numbers
        drawn = Builder(graph, Seed.name).call(
            aten.randint.generator, SEEDS, [1], generator=None, like=cast.node, **options
        )
    for key in ("recompute", "ac_graph_id"):  # checkpointing must not draw a second seed
        drawn.meta.pop(key, None)
    return drawn
