"""What an audit measured, for the HTML form: tables to search and sort, with bars, most harm first."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

from mxcompile.report.forms.html_parts import SORTABLE, role_badge, tile
from mxcompile.report.numerics import GemmNumerics, Numerics, ParameterNumerics, TensorNumerics
from mxcompile.report.numerics_groups import Group, by_block, by_role

_WORDS = {"x": "input", "w": "weight", "dy": "gradient"}
_FULL_DB = 60.0
_GOOD_DB = {"MXFP8": 27.5}
"""What a layer reaches on normal data, by precision, where it is known."""


def numerics_section(numerics: Numerics | None) -> str:
    """The section; "" without an audit."""
    if numerics is None:
        return ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in numerics.notes)
    good = _GOOD_DB.get(numerics.precision, -math.inf)
    par = f" A layer reaches {good} dB on normally distributed data." if math.isfinite(good) else ""
    blocks = by_block(numerics)
    tables = [
        _table("By role", "role", _GROUP, [_group(one, good) for one in by_role(numerics)]),
        _table("By block", "block", _GROUP, [_group(one, good) for one in blocks if len(blocks) > 1]),
        _table(
            f"Output of each {escape(numerics.precision)} GEMM against FP32",
            "layer",
            ("role", "GEMM", *_ERRORS, "harm"),
            [_gemm(one, good) for one in numerics.worst_gemms()],
        ),
        _table(
            "Each cast against its source",
            "layer",
            ("tensor", "cast", "SQNR", "underflow", "saturation", "scales 2ⁿ", "harm"),
            [_tensor(one, good) for one in numerics.worst_tensors()],
        ),
        _table(
            "Gradients of parameters against the unquantized model's",
            "parameter",
            ("role", *_ERRORS, "harm"),
            [_parameter(one, good) for one in numerics.worst_parameters()],
        ),
    ]
    return f"""<section id="numerics"><h2>Numerics</h2>
<p class="hint">Measured on one batch, policy {escape(numerics.policy)}. SQNR in dB: more is better.{par}
Harm is FLOPs × error², for casts FLOPs × (error² + share cast to zero); the most comes first.</p>
{f"<ul>{notes}</ul>" if notes else ""}<div class="tiles">{"".join(_tiles(numerics))}</div>
{"".join(tables)}</section>"""


_ERRORS = ("SQNR", "cosine", "rel. error")
_GROUP = ("GEMMs", "FLOPs", "rel. error", "lowest SQNR", "underflow", "most harm in")
_NUMBERS = {"GEMMs", "FLOPs", "cosine", "rel. error", "underflow", "saturation", "harm"}


def _tiles(numerics: Numerics) -> Iterable[str]:
    if numerics.loss is not None and numerics.loss_reference is not None:
        gap = (
            ""
            if numerics.loss_gap is None
            else f"{numerics.loss_gap:+.3%} of {numerics.loss_reference:.4f} in {numerics.own_dtype}"
        )
        yield tile("loss", f"{numerics.loss:.4f}", gap)
    if numerics.logits_sqnr_db is not None:
        yield tile(f"output against {numerics.own_dtype}", _db(numerics.logits_sqnr_db))
    if numerics.gradient_error is not None and numerics.gradient_cosine is not None:
        said = f"relative error; cosine {numerics.gradient_cosine:.5f}"
        yield tile("parameter gradients, by FLOPs", f"{numerics.gradient_error:.2%}", said)
    yield tile("casts measured", f"{len(numerics.tensors):,}")
    yield tile("GEMMs measured", f"{len(numerics.gemms):,}")


def _gemm(one: GemmNumerics, good: float) -> str:
    about = f"<td>{role_badge(one.role)}</td><td>{escape(one.gemm)}</td>"
    return _row(one.name, about + _errors(one, good) + _harm(one))


def _tensor(one: TensorNumerics, good: float) -> str:
    how = f"{one.elem} {one.block} {one.rounding}, {one.layout}"
    about = f"<td>{escape(_WORDS.get(one.operand, one.operand))}</td><td>{escape(how)}</td>"
    shares = _number(one.underflow, f"{one.underflow:.2%}") + _number(one.saturation, f"{one.saturation:.2%}")
    scales = f"<td>{_histogram(one.scale_histogram)}</td>"
    names = (one.name, *one.shared_with)
    return _row(one.name, about + _bar(one.sqnr_db, good) + shares + scales + _harm(one), names)


def _parameter(one: ParameterNumerics, good: float) -> str:
    role = f"<td>{role_badge(one.role) if one.role else ''}</td>"
    return _row(one.name, role + _errors(one, good) + _harm(one))


def _group(one: Group, good: float) -> str:
    lost = "" if one.underflow is None else f"{one.underflow:.2%}"
    cells = (
        _number(one.num_gemms, f"{one.num_gemms:,}")
        + _number(one.flop_share, f"{one.flop_share:.1%}")
        + _number(one.rel_error, f"{one.rel_error:.2%}")
        + _bar(one.lowest_sqnr_db, good)
        + _number(one.underflow or 0.0, lost)
        + f"<td>{escape(one.worst.name or '(root)')} {escape(one.worst.gemm)}</td>"
    )
    return _row(one.name, cells)


def _errors(one: GemmNumerics | ParameterNumerics, good: float) -> str:
    cosine, error = _number(one.cosine, f"{one.cosine:.6f}"), _number(one.rel_error, f"{one.rel_error:.2%}")
    return _bar(one.sqnr_db, good) + cosine + error


def _harm(one: GemmNumerics | TensorNumerics | ParameterNumerics) -> str:
    return _number(one.harm, f"{one.harm:.1e}")


def _row(name: str, cells: str, names: Sequence[str] = ()) -> str:
    found = escape(" ".join(names or (name,)))
    return f'<tr data-names="{found}"><td>{escape(name or "(root)")}</td>{cells}</tr>'


def _number(value: float, said: str) -> str:
    """A cell that sorts by `value`; what is no number is larger than all."""
    return f'<td class="num" data-value="{1e300 if math.isnan(value) else value}">{said}</td>'


def _table(title: str, first: str, heads: Sequence[str], rows: Sequence[str]) -> str:
    """`rows` under their `heads`, with a search where there are many."""
    if not rows:
        return ""
    head = "".join(f"<th{_class(word)} {SORTABLE}>{escape(word)}</th>" for word in (first, *heads))
    search = (
        f'<div class="filters"><input type="search" data-search placeholder="Search names"'
        f' aria-label="search: {escape(title)}"><output>{len(rows)} rows</output></div>'
        if len(rows) > _FEW
        else ""
    )
    return (
        f'<div class="searched"><h3>{title}</h3>{search}<div class="scroll tall"><table class="plain sorted">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(rows)}</tbody></table></div></div>"
    )


_FEW = 8


def _class(word: str) -> str:
    return ' class="num"' if word in _NUMBERS else ""


def _db(value: float) -> str:
    return "not finite" if math.isnan(value) else "exact" if value == math.inf else f"{value:.1f} dB"


def _bar(value: float, good: float) -> str:
    """A cell with an SQNR and its bar; what is under par is hatched."""
    share = 0.0 if math.isnan(value) else min(max(value / _FULL_DB, 0.0), 1.0)
    low = " low" if math.isnan(value) or value < good - 0.05 else ""
    bar = f'<div class="bar"><i style="width:{share:.1%}"></i></div>'
    order = -1e300 if math.isnan(value) else min(max(value, -1e299), 1e299)
    return f'<td class="sqnr{low}" data-value="{order}"><span>{_db(value)}</span>{bar}</td>'


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
