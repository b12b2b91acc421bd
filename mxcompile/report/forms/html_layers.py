"""The table of the HTML form: equal layers in one row, their GEMMs and names in a second that opens."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from mxcompile.formats import KEPT, PRECISIONS, precisions
from mxcompile.report.fold import Row
from mxcompile.report.forms.html_parts import SORTABLE, role_badge, source_line, tone
from mxcompile.report.forms.words import count, duration, formats, size, speedup
from mxcompile.report.record import GemmRecord

_LETTERS = {"fprop": "F", "dgrad": "D", "wgrad": "W"}


def layers(rows: Sequence[Row], gemms: Sequence[GemmRecord]) -> str:
    """The section with the table."""
    total = sum(gemm.flops for gemm in gemms) or 1
    estimates = any(speedup(row.gemms) is not None for row in rows)
    roles = "".join(f"<option>{escape(role)}</option>" for role in dict.fromkeys(g.role for g in gemms))
    codes = dict.fromkeys(gemm.code for gemm in gemms if gemm.code)
    reasons = "".join(f"<option>{escape(code)}</option>" for code in codes)
    bodies = "".join(_row(number, row, total, estimates) for number, row in enumerate(rows))
    estimate = f'<th class="num" {SORTABLE}>est.</th>' if estimates else ""
    found = {gemm.precision for gemm in gemms}
    words = [word for word in PRECISIONS if word in found] or [KEPT.name]
    said = [escape(precisions.label(word)) for word in words]
    options = "".join(
        f'<option value="{escape(word)}">with {text}</option>' for word, text in zip(words, said, strict=True)
    )
    return f"""<section id="layers"><h2>Layers</h2>
<div class="filters">
<input type="search" id="search" placeholder="Search layer names" aria-label="search layer names">
<select id="role" aria-label="role"><option value="">all roles</option>{roles}</select>
<select id="precision" aria-label="precision"><option value="">{" and ".join(said)}</option>
{options}</select>
<select id="reason" aria-label="reason"><option value="">all reasons</option>{reasons}</select>
<button type="button" id="expand" aria-pressed="false">Expand all</button>
<output id="found">{count(len(rows), "row")}</output></div>
<div class="scroll"><table id="table"><thead><tr>
<th {SORTABLE}>layer</th><th class="num" {SORTABLE}>layers</th><th class="wide" {SORTABLE}>role</th>
<th class="wide num">m×n×k</th><th title="fprop, dgrad, wgrad">GEMMs</th>
<th class="num" {SORTABLE}>FLOPs</th>{estimate}<th class="wide" {SORTABLE}>reason</th>
</tr></thead>{bodies}</table></div>
<p class="hint"><span class="chip quantized">F</span> {precisions.labels(g.precision for g in gemms)},
<span class="chip bf16">F</span> the model's own dtype.
F fprop: y = x·Wᵀ. D dgrad: dx = dy·W. W wgrad: dW = dyᵀ·x.</p></section>"""


def _row(number: int, row: Row, total: int, estimates: bool) -> str:
    first = row.gemms[0]
    chips = "".join(_chip(gemm) for gemm in _ordered(row.gemms))
    share = row.count * sum(gemm.flops for gemm in row.gemms) / total
    ratio = speedup(row.gemms)
    estimate = f'<td class="num" data-value="{ratio or 0}">{_ratio(ratio)}</td>' if estimates else ""
    words = " ".join(sorted({gemm.precision for gemm in row.gemms}))
    reasons = "; ".join(dict.fromkeys(gemm.reason for gemm in row.gemms))
    inside = gemm_details(row.gemms, row.names)
    codes = escape("|".join(dict.fromkeys(gemm.code for gemm in row.gemms)))
    return f"""<tbody data-role="{escape(first.role)}" data-precision="{escape(words)}" data-reason="{codes}">
<tr><td><button type="button" class="more" aria-expanded="false" aria-controls="m{number}">\
{escape(row.name or "(root)")}</button></td>
<td class="num" data-value="{row.count}">{f"×{row.count}" if row.count > 1 else ""}</td>
<td class="wide">{role_badge(first.role)}</td><td class="wide num">{size(first)}</td>
<td class="chips">{chips}</td>
<td class="num" data-value="{share}"><span class="meter" style="--share:{share:.4f}">{share:.1%}</span></td>
{estimate}<td class="wide">{escape(reasons)}</td></tr>
<tr class="inside" id="m{number}" hidden><td colspan="{8 if estimates else 7}">{inside}</td></tr>
</tbody>"""


def _ordered(gemms: Sequence[GemmRecord]) -> list[GemmRecord]:
    return sorted(gemms, key=lambda gemm: list(_LETTERS).index(gemm.gemm))


def _chip(gemm: GemmRecord) -> str:
    said = f"{gemm.gemm} {precisions.label(gemm.precision)}"
    letter = _LETTERS.get(gemm.gemm, gemm.gemm)
    return (
        f'<span class="chip {tone(gemm.precision)}" title="{escape(said)}" role="img"'
        f' aria-label="{escape(said)}">{escape(letter)}</span>'
    )


def _ratio(ratio: float | None) -> str:
    if ratio is None or ratio == 1:
        return ""
    return f"{ratio:.2f}×" if ratio > 1 else f'<b class="slow">{ratio:.2f}× slower</b>'


def gemm_details(gemms: Sequence[GemmRecord], names: Sequence[str]) -> str:
    """All that is known of the GEMMs of equal layers, and the layers' `names` if they are to be listed."""
    estimates = any(gemm.estimate_us is not None for gemm in gemms)
    head = "".join(
        f"<th>{word}</th>"
        for word in (
            "GEMM",
            "m×n×k",
            "precision",
            "formats",
            "kernel",
            "reason",
            *(["estimate"] if estimates else []),
        )
    )
    lines = "".join(_gemm(gemm, estimates) for gemm in _ordered(gemms))
    named = "".join(f"<li>{escape(name or '(root)')}</li>" for name in names)
    total = count(len(names), "layer")
    listed = f'<details class="names"><summary>{total}</summary><ul>{named}</ul></details>' if names else ""
    module = " ".join(dict.fromkeys(gemm.module for gemm in gemms if gemm.module))
    about = f'<p class="about">{escape(module)} {source_line(gemms[0].source)}</p>'
    table = f'<div class="scroll"><table class="gemms"><thead><tr>{head}</tr></thead>{lines}</table></div>'
    return f"{table}{about}{listed}"


def _gemm(gemm: GemmRecord, estimates: bool) -> str:
    word = precisions.label(gemm.precision)
    cells = [
        escape(gemm.gemm),
        size(gemm),
        f'<span class="word {tone(gemm.precision)}">{escape(word)}</span>',
        escape(formats(gemm.formats)) or "–",
        f"<code>{escape(gemm.kernel)}</code>" if gemm.kernel else "not lowered",
        escape(gemm.reason),
    ]
    if estimates:
        ours, bf16 = gemm.estimate_us, gemm.estimate_bf16_us
        known = ours is not None and bf16 is not None
        cells.append(f"{duration(ours or 0)}, BF16 {duration(bf16 or 0)}" if known else "")
    labels = ("", "", "", "formats", "kernel", "reason", "estimate")
    marked = (
        (f' data-label="{label}"' if label else "", cell) for label, cell in zip(labels, cells, strict=False)
    )
    return f"<tr>{''.join(f'<td{mark}>{cell}</td>' for mark, cell in marked)}</tr>"
