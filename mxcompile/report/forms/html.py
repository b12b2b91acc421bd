"""The HTML form: a single file that opens offline, without requests and with inline scripts only.

The templates in ``page`` hold markup, styles and behaviour; this module computes their variables. Jinja
escapes everything that comes from a report, because a module can have any name.
"""

from __future__ import annotations

import functools
import linecache
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from mxcompile.formats import PRECISIONS, UNQUANTIZED, is_quantized, labels, precisions
from mxcompile.policy import Role
from mxcompile.report.data.fold import Row, fold, grouped, spelled
from mxcompile.report.data.numerics import Numerics, by_block, by_role
from mxcompile.report.data.outline import PHASES
from mxcompile.report.data.record import ReportData
from mxcompile.report.forms.figures import Card, cards
from mxcompile.report.forms.picture import picture
from mxcompile.report.forms.text import slower, unquantized_sentences
from mxcompile.report.forms.words import count, duration, flop_count, formats, size, speedup, tokens_of, tone

_LETTERS = {"fprop": "F", "dgrad": "D", "wgrad": "W"}
_KINDS = {"gemm": "matmul", "cast": "cast", "glue": "left as it is", "input": "of the graph"}
_MOST_GRAPHS = 12
_FULL_DB = 60.0
_GOOD_DB = {"MXFP8": 27.5}
"""Usual SQNR in dB of a layer on normally distributed data, by precision; other precisions have no entry."""


def to_html(report: ReportData, numerics: Numerics | None = None) -> str:
    """Returns `report` as an HTML page, with the figures of an audit if `numerics` is given."""
    rows, words = fold(report.gemms), labels(gemm.precision for gemm in report.gemms)
    present, summary = {gemm.precision for gemm in report.gemms}, report.summary
    estimates, measured = [], {}
    if summary.estimate_us and summary.estimate_bf16_us:
        estimates = [
            Card("matmuls and casts", duration(summary.estimate_us)),
            Card("the same in BF16", duration(summary.estimate_bf16_us)),
            Card(f"BF16 ÷ {words}", f"{summary.estimate_bf16_us / summary.estimate_us:.2f}×"),
        ]
    if numerics is not None:
        blocks = by_block(numerics)
        measured = {
            "good": _GOOD_DB.get(numerics.precision),
            "gemm_harm": numerics.harm_of_gemms(),
            "measured": list(_measured_figures(numerics)),
            "groups": [("role", by_role(numerics)), ("block", blocks if len(blocks) > 1 else [])],
            "operands": {"x": "input", "w": "weight", "dy": "gradient"},
            "counted": {
                *("GEMMs", "FLOPs", "cosine", "rel. error"),
                *("underflow", "saturation", "harm", "output change"),
            },
        }
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=f"{words} report: {summary.policy}, {summary.target}",
            words=words,
            summary=summary,
            figures=list(_figures(report, rows)),
            sentences=unquantized_sentences(report.gemms, summary),
            estimates=estimates,
            slower=sorted(slower(rows), key=lambda pair: pair[1]),
            rows=rows,
            gemms=report.gemms,
            total_flops=sum(gemm.flops for gemm in report.gemms) or 1,
            timed=any(speedup(row.gemms) is not None for row in rows),
            precisions=[word for word in PRECISIONS if word in present] or [UNQUANTIZED.name],
            letters=_LETTERS,
            graphs=list(_graphs(report)),
            num_graphs=len(report.graph),
            more_graphs=len(report.graph) - _MOST_GRAPHS,
            colours={role: role.row.colour for role in Role},
            graph_roles=dict.fromkeys(node.role for o in report.graph for node in o.nodes if node.role),
            kinds=_KINDS,
            numerics=numerics,
            **measured,
        )
    )


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).with_name("page")),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        undefined=StrictUndefined,
    )
    environment.filters |= {
        "form": format,
        "num": count,
        "duration": duration,
        "size": size,
        "formats": formats,
        "label": precisions.label,
        "tone": tone,
        "spelled": spelled,
        "speedup": speedup,
        "ordered": lambda gemms: sorted(gemms, key=lambda gemm: list(_LETTERS).index(gemm.gemm)),
        "code_at": _code_at,
        "order": lambda value: 1e300 if math.isnan(value) else value,  # a sort key: NaN precedes all
        "db": _db,
        "bar": _bar,
        "histogram": _histogram,
    }
    return environment


