"""What stays in BF16, said where a report begins: the reasons by FLOPs, and what could not be counted."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mxcompile.formats import is_quantized
from mxcompile.policy import Code
from mxcompile.report.forms.words import count
from mxcompile.report.record import GemmRecord, Summary

LITTLE = 0.5
"""A share of FLOPs in MXFP8 below which the report says why it is not more."""
_NAMED = 4


def kept_sentences(gemms: Sequence[GemmRecord], summary: Summary) -> list[str]:
    """Why little or nothing is in MXFP8, and what the share leaves out; none if neither is so."""
    if not gemms:
        graphs = "a graph without matrix products" if summary.graphs else "nothing: no graph was captured"
        return [f"no matrix product was seen; what was compiled is {graphs}"]
    said = []
    if summary.flop_share < LITTLE:
        said += _reasons(gemms, summary.flop_share)
    unknown = Counter(" ".join(gemm.facts) for gemm in gemms if is_unknown(gemm))
    if unknown:
        named = _listed(f"opaque operator {name} (×{number})" for name, number in unknown.most_common())
        said.append(f"not in the share, since their FLOPs are unknown: {named}")
    return said


def is_unknown(gemm: GemmRecord) -> bool:
    """Whether nothing is known of the FLOPs of `gemm`, which an opaque operator hides."""
    return gemm.code == Code.UNCOUNTED


def unknown_words(gemms: Iterable[GemmRecord]) -> str:
    """For a headline: ``, 3 operators uncounted``; "" if there are none."""
    unknown = sum(is_unknown(gemm) for gemm in gemms)
    return f", {count(unknown, 'operator')} of unknown FLOPs not in it" if unknown else ""


def _reasons(gemms: Sequence[GemmRecord], share: float) -> list[str]:
    total = sum(gemm.flops for gemm in gemms)
    by_reason: Counter[str] = Counter()
    for gemm in gemms:
        if not is_quantized(gemm.precision):
            by_reason[gemm.reason] += gemm.flops
    if not total:
        return []
    named = _listed(f"{flops / total:.1%} {reason}" for reason, flops in by_reason.most_common() if flops)
    return [f"{1 - share:.1%} of the FLOPs stay in BF16: {named}"]


def _listed(words: Iterable[str]) -> str:
    words = [*words]
    more = f" and {len(words) - _NAMED} more" if len(words) > _NAMED else ""
    return f"{', '.join(words[:_NAMED])}{more}"
