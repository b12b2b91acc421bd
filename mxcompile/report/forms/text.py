"""The text and Markdown forms: a summary, a table of folded layers and a table of kernels.

The summary has the reasons of layers in BF16, by FLOPs, and the products that are not counted.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from mxcompile.formats import elem_named, is_quantized, labels, stored_forms, stored_precision
from mxcompile.policy import ATTENTION_PRODUCTS, Code, Reason
from mxcompile.report.data.fold import Row, fold, grouped
from mxcompile.report.data.record import NOT_COMPILED, GemmRecord, ReportData, Summary
from mxcompile.report.forms.figures import cards
from mxcompile.report.forms.tables import Table, markdown_page, page
from mxcompile.report.forms.words import (
    count,
    duration,
    flop_count,
    formats,
    is_stored,
    listed,
    main_dtype,
    precision_word,
    size,
    speedup,
    tokens_of,
)

_NAMED = 3
LITTLE = 0.5
"""If the quantized share of the FLOPs is lower, the report lists the reasons."""
_REASONS = 4


def to_text(report: ReportData) -> str:
    """Returns `report` as text for a terminal."""
    rows = fold(report.gemms)
    layers = _layer_table(rows), ("layer", "precision", "reason")
    kernels = _kernel_table(report.gemms), ("kernel", "formats")
    return page(_sentences(report, rows), layers, kernels)


def to_summary(report: ReportData) -> str:
    """Returns the facts and warnings of `report` for a terminal, without tables."""
    return page(_sentences(report, fold(report.gemms)))


def to_markdown(report: ReportData) -> str:
    """Returns `report` as Markdown for a pull request."""
    rows = fold(report.gemms)
    return markdown_page(_sentences(report, rows), _layer_table(rows), _kernel_table(report.gemms))


def _sentences(report: ReportData, rows: Sequence[Row]) -> list[str]:
    reasons = unquantized_sentences(report.gemms, report.summary)
    return [headline(report), *reasons, *facts(report.summary, rows)]


def headline(report: ReportData) -> str:
    """Returns the report in one line."""
    summary = report.summary
    words = labels(gemm.precision for gemm in report.gemms)
    model_dtype, unknown = main_dtype(report.gemms), sum(map(is_unknown, report.gemms))
    left_out = f", {count(unknown, 'product')} of unknown FLOPs not in it" if unknown else ""
    model = f", model in {model_dtype}" if model_dtype != "BF16" else ""
    flops, tokens = sum(gemm.flops for gemm in report.gemms), tokens_of(report.gemms)
    amounts = (f", {flop_count(flops)}" if flops else "") + (f", {tokens:,} tokens" if tokens else "")
    return (
        f"{words} report: {summary.flop_share:.1%} of {'known ' if unknown else ''}matmul FLOPs in"
        f" {words}{left_out}"
        f" ({count(summary.num_gemms, 'GEMM')}{amounts}, target {summary.target},"
        f" policy {summary.policy}{model})"
    )


def unquantized_sentences(gemms: Sequence[GemmRecord], summary: Summary) -> list[str]:
    """Returns sentences on stored weights, reasons for a low quantized share, and uncounted products."""
    if not gemms:
        graphs = "a graph without matrix products" if summary.graphs else "nothing, as no graph was captured"
        return [f"no matrix product was captured; compiled: {graphs}"]
    sentences = []
    layers = [gemm for gemm in gemms if gemm.gemm == "fprop" and gemm.role not in ATTENTION_PRODUCTS]
    stored = [gemm for gemm in layers if is_stored(gemm)]
    if stored:
        share = sum(map(_weight, stored)) / (sum(map(_weight, layers)) or 1)
        codes = sum(is_quantized(gemm.precision) or "weight_only" in gemm.kernel for gemm in stored)
        precisions = set()
        for form in (form for gemm in stored for form in gemm.formats if form.operand == "w"):
            dtype = elem_named(form.elem).stored_dtype
            assert dtype is not None
            kept = next(kept for kept in stored_forms(dtype) if str(kept.tile) == form.block)
            precisions.add(str(stored_precision(kept)))
        sentences.append(
            f"weights stored in {labels(precisions)}: {len(stored)} of {count(len(layers), 'layer')},"
            f" {share:.1%} of their elements; products read the codes of {codes} and dequantized values of"
            f" {len(stored) - codes}"
        )
    total = sum(gemm.flops for gemm in gemms)
    if total and summary.flop_share < LITTLE:
        reasons: Counter[str] = Counter()
        for gemm in gemms:
            if not is_quantized(gemm.precision):
                reasons[gemm.reason] += gemm.flops
            elif gemm.kernel == NOT_COMPILED:
                reasons[NOT_COMPILED] += gemm.flops
        shares = [f"{flops / total:.1%} {reason}" for reason, flops in reasons.most_common() if flops]
        rest = f"{1 - summary.flop_share:.1%} of the FLOPs stay in {main_dtype(gemms)}"
        sentences.append(f"{rest}: {listed(shares, _REASONS)}")
    unknown: Counter[str] = Counter()
    for gemm in filter(is_unknown, gemms):
        is_operator = gemm.code == Code.UNCOUNTED
        unknown[f"opaque operator {' '.join(gemm.facts)}" if is_operator else gemm.name or "(root)"] += 1
    if unknown:
        names = [f"{name} (×{number})" if number > 1 else name for name, number in unknown.most_common()]
        sentences.append(f"not in the share, since their FLOPs are unknown: {listed(names, _REASONS)}")
    return sentences


def _weight(gemm: GemmRecord) -> int:
    return (gemm.batch or 0) * (gemm.n or 0) * (gemm.k or 0)


def is_unknown(gemm: GemmRecord) -> bool:
    """Whether the FLOPs of `gemm` are unknown: an opaque operator, no plan, or a data-dependent size."""
    return not gemm.is_known or gemm.code == Code.UNCOUNTED


def facts(summary: Summary, rows: Sequence[Row] = ()) -> list[str]:
    """Returns the facts and warnings that the table of layers does not show, one sentence each."""
    model_dtype = main_dtype(gemm for row in rows for gemm in row.gemms)
    sentences = [str(card) for card in cards(summary)]
    if (summary.saved_bytes or 0) > (summary.saved_bytes_bf16 or 0) > 0:
        sentences.append(
            f"warning: more is kept for backward than in {model_dtype}: the copies for backward come on top"
            " of tensors that the model keeps anyway; `saved: bf16` in the policy keeps as much as BF16"
        )
    if summary.estimate_us and summary.estimate_bf16_us:
        sentences.append(
            f"estimate, not measured: matmuls and casts {duration(summary.estimate_us)},"
            f" {duration(summary.estimate_bf16_us)} in {model_dtype}"
            f" ({summary.estimate_bf16_us / summary.estimate_us:.2f}×)"
        )
    sentences.append(
        f"{count(summary.graphs, 'graph')}, {count(summary.graph_breaks, 'graph break')},"
        f" passes {summary.pass_time_us / 1e3:.0f} ms, Inductor cache {summary.cache}"
    )
    slow = [f"{row.name or '(root)'} ({ratio:.2f}×)" for row, ratio in slower(rows)]
    if slow:
        sentences.append(f"warning: estimated slower than in {model_dtype}: {listed(slow, _NAMED)}")
    return sentences + [f"warning: {' '.join(warning.split())}" for warning in summary.warnings]


def slower(rows: Iterable[Row]) -> list[tuple[Row, float]]:
    """Returns (row, speedup over BF16) of rows with quantized GEMMs that are estimated slower than BF16."""
    ratios = [(row, speedup(row.gemms)) for row in rows if any(is_quantized(g.precision) for g in row.gemms)]
    return [(row, ratio) for row, ratio in ratios if ratio is not None and ratio < 1]


def precision(gemms: Sequence[GemmRecord]) -> str:
    """Returns the precision of the first GEMM, then GEMMs that differ from it: ``mxfp8; wgrad bf16``."""
    by_gemm: dict[str, set[str]] = {}
    for gemm in gemms:
        by_gemm.setdefault(gemm.gemm, set()).add(precision_word(gemm))
    words = {gemm: "/".join(sorted(precisions)) for gemm, precisions in by_gemm.items()}
    first = next(iter(words.values()), "")
    others = [f"{gemm} {word}" for gemm, word in words.items() if word != first]
    return "; ".join([first, *others])


def _layer_table(rows: Sequence[Row]) -> Table:
    estimates = any(speedup(row.gemms) is not None for row in rows)
    table = [["layer", "", "role", "m×n×k", "precision", *(["est."] if estimates else []), "reason"]]
    for row in rows:
        ratio = speedup(row.gemms)
        table.append(
            [
                row.name or "(root)",
                f"×{row.count}" if row.count > 1 else "",
                row.gemms[0].role,
                size(row.gemms[0]),
                precision(row.gemms) + ("; w stored" if any(map(is_stored, row.gemms)) else ""),
                *([f"{ratio:.2f}×" if ratio not in (None, 1) else ""] if estimates else []),
                "; ".join(dict.fromkeys(_reason(gemm) for gemm in row.gemms)),
            ]
        )
    return table


def _reason(gemm: GemmRecord) -> str:
    """Returns the reason without the role, which has its own column."""
    if gemm.code != Code.PRESET_ROLE:
        return gemm.reason
    preset, _ = gemm.facts
    return Reason(Code.PRESET, preset) + gemm.reason[len(Reason(Code.PRESET_ROLE, *gemm.facts)) :]


def _kernel_table(gemms: Sequence[GemmRecord]) -> Table:
    """Returns the kernels by share of FLOPs. GEMMs of one kernel and equal operand formats share a row."""
    by_kernel = grouped(gemms, lambda gemm: (precision_word(gemm), gemm.kernel or "not lowered"))
    groups: dict[tuple[str, str, str], list[GemmRecord]] = {}
    for key, members in by_kernel.items():
        forms = {form for gemm in members for form in gemm.formats}
        by_operand = {form.operand: form for form in forms}
        merged = tuple(by_operand[operand] for operand in ("x", "w", "dy") if operand in by_operand)
        is_one = len(by_operand) == len(forms)  # each operand has one format
        for gemm in members:
            words = formats(merged if is_one and gemm.formats else gemm.formats)
            groups.setdefault((*key, words or "-"), []).append(gemm)
    total = sum(gemm.flops for gemm in gemms) or 1
    shares = {key: sum(gemm.flops for gemm in members) / total for key, members in groups.items()}
    return [["precision", "kernel", "formats", "GEMMs", "FLOPs"]] + [
        [*key, f"{len(groups[key])}", f"{shares[key]:.1%}"]
        for key in sorted(groups, key=lambda key: (not is_quantized(key[0]), -shares[key]))
    ]
