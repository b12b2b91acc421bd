"""Erasing nodes that nobody reads."""

from __future__ import annotations

import torch
from torch import fx
from torch._guards import TracingContext


def eliminate(graph: fx.Graph) -> bool:
    """Erase what ``graph.eliminate_dead_code()`` erases; returns whether that is anything.

    Torch asks of every node whether it is pure, which takes longer than all the rest: here only nodes without
    users are asked.
    """
    random = torch._inductor.config.fallback_random if TracingContext.try_get() else True
    return graph.eliminate_dead_code(lambda node: bool(node.users) or node.is_impure(random))