def _figures(report: ReportData, rows: Sequence[Row]) -> Iterator[Card]:
    s, words = report.summary, labels(gemm.precision for gemm in report.gemms)
    quantized = sum(is_quantized(gemm.precision) for gemm in report.gemms)
    flops, tokens = sum(gemm.flops for gemm in report.gemms), tokens_of(report.gemms)
    yield Card(f"matmul FLOPs in {words}", f"{s.flop_share:.1%}", share=s.flop_share)
    yield Card("matmul arithmetic", flop_count(flops), f"{tokens:,} tokens" if tokens else "")
    yield Card("matmuls", f"{s.num_gemms:,}", f"{quantized:,} {words}, {s.num_gemms - quantized:,} BF16")
    yield from cards(s)
    yield Card("graphs", f"{s.graphs}", count(s.graph_breaks, "graph break"))
    yield Card("time in passes", duration(s.pass_time_us), f"Inductor cache: {s.cache}")


def _graphs(report: ReportData) -> Iterator[dict[str, Any]]:
    """Yields the pictures of the compiled graphs by phase, and each node with its records."""
    records = grouped(report.gemms, lambda gemm: (gemm.graph, gemm.name))
    for number, outline in enumerate(report.graph[:_MOST_GRAPHS]):
        if outline.nodes:
            nodes = []
            for node in outline.nodes:
                gemms = records.get((number, node.names[0]), [])
                if node.kind != "attention":
                    gemms = [gemm for gemm in gemms if node.kind == "gemm" and gemm.role == node.role]
                nodes.append((node, gemms))
            phases = [phase for phase in PHASES if any(node.phase == phase for node in outline.nodes)]
            yield {
                "number": number,
                "omitted": outline.omitted,
                "phases": [(phase, Markup(picture(outline, phase, f"{number}-{phase}"))) for phase in phases],
                "nodes": nodes,
            }


def _code_at(source: str) -> str:
    """Returns the source line at ``file:line`` if it is a Python file on this machine, else ""."""
    file, _, line = source.rpartition(":")
    return linecache.getline(file, int(line)).strip() if file.endswith(".py") and line.isdecimal() else ""


def _measured_figures(numerics: Numerics) -> Iterator[Card]:
    if numerics.loss is not None and numerics.loss_reference is not None:
        gap, reference = numerics.loss_gap, f"{numerics.loss_reference:.4f} in {numerics.own_dtype}"
        yield Card("loss", f"{numerics.loss:.4f}", "" if gap is None else f"{gap:+.3%} of {reference}")
    if numerics.logits_sqnr_db is not None:
        yield Card(f"output against {numerics.own_dtype}", _db(numerics.logits_sqnr_db))
    if numerics.gradient_error is not None and numerics.gradient_cosine is not None:
        note = f"relative error; cosine {numerics.gradient_cosine:.5f}"
        yield Card("parameter gradients, by FLOPs", f"{numerics.gradient_error:.2%}", note)
    yield Card("casts measured", f"{len(numerics.tensors):,}")
    yield Card("GEMMs measured", f"{len(numerics.gemms):,}")


def _db(value: float) -> str:
    return "not finite" if math.isnan(value) else "exact" if value == math.inf else f"{value:.1f} dB"


def _bar(value: float, precision: str) -> dict[str, float | bool]:
    """Returns the length of an SQNR's bar, whether it is low for `precision`, and its cell's sort key."""
    if math.isnan(value):
        return {"share": 0.0, "low": True, "order": -1e300}
    return {
        "share": min(max(value / _FULL_DB, 0.0), 1.0),
        "low": value < _GOOD_DB.get(precision, -math.inf) - 0.05,
        "order": min(max(value, -1e299), 1e299),
    }


def _histogram(pairs: Sequence[tuple[int, int]]) -> dict[str, Any] | None:
    """Returns the blocks per scale exponent as bars, smallest exponent first; None without finite scales."""
    finite = [(byte, number) for byte, number in pairs if byte != 255]
    if not finite:
        return None
    low, high = finite[0][0], finite[-1][0]
    most = max(number for _, number in finite)
    return {
        "low": low - 127,
        "high": high - 127,
        "said": f"exponents {low - 127} to {high - 127}",
        "width": (high - low) * 4 + 3,
        "bars": [(4 * (byte - low), 18 * number / most) for byte, number in finite],
    }
