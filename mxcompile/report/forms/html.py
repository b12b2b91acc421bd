"""The HTML form: one file that opens offline, with no requests and no scripts but its own.

``report.html`` is the page, with styles and behaviour; here its sections are made. Whatever comes from a
report is escaped: a module can have any name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from pathlib import Path

from mxcompile.formats import is_quantized, labels
from mxcompile.report.fold import Row, fold
from mxcompile.report.forms.html_graph import graphs
from mxcompile.report.forms.html_layers import layers
from mxcompile.report.forms.html_numerics import numerics_section
from mxcompile.report.forms.html_parts import tile
from mxcompile.report.forms.kept import kept_sentences
from mxcompile.report.forms.text import memory, slower, weights_note
from mxcompile.report.forms.words import byte_count, count, duration, flop_count, tokens_of
from mxcompile.report.numerics import Numerics
from mxcompile.report.record import ReportData, Summary

TEMPLATE = Path(__file__).with_name("report.html")


def to_html(report: ReportData, numerics: Numerics | None = None) -> str:
    """`report`, with what an audit measured if there was one, as a page."""
    rows = fold(report.gemms)
    parts: list[Callable[[], str]] = [
        lambda: _tiles(report, rows),
        lambda: _kept(report),
        lambda: _warnings(report.summary.warnings),
        lambda: _estimate(report.summary, rows),
        lambda: graphs(report),
        lambda: layers(rows, report.gemms),
        lambda: numerics_section(numerics),
    ]
    words = labels(gemm.precision for gemm in report.gemms)
    title = f"{words} report: {report.summary.policy}, {report.summary.target}"
    page = TEMPLATE.read_text(encoding="utf-8")
    before, after = page.split("{{sections}}")
    return before.replace("{{title}}", escape(title)) + "\n".join(part() for part in parts) + after


def _tiles(report: ReportData, rows: Sequence[Row]) -> str:
    s, words = report.summary, labels(gemm.precision for gemm in report.gemms)
    quantized = sum(is_quantized(gemm.precision) for gemm in report.gemms)
    tiles = [
        tile(f"matmul FLOPs in {words}", f"{s.flop_share:.1%}", share=s.flop_share),
        tile(*_amount(report)),
        tile("matmuls", f"{s.num_gemms:,}", f"{quantized:,} {words}, {s.num_gemms - quantized:,} BF16"),
    ]
    if s.saved_bytes is not None and s.saved_bytes_bf16:
        share = s.saved_bytes / s.saved_bytes_bf16
        note = f"{share:.0%} of {byte_count(s.saved_bytes_bf16)} without mxcompile"
        tiles.append(tile("saved for backward", byte_count(s.saved_bytes), note, share))
    if s.weight_bytes:
        tiles.append(tile("weights of linear layers", byte_count(s.weight_bytes), weights_note(s, rows)))
    if s.casts or s.cached_casts:
        kept = f"{s.cached_casts:,} more when weights change, {byte_count(s.cached_bytes)} kept"
        often = "step" if s.saved_bytes is not None else "call"
        tiles.append(tile(f"casts a {often}", f"{s.casts:,}", kept if s.cached_casts else ""))
    if s.wire_bytes:
        tiles.append(
            tile(
                "sent by each rank",
                byte_count(s.wire_bytes),
                f"{byte_count(s.wire_bytes_bf16)} without mxcompile",
            )
        )
    if s.peak_bytes is not None:
        tiles.append(tile("peak memory, no optimizer", byte_count(s.peak_bytes), memory(s)))
    tiles += [
        tile("graphs", f"{s.graphs}", count(s.graph_breaks, "graph break")),
        tile("time in passes", duration(s.pass_time_us), f"Inductor cache: {s.cache}"),
    ]
    return (
        f"<header><h1>{words} report</h1><p>policy <b>{escape(s.policy)}</b>,"
        f" target <b>{escape(s.target)}</b></p></header>"
        f'<section class="tiles" aria-label="summary">{"".join(tiles)}</section>'
    )


def _amount(report: ReportData) -> tuple[str, str, str]:
    """Name, value and note of the tile of tokens and FLOPs."""
    flops, tokens = sum(gemm.flops for gemm in report.gemms), tokens_of(report.gemms)
    return ("matmul arithmetic", flop_count(flops), f"{tokens:,} tokens" if tokens else "")


def _kept(report: ReportData) -> str:
    sentences = kept_sentences(report.gemms, report.summary)
    return "".join(f'<p class="hint">{escape(sentence)}</p>' for sentence in sentences)


def _warnings(warnings: Iterable[str]) -> str:
    items = "".join(f"<li>{escape(warning)}</li>" for warning in warnings)
    return f'<section class="warnings"><h2>Warnings</h2><ul>{items}</ul></section>' if items else ""


def _estimate(summary: Summary, rows: list[Row]) -> str:
    if not summary.estimate_us or not summary.estimate_bf16_us:
        return ""
    ratio = summary.estimate_bf16_us / summary.estimate_us
    tiles = [
        tile("matmuls and casts", duration(summary.estimate_us)),
        tile("the same in BF16", duration(summary.estimate_bf16_us)),
        tile(f"BF16 ÷ {labels(g.precision for row in rows for g in row.gemms)}", f"{ratio:.2f}×"),
    ]
    slow = "".join(
        f"<li>{escape(row.name or '(root)')}: {ratio:.2f}×</li>"
        for row, ratio in sorted(slower(rows), key=lambda found: found[1])
    )
    title = "Layers estimated slower than in BF16"
    flagged = f'<details class="slow"><summary>{title}</summary><ul>{slow}</ul></details>'
    return (
        f'<section id="estimate"><h2>Estimate</h2><p class="hint">Roofline of {escape(summary.target)}:'
        " what its peaks allow at best, not a measurement.</p>"
        f'<div class="tiles">{"".join(tiles)}</div>{flagged if slow else ""}</section>'
    )
