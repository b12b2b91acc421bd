"""Finds the cast behind an operand of a product, through views, copies and picks of its qdata.

    q, s = quantize(w)  →  index(q, [experts])  →  t  →  scaled_mm(…)         cast; steps index, t

The same steps map w to the operand's unquantized values (`reshapes.retaken`).
"""

from __future__ import annotations

from torch import fx

from mxcompile.graph.opsets import COPIES, PICKS, VIEWS, argument, aten, packet
from mxcompile.graph.reshapes import Chain
from mxcompile.ops.view import result_of

_STEPS = VIEWS | COPIES | PICKS


def producing_call(part: fx.Node) -> tuple[fx.Node, Chain]:
    """Returns the call that produces `part` (an operand's qdata or scales), and the steps to `part`."""
    steps: list[fx.Node] = []
    while packet(part) in _STEPS and part.target is not aten.view.dtype:
        steps.append(part)
        part = argument(part)
    call, _ = result_of(part)
    return part if call is None else call, tuple(reversed(steps))
