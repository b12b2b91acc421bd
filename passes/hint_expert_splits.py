"""hint_expert_splits: set the hints of unknown split sizes as if all ranks sent equally many tokens.

The number of tokens for a rank's experts is unknown at compile time: ``all_to_all_single`` reads its split
sizes from a tensor. Estimates, the report's sizes and Inductor's heuristics need a number, so each split gets
an equal part of the rows that a rank sends. A hint from the model (``mark_unbacked``) stays. Values do not
change.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import fx

from mxcompile.graph.tags import hint, tensor

_EXCHANGE = torch.ops._c10d_functional.all_to_all_single.default


@dataclass(frozen=True, kw_only=True, slots=True)
class HintExpertSplits:
    """Sets hints of unknown split sizes: all ranks send equally many tokens."""

    name: ClassVar[str] = "hint_expert_splits"

    def apply(self, graph: fx.Graph) -> None:
        """Sets the hints of the unknown split sizes in `graph`."""
        for node in graph.find_nodes(op="call_function", target=_EXCHANGE):
            rows, received, sent, _ = node.args
            if (value := tensor(rows)) is None:
                continue
            for sizes in (sent, received):
                _expect(sizes, hint(value.shape[0]))


def _expect(sizes: Any, total: int) -> None:
    """Sets the hint of every unknown size in `sizes` to ``total / len(sizes)``."""
    for size in sizes:
        value = size.meta.get("val") if isinstance(size, fx.Node) else None
        if not isinstance(value, torch.SymInt) or not value.node.expr.is_symbol or value.node.has_hint():
            continue
        hints = getattr(value.node.shape_env, "var_to_hint_override", {})
        hints.setdefault(value.node.expr, max(1, total // len(sizes)))
