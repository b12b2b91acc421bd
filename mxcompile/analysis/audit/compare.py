"""`compare`: what several policies do to the numbers of one model on one batch, side by side.

A row a policy: share of the matmul FLOPs that is quantized, the lowest SQNR of each kind of GEMM, the SQNR of
the model's main output, error of the parameters' gradients, the loss and its gap to BF16. Then a row a layer
and GEMM: its SQNR under each.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mxcompile.analysis.audit.measure import Audit, audit
from mxcompile.analysis.audit.session import LossFunction
from mxcompile.analysis.audit.text import decibels, percent
from mxcompile.errors import OptionError
from mxcompile.formats import is_quantized
from mxcompile.policy import Gemm, Policy
from mxcompile.report import Numerics
from mxcompile.report.forms.tables import Table, drawn, fitted, wrapped
from mxcompile.report.numerics import lowest

_ROWS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class AuditComparison:
    """The audits of one model under several policies, in the order they were asked for."""

    audits: tuple[Audit, ...]

    def __str__(self) -> str:
        layers = self._layers()
        lines = [drawn(fitted(self._policies(), ("policy",)))]
        if len(layers) > 1:
            title = "SQNR of GEMMs against FP32 in dB, the lowest of any policy first; empty: not quantized"
            lines += ["", *wrapped([title]), "", drawn(fitted(layers[: _ROWS + 1], ("layer",)))]
        if len(layers) > _ROWS + 1:
            lines.append(f"… and {len(layers) - _ROWS - 1} that no policy moves so far")
        return "\n".join([*lines, *wrapped(self._notes())])

    def _notes(self) -> list[str]:
        """What is to be known of all, once, and then of each."""
        of_all = [
            note
            for note in self.audits[0].numerics.notes
            if all(note in each.numerics.notes for each in self.audits)
        ]
        return [f"note: {note}" for note in of_all] + [
            f"note, {each.numerics.policy}: {note}"
            for each in self.audits
            for note in each.numerics.notes
            if note not in of_all
        ]

    def _policies(self) -> Table:
        """A row for each policy; what was measured of none has no column."""
        least = [f"{gemm} ≥ dB" for gemm in Gemm]
        headers = ["policy", "quantized", *least, "output dB", "gradients", "loss", "gap"]
        columns = zip(headers, *map(_row, self.audits), strict=True)
        filled = [column for index, column in enumerate(columns) if index < 2 or any(column[1:])]
        return [list(row) for row in zip(*filled, strict=True)]

    def _layers(self) -> Table:
        """Headers, and a row for every layer and GEMM that any policy quantizes."""
        measured = [_by_gemm(each.numerics) for each in self.audits]
        keys = dict.fromkeys(key for found in measured for key in found)
        least = {key: lowest(found[key] for found in measured if key in found) for key in keys}
        worst = sorted(keys, key=lambda key: -math.inf if math.isnan(least[key]) else least[key])
        headers = ["layer", "GEMM", *(_name(each) for each in self.audits)]
        rows = [
            [
                key[0] or "(root)",
                key[1],
                *(decibels(found[key]) if key in found else "" for found in measured),
            ]
            for key in worst
        ]
        return [headers, *rows]


def _by_gemm(numerics: Numerics) -> dict[tuple[str, str], float]:
    """The lowest SQNR of every layer's kinds of GEMM."""
    found: dict[tuple[str, str], list[float]] = {}
    for gemm in numerics.gemms:
        found.setdefault((gemm.name, gemm.gemm), []).append(gemm.sqnr_db)
    return {key: lowest(values) for key, values in found.items()}


def _name(measured: Audit) -> str:
    return measured.numerics.policy.removeprefix("preset ")


def _row(measured: Audit) -> list[str]:
    numerics, summary = measured.numerics, measured.report.summary
    words = dict.fromkeys(g.precision for g in measured.report.gemms if is_quantized(g.precision))
    least = [[g.sqnr_db for g in numerics.gemms if g.gemm == gemm] for gemm in Gemm]
    error = numerics.gradient_error
    return [
        _name(measured),
        f"{summary.flop_share:.1%} {', '.join(words)}".strip(),
        *(decibels(lowest(values)) if values else "" for values in least),
        "" if numerics.logits_sqnr_db is None else decibels(numerics.logits_sqnr_db),
        "" if error is None else percent(error),
        "" if numerics.loss is None else f"{numerics.loss:.6g}",
        "" if numerics.loss_gap is None else f"{numerics.loss_gap:+.4%}",
    ]


def compare(
    model: nn.Module,
    *args: Any,
    policies: Sequence[Policy | str | dict[str, Any]],
    loss_fn: LossFunction | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> AuditComparison:
    """`audit` of `model` under each of `policies`, which are all read before anything runs.

    args, kwargs, loss_fn: as of `audit`. Raises `OptionError` for what is not a list of
    policies, and what `audit` raises.
    """
    if isinstance(policies, str):
        raise OptionError(f"policies is a list, found {policies!r}: write [{policies!r}]")
    resolved = [Policy.resolve(policy) for policy in policies]
    if not resolved:
        raise OptionError("compare needs at least one policy")
    return AuditComparison(
        audits=tuple(
            audit(model, *args, policy=policy, loss_fn=loss_fn, kwargs=kwargs) for policy in resolved
        )
    )
