"""hint_expert_splits: expect that ranks send each other equally many tokens.

How many tokens arrive for a rank's experts is not known before they do (``all_to_all_single`` with split
sizes that are read from a tensor). Estimates, the report's sizes and Inductor's choices need a number all the
same: equal splits of what a rank sends. A hint that the model gave (``mark_unbacked``) stays. Values do not
change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile.graph.tags import hint, tensor

_COLLECTIVES = torch.ops._c10d_functional


@dataclass(frozen=True, kw_only=True, slots=True)
class HintExpertSplits:
    """No options."""

    name: ClassVar[str] = "hint_expert_splits"

    def apply(self, graph: fx.Graph) -> None:
        """Give the unknown split sizes of the exchanges of `graph` their expected value."""
        if not hasattr(_COLLECTIVES, "all_to_all_single"):
            return
        exchange = _COLLECTIVES.all_to_all_single.default
        for node in graph.find_nodes(op="call_function", target=exchange):
            rows, received, sent, _ = node.args
            value = tensor(rows)
            if value is None:
                continue
            for sizes in (sent, received):
                _expect(sizes, hint(value.shape[0]))


def _expect(sizes: Any, total: int) -> None:
    """Let those of `sizes` that nothing is known of be equal parts of `total`, by hints of their symbols."""
    for size in sizes:
        value = size.meta.get("val") if isinstance(size, fx.Node) else None
        if not isinstance(value, torch.SymInt) or not value.node.expr.is_symbol or value.node.has_hint():
            continue
        hints = getattr(value.node.shape_env, "var_to_hint_override", {})
        hints.setdefault(value.node.expr, max(1, total // len(sizes)))
