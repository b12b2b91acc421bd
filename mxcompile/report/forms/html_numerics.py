"""The errors of an audit in the HTML form, most harm first."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from mxcompile.report.data.numerics import Numerics
from mxcompile.report.data.numerics_groups import by_block, by_role

_FULL_DB = 60.0
_GOOD_DB = {"MXFP8": 27.5}
"""SQNR of a layer on normally distributed data, by precision, where it is known."""


def numerics_values(numerics: Numerics) -> dict[str, Any]:
    """Returns the variables of the template's numerics section."""
    blocks = by_block(numerics)
    return {
        "good": _GOOD_DB.get(numerics.precision),
        "gemm_harm": numerics.harm_of_gemms(),
        "measured": list(_figures(numerics)),
        "groups": [("role", by_role(numerics)), ("block", blocks if len(blocks) > 1 else [])],
        "operands": {"x": "input", "w": "weight", "dy": "gradient"},
        "counted": {
            "GEMMs",
            "FLOPs",
            "cosine",
            "rel. error",
            "underflow",
            "saturation",
            "harm",
            "output change",
        },
    }


def _figures(numerics: Numerics) -> Iterator[tuple[str, str, str, None]]:
    if numerics.loss is not None and numerics.loss_reference is not None:
        gap = (
            ""
            if numerics.loss_gap is None
            else f"{numerics.loss_gap:+.3%} of {numerics.loss_reference:.4f} in {numerics.own_dtype}"
        )
        yield "loss", f"{numerics.loss:.4f}", gap, None
    if numerics.logits_sqnr_db is not None:
        yield f"output against {numerics.own_dtype}", _db(numerics.logits_sqnr_db), "", None
    if numerics.gradient_error is not None and numerics.gradient_cosine is not None:
        note = f"relative error; cosine {numerics.gradient_cosine:.5f}"
        yield "parameter gradients, by FLOPs", f"{numerics.gradient_error:.2%}", note, None
    yield "casts measured", f"{len(numerics.tensors):,}", "", None
    yield "GEMMs measured", f"{len(numerics.gemms):,}", "", None


def _order(value: float) -> float:
    """Returns the sort key of a cell with `value`; NaN sorts above all numbers."""
    return 1e300 if math.isnan(value) else value


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


FILTERS: dict[str, Callable[..., Any]] = {"order": _order, "db": _db, "bar": _bar, "histogram": _histogram}
"""Jinja filters of the template's numerics section."""
