"""Where a chip is estimated to be slower quantized than in BF16: why, and what would help.

A cast costs by the elements it reads and a product gains by its arithmetic, so few tokens and narrow layers
lose; and where the chip does not multiply the format itself, casts come on top of BF16's products.
"""

from __future__ import annotations

import dataclasses

from mxcompile.analysis.explain.sweep import at_tokens
from mxcompile.formats import is_quantized, labels
from mxcompile.lowering.targets import TARGETS
from mxcompile.report import Report
from mxcompile.report.fold import Row, fold
from mxcompile.report.forms.words import speedup, tokens_of

_MANY = 1 << 20
"""Tokens at which more would change nothing."""
_NAMED = 3


def advised(report: Report) -> Report:
    """`report`, one with estimates, with a warning if all in all it is slower than in BF16."""
    summary = report.summary
    if not summary.estimate_us or not summary.estimate_bf16_us:
        return report
    ratio = summary.estimate_bf16_us / summary.estimate_us
    if ratio >= 1:
        return report
    words = labels(gemm.precision for gemm in report.gemms)
    said = f"{summary.target} is estimated slower with {words} than in BF16 ({ratio:.2f}×): {_help(report)}"
    return dataclasses.replace(
        report, summary=dataclasses.replace(summary, warnings=(*summary.warnings, said))
    )


def _help(report: Report) -> str:
    tokens = tokens_of(report.gemms)
    many = at_tokens(report, _MANY) if tokens else report
    if _ratio(many) < 1:
        return "; ".join([_why_never(report), *_narrow(many)])
    enough = tokens
    while _ratio(at_tokens(report, enough)) < 1:
        enough *= 2
    return (
        f"{tokens:,} tokens are few; with about {enough:,} it is as fast (a larger batch, longer sequences)"
    )


def _why_never(report: Report) -> str:
    target = TARGETS[report.summary.target]
    if target.native:
        return "casts cost more than products gain, at any number of tokens"
    fp8 = " (the policy fp8_rowwise runs on this chip's own FP8 GEMM)" if target.fp8_tiles else ""
    return f"the chip multiplies in BF16, and casts come on top{fp8}"


def _narrow(many: Report) -> list[str]:
    """Advice on the layers that are slower even with many tokens."""
    slow = [row for row in fold(many.gemms) if _is_slow(row)]
    if not slow or not TARGETS[many.summary.target].native:
        return []
    more = f" and {len(slow) - _NAMED} more" if len(slow) > _NAMED else ""
    names = ", ".join(row.name or "(root)" for row in slow[:_NAMED])
    return [f"narrow layers, which a rule can leave in BF16: {names}{more}"]


def _is_slow(row: Row) -> bool:
    ratio = speedup(row.gemms)
    return ratio is not None and ratio < 1 and any(is_quantized(gemm.precision) for gemm in row.gemms)


def _ratio(report: Report) -> float:
    summary = report.summary
    return (summary.estimate_bf16_us or 1.0) / (summary.estimate_us or 1.0)
