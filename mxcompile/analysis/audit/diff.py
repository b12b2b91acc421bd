"""The changes between two audits of a model: changes of the report, and of the measured errors.

GEMMs are matched by layer and kind, casts by layer, operand and layout, the n-th of one audit with the n-th
of the other. Changes as small as the variation between batches are not listed.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from mxcompile.analysis.audit.measure import Audit
from mxcompile.analysis.audit.text import decibels, percent
from mxcompile.report import GemmNumerics, TensorNumerics
from mxcompile.report.data.fold import grouped
from mxcompile.report.diff import Difference, compare
from mxcompile.report.forms.tables import Table, markdown_page, page

LEAST_DB = 0.5
LEAST_UNDERFLOW = 0.001
_ROWS = 20
_Measured = TypeVar("_Measured", GemmNumerics, TensorNumerics)


@dataclass(frozen=True, kw_only=True, slots=True)
class Moved:
    """An error that changed.

    name: layer. what: GEMM or cast. before, after: values in `unit`. unit: "dB" for an SQNR, "" for the share
    of elements cast to zero. worse: increase of the error in the same unit; negative if it decreased, inf for
    a new NaN.
    """

    name: str
    what: str
    before: float
    after: float
    unit: str
    worse: float


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditDifference:
    """All changes of the report, and the errors that `moved`, the worst first. facts: changed totals."""

    report: Difference
    moved: tuple[Moved, ...]
    facts: tuple[str, ...]

    @property
    def sqnr_drop(self) -> float:
        """Largest decrease of the SQNR of a GEMM in dB; 0 if all are below `LEAST_DB`, inf for a new NaN."""
        return max((change.worse for change in self.moved if change.unit), default=0.0)

    def __str__(self) -> str:
        return f"{self.report}\n\n{page(self._sentences(), (self._table(), ('layer',)))}"

    def to_markdown(self) -> str:
        """Returns the changes as Markdown, for a pull request."""
        return f"{self.report.to_markdown()}\n{markdown_page(self._sentences(), self._table())}"

    def _sentences(self) -> list[str]:
        worse = sum(change.worse > 0 for change in self.moved)
        left_out = len(self.moved) - _ROWS
        more = [f"{left_out} with smaller changes are not listed"] if left_out > 0 else []
        counted = "numerics: no change is larger than chance"
        if self.report.is_unrelated:
            counted = "numerics: not compared, as the audits have no layer in common"
        elif self.moved:
            counted = f"numerics: {worse} worse, {len(self.moved) - worse} better"
        return [counted, *self.facts, *more]

    def _table(self) -> Table:
        rows = []
        for change in self.moved[:_ROWS]:
            measure, text = ("SQNR, dB", decibels) if change.unit else ("to 0", percent)
            values = text(change.before), text(change.after)
            rows.append([change.name or "(root)", change.what, measure, *values])
        return [["layer", "GEMM or cast", "measure", "before", "after"], *rows]


def compare_audits(old: Audit, new: Audit) -> AuditDifference:
    """Returns the changes from `old` to `new`."""
    before, after = old.numerics, new.numerics
    casts = before.tensors, after.tensors
    moved = [
        *_moved(before.gemms, after.gemms, lambda g: (g.name, g.gemm), lambda g: g.sqnr_db, "dB"),
        *_moved(*casts, lambda t: (t.name, f"{t.operand} {t.layout}"), lambda t: t.underflow, ""),
    ]
    moved.sort(key=lambda move: move.worse / (LEAST_DB if move.unit else LEAST_UNDERFLOW), reverse=True)
    facts = []
    for label, a, b, form in (
        ("loss gap", before.loss_gap, after.loss_gap, "{:+.4%}"),
        ("SQNR of the main output, dB", before.logits_sqnr_db, after.logits_sqnr_db, "{:.2f}"),
        ("relative error of parameter gradients", before.gradient_error, after.gradient_error, "{:.3%}"),
    ):
        texts = ["none" if value is None else form.format(value) for value in (a, b)]
        if texts[0] != texts[1]:
            facts.append(f"{label}: {texts[0]} → {texts[1]}")
    return AuditDifference(report=compare(old.report, new.report), moved=tuple(moved), facts=tuple(facts))


def _moved(
    old: Iterable[_Measured],
    new: Iterable[_Measured],
    key: Callable[[_Measured], tuple[str, str]],
    value: Callable[[_Measured], float],
    unit: str,
) -> Iterator[Moved]:
    """Yields the larger changes of `value`, an SQNR if `unit` is "dB", between items of equal `key`."""
    waiting = grouped(old, key)
    for item in new:
        name, what = key(item)
        same = waiting.get((name, what))
        before, after = (value(same.pop(0)), value(item)) if same else (0.0, 0.0)
        if before == after or (math.isnan(before) and math.isnan(after)):
            continue
        worse = before - after if unit else after - before
        if math.isnan(before) or math.isnan(after):
            worse = math.inf if math.isnan(after) else -math.inf
        if abs(worse) >= (LEAST_DB if unit else LEAST_UNDERFLOW):
            yield Moved(name=name, what=what, before=before, after=after, unit=unit, worse=worse)
