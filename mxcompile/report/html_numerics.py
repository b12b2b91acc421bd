"""What an audit measured, for the HTML form: the worst first, with bars."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from mxcompile.report.html_parts import role_badge, tile
from mxcompile.report.numerics import GemmNumerics, Numerics, TensorNumerics

_SHOWN = 25
_NUMBERS = ("cosine", "rel. error", "underflow", "saturation")
_FULL_DB = 60.0
_GOOD_DB = 27.5
"""What a layer reaches on normal data."""


def numerics_section(numerics: Numerics | None) -> str:
    """The section; "" without an audit."""
    if numerics is None:
        return ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in numerics.notes)
    return f"""<section id="numerics"><h2>Numerics</h2>
<p class="hint">Measured on one batch, policy {escape(numerics.policy)}. SQNR in dB: more is better; a layer
reaches {_GOOD_DB} on normally distributed data. The worst come first.</p>
{f"<ul>{notes}</ul>" if notes else ""}<div class="tiles">{"".join(_tiles(numerics))}</div>
{_gemms(numerics.worst_gemms())}{_tensors(numerics.worst_tensors())}</section>"""


def _tiles(numerics: Numerics) -> Iterable[str]:
    if numerics.loss is not None and numerics.loss_reference is not None:
        gap = (
            ""
            if numerics.loss_gap is None
            else f"{numerics.loss_gap:+.3%} of {numerics.loss_reference:.4f} in BF16"
        )
        yield tile("loss", f"{numerics.loss:.4f}", gap)
    if numerics.logits_sqnr_db is not None:
        yield tile("output against BF16", _db(numerics.logits_sqnr_db))
    yield tile("casts measured", f"{len(numerics.tensors):,}")
    yield tile("GEMMs measured", f"{len(numerics.gemms):,}")


def _gemms(found: Sequence[GemmNumerics]) -> str:
    heads = ("layer", "role", "GEMM", "SQNR", "cosine", "rel. error")
    lines = [
        (
            f"<td>{escape(one.name or '(root)')}</td><td>{role_badge(one.role)}</td>"
            f"<td>{escape(one.gemm)}</td>{_bar(one.sqnr_db)}"
            f"<td class=num>{one.cosine:.6f}</td><td class=num>{one.rel_error:.2%}</td>"
        )
        for one in found
    ]
    return _table("Output of each MXFP8 GEMM against FP32", heads, lines)


def _tensors(found: Sequence[TensorNumerics]) -> str:
    heads = ("layer", "tensor", "cast", "SQNR", "underflow", "saturation", "scales 2ⁿ")
    words = {"x": "input", "w": "weight", "dy": "gradient"}
    lines = [
        (
            f"<td>{escape(one.name or '(root)')}</td><td>{escape(words.get(one.operand, one.operand))}</td>"
            f"<td>{escape(f'{one.elem} {one.block} {one.rounding}, {one.layout}')}</td>{_bar(one.sqnr_db)}"
            f"<td class=num>{one.underflow:.2%}</td><td class=num>{one.saturation:.2%}</td>"
            f"<td>{_histogram(one.scale_histogram)}</td>"
        )
        for one in found
    ]
    return _table("Each cast against its source", heads, lines)


def _table(title: str, heads: Sequence[str], lines: Sequence[str]) -> str:
    if not lines:
        return ""
    head = "".join(f"<th{' class=num' if word in _NUMBERS else ''}>{escape(word)}</th>" for word in heads)

    def body(some: Sequence[str]) -> str:
        rows = "".join(f"<tr>{line}</tr>" for line in some)
        return f'<div class="scroll"><table class="plain"><thead><tr>{head}</tr></thead>{rows}</table></div>'

    rest = lines[_SHOWN:]
    more = f"<details><summary>{len(rest)} more</summary>{body(rest)}</details>" if rest else ""
    return f"<h3>{escape(title)}</h3>{body(lines[:_SHOWN])}{more}"


def _db(value: float) -> str:
    return "not finite" if math.isnan(value) else "exact" if value == math.inf else f"{value:.1f} dB"


def _bar(value: float) -> str:
    """A cell with an SQNR and its bar; what is under par is hatched."""
    share = 0.0 if math.isnan(value) else min(max(value / _FULL_DB, 0.0), 1.0)
    low = " low" if math.isnan(value) or value < _GOOD_DB - 0.05 else ""
    bar = f'<div class="bar"><i style="width:{share:.1%}"></i></div>'
    return f'<td class="sqnr{low}"><span>{_db(value)}</span>{bar}</td>'


def _histogram(pairs: Sequence[tuple[int, int]]) -> str:
    """Blocks per scale exponent, as bars from the smallest exponent to the largest."""
    finite = [(byte, number) for byte, number in pairs if byte != 255]
    if not finite:
        return ""
    low, high = finite[0][0], finite[-1][0]
    most = max(number for _, number in finite)
    heights = [(byte - low, 18 * number / most) for byte, number in finite]
    bars = "".join(
        f'<rect x="{4 * place}" y="{18 - height:.1f}" width="3" height="{height:.1f}"/>'
        for place, height in heights
    )
    width = (high - low) * 4 + 3
    said = f"exponents {low - 127} to {high - 127}"
    return (
        f'<svg class="histogram" width="{min(width, 160)}" height="18" viewBox="0 0 {width} 18"'
        f' preserveAspectRatio="none" role="img" aria-label="{said}"><title>{said}</title>{bars}</svg>'
        f"<small>{low - 127}…{high - 127}</small>"
    )
