"""Compares several policies on one model: a table with a row for each policy.

compare      audits on a batch: the lowest SQNR of each kind of GEMM, the SQNR of the main output, the error
             of the gradients, the loss and its gap to BF16; then a row for each layer and GEMM
estimates    without a run of the model: bytes saved for backward, estimated time of all matmuls and casts
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mxcompile.analysis.audit.measure import Audit, audit
from mxcompile.analysis.audit.text import decibels, percent
from mxcompile.analysis.explain.explainer import explain
from mxcompile.analysis.study.session import LossFunction
from mxcompile.analysis.study.stats import lowest_by
from mxcompile.errors import OptionError
from mxcompile.formats import is_quantized
from mxcompile.policy import Gemm, Policy
from mxcompile.report import Report
from mxcompile.report.forms.tables import Table, drawn, fitted, section, wrapped
from mxcompile.report.forms.words import byte_count, duration

_ROWS = 20
_AnyPolicy = Policy | str | dict[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """One model under several policies, in the order of the request.

    reports: report of each policy. audits: audit of each policy, empty for estimates without a run.
    """

    reports: tuple[Report, ...]
    audits: tuple[Audit, ...] = ()

    def with_note(self, note: str) -> Comparison:
        """Returns a copy with `note` as the first note of every audit."""
        return dataclasses.replace(self, audits=tuple(result.with_note(note) for result in self.audits))

    def __str__(self) -> str:
        table = drawn(fitted(self._policies(), ("policy",)))
        if not self.audits:
            summary = self.reports[0].summary
            missing = f"no estimates, because target {summary.target} has no data sheet"
            about = "estimated" if summary.estimate_us else missing
            return f"target {summary.target}, {about}\n\n{table}"
        if len(layers := self._layers()) > 1:
            title = "SQNR of GEMMs against FP32 in dB, the lowest of any policy first; empty: not quantized"
            table += f"\n\n{section(title, layers, _ROWS, 'layers with smaller errors')}"
        every = [result.numerics for result in self.audits]
        shared = [note for note in every[0].notes if all(note in numerics.notes for numerics in every)]
        notes = [f"note: {note}" for note in shared]
        notes += (f"note, {n.policy}: {note}" for n in every for note in n.notes if note not in shared)
        return "\n".join([table, *wrapped(notes)])

    def _policies(self) -> Table:
        """Returns a row for each policy, without columns that are empty for all."""
        rows = []
        for report, result in itertools.zip_longest(self.reports, self.audits):
            summary = report.summary
            words = dict.fromkeys(gemm.precision for gemm in report.gemms if is_quantized(gemm.precision))
            share = f"{summary.flop_share:.1%} {', '.join(words)}".strip()
            row = {"policy": _name(report), "quantized": share}
            if result is None:
                saved, ours, bf16 = summary.saved_bytes, summary.estimate_us, summary.estimate_bf16_us
                row["saved for backward"] = "" if saved is None else byte_count(saved)
                row["matmuls and casts"] = duration(ours) if ours and bf16 else ""
                row["÷ BF16"] = f"{ours / bf16:.2f}" if ours and bf16 else ""
            else:
                n = result.numerics
                by_kind = lowest_by((gemm.gemm, gemm.sqnr_db) for gemm in n.gemms)
                for gemm in Gemm:
                    row[f"{gemm} ≥ dB"] = decibels(by_kind[gemm]) if gemm in by_kind else ""
                row["output dB"] = "" if n.logits_sqnr_db is None else decibels(n.logits_sqnr_db)
                row["gradients"] = "" if n.gradient_error is None else percent(n.gradient_error)
                row["loss"] = "" if n.loss is None else f"{n.loss:.6g}"
                row["gap"] = "" if n.loss_gap is None else f"{n.loss_gap:+.4%}"
            rows.append(row)
        filled = [head for index, head in enumerate(rows[0]) if index < 2 or any(row[head] for row in rows)]
        return [filled, *([row[head] for head in filled] for row in rows)]

    def _layers(self) -> Table:
        """Returns headers, and a row for every layer and GEMM that any policy quantizes."""
        measured = [
            lowest_by(((gemm.name, gemm.gemm), gemm.sqnr_db) for gemm in result.numerics.gemms)
            for result in self.audits
        ]
        least = lowest_by(item for by_gemm in measured for item in by_gemm.items())
        worst = sorted(least, key=lambda key: -math.inf if math.isnan(least[key]) else least[key])
        rows = []
        for name, gemm in worst:
            values = (by_gemm.get((name, gemm)) for by_gemm in measured)
            cells = ("" if sqnr is None else decibels(sqnr) for sqnr in values)
            rows.append([name or "(root)", gemm, *cells])
        return [["layer", "GEMM", *(_name(result.report) for result in self.audits)], *rows]


def _name(report: Report) -> str:
    return report.summary.policy.removeprefix("preset ")


def _resolved(policies: Sequence[_AnyPolicy]) -> list[Policy]:
    """Returns all `policies`, loaded. Raises `OptionError` if it is not a list."""
    if isinstance(policies, str):
        raise OptionError(f"policies must be a list, found {policies!r}: write [{policies!r}]")
    if not policies:
        raise OptionError("compare needs at least one policy")
    return [Policy.resolve(policy) for policy in policies]


def compare(
    model: nn.Module,
    *args: Any,
    policies: Sequence[_AnyPolicy],
    loss_fn: LossFunction | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> Comparison:
    """Audits `model` on one call under several policies, and compares the results.

    Args:
        model: model as for `audit`.
        *args: positional arguments of the call.
        policies: list of policies, each as in the backend's option. All are loaded before the model runs.
        loss_fn: as for `audit`.
        kwargs: keyword arguments of the call.

    Returns:
        A `Comparison`; ``str()`` is the tables.

    Raises:
        OptionError: if `policies` is not a list or empty. `compare` also raises the errors of `audit`.
    """
    audits = tuple(
        audit(model, *args, policy=policy, loss_fn=loss_fn, kwargs=kwargs) for policy in _resolved(policies)
    )
    return Comparison(reports=tuple(result.report for result in audits), audits=audits)


def estimates(
    model: nn.Module,
    *args: Any,
    policies: Sequence[_AnyPolicy],
    target: str = "auto",
    training: bool = True,
    kwargs: Mapping[str, Any] | None = None,
) -> Comparison:
    """Returns the results of `explain` for `model` under each of `policies`, which are all loaded first.

    Raises `OptionError` if `policies` is not a list, and the errors of `explain`.
    """
    named: dict[str, Any] = {"target": target, "training": training, "kwargs": kwargs}
    reports = (explain(model, *args, policy=policy, **named) for policy in _resolved(policies))
    return Comparison(reports=tuple(reports))
