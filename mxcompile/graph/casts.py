"""Casts, seen from what a product reads: codes may be viewed, copied, or picked from a stack of them.

    q, s = quantize(w)  →  index(q, [experts])  →  t  →  scaled_mm(…)         the cast, and the steps index, t

The same steps take w to the operand as it was before its cast (`reshapes.retaken`).
"""

from __future__ import annotations

from torch import fx

from mxcompile.graph.opsets import COPIES, PICKS, VIEWS, argument, aten, packet
from mxcompile.graph.reshapes import Chain
from mxcompile.ops.view import result_of

_STEPS = VIEWS | COPIES | PICKS


def made_by(part: fx.Node) -> tuple[fx.Node, Chain]:
    """The call that makes `part`, codes or scales of an operand, and the steps from its result to `part`."""
    steps: list[fx.Node] = []
    while packet(part) in _STEPS and part.target is not aten.view.dtype:
        steps.append(part)
        part = argument(part)
    call, _ = result_of(part)
    return part if call is None else call, tuple(reversed(steps))
