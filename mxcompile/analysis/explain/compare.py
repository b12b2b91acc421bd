"""`compare`: what several policies would make of one model, side by side, without running it.

One row a policy: share of the matmul FLOPs that is quantized, bytes kept for backward, and the roofline
estimate of all matmuls and casts of a step (see `roofline`) beside BF16's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from tabulate import tabulate
from torch import nn

from mxcompile.analysis.explain.explainer import explain
from mxcompile.errors import OptionError
from mxcompile.formats import is_quantized
from mxcompile.policy import Policy
from mxcompile.report import Report
from mxcompile.report.forms.words import byte_count, duration


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The reports of one model under several policies, in the order they were asked for."""

    reports: tuple[Report, ...]

    def __str__(self) -> str:
        first = self.reports[0].summary
        table = [["policy", "quantized", "saved for backward", "matmuls and casts", "of BF16's"]]
        table += [_row(report) for report in self.reports]
        lines = tabulate(table, headers="firstrow", tablefmt="simple", disable_numparse=True)
        about = "estimated" if first.estimate_us else f"no estimates: no data sheet of target {first.target}"
        return f"target {first.target}, {about}\n\n{lines}"


def _row(report: Report) -> list[str]:
    summary = report.summary
    words = dict.fromkeys(gemm.precision for gemm in report.gemms if is_quantized(gemm.precision))
    share = f"{summary.flop_share:.1%} {', '.join(words)}".strip()
    saved = "" if summary.saved_bytes is None else byte_count(summary.saved_bytes)
    if not summary.estimate_us or not summary.estimate_bf16_us:
        return [summary.policy, share, saved, "", ""]
    ratio = summary.estimate_us / summary.estimate_bf16_us
    return [summary.policy, share, saved, duration(summary.estimate_us), f"{ratio:.2f}"]


def compare(
    model: nn.Module,
    *args: Any,
    policies: Sequence[Policy | str | dict[str, Any]],
    target: str = "auto",
    training: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> Comparison:
    """`explain` of `model` under each of `policies`, which are all read before anything is traced.

    Raises `OptionError` for what is not a list of policies, and what `explain` raises.
    """
    if isinstance(policies, str):
        raise OptionError(f"policies is a list, found {policies!r}: write [{policies!r}]")
    resolved = [Policy.resolve(policy) for policy in policies]
    if not resolved:
        raise OptionError("compare needs at least one policy")
    return Comparison(
        reports=tuple(
            explain(model, *args, policy=policy, target=target, training=training, kwargs=kwargs)
            for policy in resolved
        )
    )
