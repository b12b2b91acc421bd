"""The text and Markdown forms: a summary, a table of folded layers and one of the kernels.

Text is at most 120 columns wide: cells that do not fit lose their middle. Markdown keeps them.
"""

from __future__ import annotations

import textwrap
from collections.abc import Sequence

from tabulate import MIN_PADDING, tabulate

from mxcompile.report.fold import Row, fold
from mxcompile.report.record import GemmRecord, OperandFormat, Summary
from mxcompile.report.report import Report

WIDTH = 120

_GEMMS = ("fprop", "dgrad", "wgrad")
_Table = list[list[str]]


def to_text(report: Report) -> str:
    """`report` for a terminal."""
    lines = [
        line
        for paragraph in (_headline(report.summary), *_facts(report.summary))
        for line in textwrap.wrap(paragraph, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    ]
    if report.gemms:
        layers = _fitted(_layer_table(fold(report.gemms)), ("layer", "reason"))
        kernels = _fitted(_kernel_table(report.gemms), ("kernel", "formats"))
        lines += ["", _drawn(layers, "simple"), "", _drawn(kernels, "simple")]
    return "\n".join(lines)


def to_markdown(report: Report) -> str:
    """`report` for a pull request."""
    facts = "\n".join(f"- {fact}" for fact in _facts(report.summary))
    parts = [f"### {_headline(report.summary)}", facts]
    if report.gemms:
        tables = (_layer_table(fold(report.gemms)), _kernel_table(report.gemms))
        parts += [_drawn(_escaped(table), "github") for table in tables]
    return "\n\n".join(parts) + "\n"


def _headline(summary: Summary) -> str:
    return (
        f"MXFP8 report: {summary.flop_share:.1%} of matmul FLOPs in MXFP8"
        f" ({_count(summary.num_gemms, 'GEMM')}, target {summary.target},"
        f" policy {summary.policy})"
    )


def _facts(summary: Summary) -> list[str]:
    facts = []
    if summary.saved_bytes is not None and summary.saved_bytes_bf16:
        share = summary.saved_bytes / summary.saved_bytes_bf16
        facts.append(
            f"saved for backward {_bytes(summary.saved_bytes)},"
            f" without mxcompile {_bytes(summary.saved_bytes_bf16)} ({share:.0%})"
        )
    if summary.weight_bytes:
        facts.append(
            f"weights of linear layers {_bytes(summary.weight_bytes)}"
            f" ({_bytes(summary.weight_bytes_bf16)} in BF16)"
        )
    facts.append(
        f"{_count(summary.graphs, 'graph')}, {_count(summary.graph_breaks, 'graph break')},"
        f" passes {summary.pass_time_us / 1e3:.0f} ms, Inductor cache {summary.cache}"
    )
    facts += [f"warning: {' '.join(warning.split())}" for warning in summary.warnings]
    return facts


def _layer_table(rows: Sequence[Row]) -> _Table:
    headers = ["layer", "", "role", "m×n×k", *_GEMMS, "reason"]
    return [headers] + [
        [
            row.name or "(root)",
            f"×{row.count}" if row.count > 1 else "",
            row.gemms[0].role,
            _size(row.gemms[0]),
            *(_precision(row, gemm) for gemm in _GEMMS),
            "; ".join(dict.fromkeys(gemm.reason for gemm in row.gemms)),
        ]
        for row in rows
    ]


def _kernel_table(gemms: Sequence[GemmRecord]) -> _Table:
    groups: dict[tuple[str, str, str], list[GemmRecord]] = {}
    for gemm in gemms:
        key = (gemm.precision, gemm.kernel or "not lowered", _formats(gemm.formats) or "-")
        groups.setdefault(key, []).append(gemm)
    total = sum(gemm.flops for gemm in gemms) or 1
    return [["precision", "kernel", "formats", "GEMMs", "FLOPs"]] + [
        [*key, f"{len(members)}", f"{sum(gemm.flops for gemm in members) / total:.1%}"]
        for key, members in sorted(groups.items(), reverse=True)
    ]


def _formats(formats: Sequence[OperandFormat]) -> str:
    """``x, w: e4m3 1x32 rceil``: operands of one format are named together."""
    operands: dict[str, list[str]] = {}
    for form in formats:
        operands.setdefault(f"{form.elem} {form.block} {form.rounding}", []).append(form.operand)
    return "; ".join(f"{', '.join(names)}: {form}" for form, names in operands.items())


def _precision(row: Row, which: str) -> str:
    found = {gemm.precision for gemm in row.gemms if gemm.gemm == which}
    return "/".join(sorted(found)) if found else "-"


def _size(gemm: GemmRecord) -> str:
    size = f"{gemm.m}×{gemm.n}×{gemm.k}"
    return f"{gemm.batch}·{size}" if gemm.batch > 1 else size


def _drawn(table: _Table, form: str) -> str:
    return tabulate(table[1:], headers=table[0], tablefmt=form, disable_numparse=True)


def _fitted(table: _Table, flexible: tuple[str, ...]) -> _Table:
    """`table` with its `flexible` columns narrowed, the widest first, to lines of `WIDTH`."""
    widths = [max(len(header) + MIN_PADDING, *map(len, cells)) for header, *cells in zip(*table, strict=True)]
    columns = [table[0].index(name) for name in flexible]
    for _ in range(sum(widths) + 2 * (len(widths) - 1) - WIDTH):
        widths[max(columns, key=widths.__getitem__)] -= 1
    return [[_short(cell, width) for cell, width in zip(row, widths, strict=True)] for row in table]


def _short(text: str, width: int) -> str:
    if len(text) <= width:
        return text
    tail = (width - 1) * 2 // 3
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def _escaped(table: _Table) -> _Table:
    return [[cell.replace("|", "\\|") for cell in row] for row in table]


def _bytes(number: int) -> str:
    value, units = float(number), iter(("B", "KiB", "MiB", "GiB", "TiB"))
    unit = next(units)
    while value >= 1024 and unit != "TiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"
