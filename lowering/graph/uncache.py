"""uncache: casts of weights whose results are not kept, because codes are read and not values.

    quantize_cached(w)  →  quantize(w)

A copy that is kept from call to call is of values (see `cpu.copies`). Numerics do not change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import fx

from mxcompile import ops
from mxcompile.lowering.graph.lowering_pass import NO_REASONS, LoweringPass, Reasons


@dataclass(frozen=True, kw_only=True, slots=True)
class Uncache(LoweringPass):
    """For all targets, after `expand` has made values of what products read."""

    name: ClassVar[str] = "uncache"

    def apply(self, graph: fx.Graph) -> Reasons:
        """Replace the cached casts of `graph` that are left."""
        for cast in graph.find_nodes(op="call_function", target=ops.quantize_cached):
            cast.target = ops.quantize
        return NO_REASONS
