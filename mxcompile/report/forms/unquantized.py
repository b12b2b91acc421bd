"""Sentences at the top of a report about layers in BF16: their reasons by FLOPs, and uncounted products."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mxcompile.formats import Precision, elem_named, is_quantized, labels, stored_forms, stored_precision
from mxcompile.policy import ATTENTION_PRODUCTS, Code
from mxcompile.report.data.record import NOT_COMPILED, GemmRecord, OperandFormat, Summary
from mxcompile.report.forms.words import count, is_stored, listed, main_dtype

LITTLE = 0.5
"""If the quantized share of the FLOPs is lower, the report lists the reasons."""
_NAMED = 4


def unquantized_sentences(gemms: Sequence[GemmRecord], summary: Summary) -> list[str]:
    """Returns sentences on stored weights, reasons for a low quantized share, and uncounted products."""
    if not gemms:
        graphs = "a graph without matrix products" if summary.graphs else "nothing, as no graph was captured"
        return [f"no matrix product was captured; compiled: {graphs}"]
    sentences = _stored(gemms)
    if summary.flop_share < LITTLE:
        sentences += _reasons(gemms, summary.flop_share)
    unknown = Counter(_unknown_name(gemm) for gemm in gemms if is_unknown(gemm))
    if unknown:
        names = [f"{name} (×{number})" if number > 1 else name for name, number in unknown.most_common()]
        sentences.append(f"not in the share, since their FLOPs are unknown: {listed(names, _NAMED)}")
    return sentences


def _unknown_name(gemm: GemmRecord) -> str:
    return f"opaque operator {' '.join(gemm.facts)}" if gemm.code == Code.UNCOUNTED else gemm.name or "(root)"


def _stored(gemms: Sequence[GemmRecord]) -> list[str]:
    """Returns a sentence with the number of weights stored quantized, or nothing without such weights."""
    layers = [gemm for gemm in gemms if gemm.gemm == "fprop" and gemm.role not in ATTENTION_PRODUCTS]
    stored = [gemm for gemm in layers if is_stored(gemm)]
    if not stored:
        return []
    share = sum(map(_weight, stored)) / (sum(map(_weight, layers)) or 1)
    codes = sum(is_quantized(gemm.precision) or "weight_only" in gemm.kernel for gemm in stored)
    forms = (form for gemm in stored for form in gemm.formats if form.operand == "w")
    precisions = labels(str(_stored_in(form)) for form in forms)
    return [
        f"weights stored in {precisions}: {len(stored)} of {count(len(layers), 'layer')}, {share:.1%} of"
        f" their elements; products read the codes of {codes} and dequantized values of {len(stored) - codes}"
    ]


def _stored_in(form: OperandFormat) -> Precision:
    """Returns the precision of a stored weight, by its element type and scale granularity."""
    dtype = elem_named(form.elem).stored_dtype
    assert dtype is not None
    return stored_precision(next(stored for stored in stored_forms(dtype) if str(stored.tile) == form.block))


def _weight(gemm: GemmRecord) -> int:
    return (gemm.batch or 0) * (gemm.n or 0) * (gemm.k or 0)


def is_unknown(gemm: GemmRecord) -> bool:
    """Whether the FLOPs of `gemm` are unknown: an opaque operator, no plan, or a data-dependent size."""
    return not gemm.is_known or gemm.code == Code.UNCOUNTED


def unknown_words(gemms: Iterable[GemmRecord]) -> str:
    """Returns a headline's ``, 3 products of unknown FLOPs not in it``; "" if all FLOPs are known."""
    unknown = sum(is_unknown(gemm) for gemm in gemms)
    return f", {count(unknown, 'product')} of unknown FLOPs not in it" if unknown else ""


def _reasons(gemms: Sequence[GemmRecord], share: float) -> list[str]:
    total = sum(gemm.flops for gemm in gemms)
    by_reason: Counter[str] = Counter()
    for gemm in gemms:
        if not is_quantized(gemm.precision):
            by_reason[gemm.reason] += gemm.flops
        elif gemm.kernel == NOT_COMPILED:
            by_reason[NOT_COMPILED] += gemm.flops
    if not total:
        return []
    shares = [f"{flops / total:.1%} {reason}" for reason, flops in by_reason.most_common() if flops]
    return [f"{1 - share:.1%} of the FLOPs stay in {main_dtype(gemms)}: {listed(shares, _NAMED)}"]
