"""Tuning: its error bounds, and its result (a policy, the measured reason for every exception, an audit)."""

from __future__ import annotations

import math
import textwrap
from dataclasses import dataclass

from mxcompile.analysis.audit import Audit
from mxcompile.analysis.audit.text import decibels
from mxcompile.analysis.study.policy_file import MeasuredPolicy
from mxcompile.errors import OptionError, shown
from mxcompile.report import Numerics
from mxcompile.report.forms.tables import Table


@dataclass(frozen=True, kw_only=True, slots=True)
class Bounds:
    """The bounds; at least one must be set.

    min_sqnr: least SQNR of every quantized GEMM, in dB. max_loss_gap: largest relative difference of the loss
    from BF16's. Raises `OptionError` for invalid values.
    """

    min_sqnr: float | None = None
    max_loss_gap: float | None = None

    def __post_init__(self) -> None:
        if self.min_sqnr is None and self.max_loss_gap is None:
            raise OptionError("tune needs a bound: `min_sqnr` (in dB), `max_loss_gap` (a share), or both")
        if self.min_sqnr is not None and not (_is_number(self.min_sqnr) and math.isfinite(self.min_sqnr)):
            raise OptionError(f"`min_sqnr` must be a finite number of dB, found {shown(self.min_sqnr)}")
        if self.max_loss_gap is not None and not (
            _is_number(self.max_loss_gap) and 0 < self.max_loss_gap < math.inf
        ):
            raise OptionError(
                f"`max_loss_gap` must be a positive share (0.002 for 0.2 %), found {shown(self.max_loss_gap)}"
            )

    def allows_sqnr(self, sqnr_db: float) -> bool:
        """Whether a GEMM with this SQNR may stay quantized; False for NaN under a bound."""
        return self.min_sqnr is None or sqnr_db >= self.min_sqnr

    def allows_gap(self, gap: float | None) -> bool:
        """Whether the relative difference `gap` of the loss is allowed; False for NaN under a bound."""
        return self.max_loss_gap is None or (gap is not None and abs(gap) <= self.max_loss_gap)

    def allow(self, numerics: Numerics) -> bool:
        """Whether all measured errors are within the bounds."""
        return all(self.allows_sqnr(gemm.sqnr_db) for gemm in numerics.gemms) and self.allows_gap(
            numerics.loss_gap
        )

    def __str__(self) -> str:
        parts = []
        if self.min_sqnr is not None:
            parts.append(f"SQNR of every GEMM ≥ {self.min_sqnr:g} dB")
        if self.max_loss_gap is not None:
            parts.append(f"loss within {self.max_loss_gap:.3g} of BF16 ({self.max_loss_gap:.4%})")
        return ", ".join(parts)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """The choice for one layer.

    name: module path. use: name of the precision, preset or start policy, "bf16" for none. kept: GEMMs that
    stay in BF16 nevertheless. sqnr_db: lowest SQNR of its GEMMs, None if none is quantized. estimate_us,
    estimate_bf16_us: time of its GEMMs and casts with this choice and in BF16, None without a data sheet of
    the target. reason: why no cheaper option is possible.
    """

    name: str
    use: str
    kept: tuple[str, ...]
    sqnr_db: float | None
    estimate_us: float | None
    estimate_bf16_us: float | None
    reason: str


@dataclass(frozen=True, kw_only=True)
class Tuned(MeasuredPolicy):
    """The result of `tune`, with the reasons as comments.

    bounds: the requested bounds. chosen: layers with their own rule, in the order of the model: all layers of
    a mix, else the layers that stay in BF16 at least in part. audit: audit of the model under `policy`.
    flop_share_before: quantized share of the matmul FLOPs at the start; ``audit.report.summary.flop_share``
    is the final share. `met`: whether the audit is within the bounds and quantizes anything, or leaves layers
    in BF16 because that is estimated to be faster. target: target of the cost estimates, "" without
    estimates.
    """

    bounds: Bounds
    chosen: tuple[Chosen, ...] = ()
    audit: Audit
    flop_share_before: float
    met: bool
    target: str = ""

    def _table(self) -> Table:
        table = [["layer", "in", "but in BF16", "dB", "of BF16's time", "nothing cheaper because"]]
        for row in self.chosen:
            us, bf16 = row.estimate_us, row.estimate_bf16_us
            sqnr = "" if row.sqnr_db is None else decibels(row.sqnr_db)
            share = f"{us / bf16:.2f}" if us and bf16 else ""
            reason = textwrap.fill(row.reason, 40)
            table.append([row.name or "(root)", row.use, ", ".join(row.kept), sqnr, share, reason])
        return table

    def _facts(self) -> list[str]:
        kept = self.audit.report.summary.flop_share
        lowest = self.audit.numerics.lowest_sqnr_db
        reached = ["nothing is left quantized"]
        if self.met and lowest is None:
            reached = [f"everything in BF16, which is estimated to be fastest on {self.target}"]
        if lowest is not None:
            reached = [f"lowest SQNR of a GEMM {decibels(lowest)} dB"]
        if (gap := self.audit.numerics.loss_gap) is not None:
            reached.append(f"loss gap {gap:+.4%}")
        facts = [
            f"bound: {self.bounds}: {'fulfilled' if self.met else 'CANNOT BE FULFILLED'}",
            f"reached: {', '.join(reached)}",
            f"kept quantized: {kept:.1%} of matmul FLOPs, {self.flop_share_before:.1%} before",
        ]
        if self.chosen and self.target:
            us = sum(layer.estimate_us or 0.0 for layer in self.chosen)
            bf16 = sum(layer.estimate_bf16_us or 0.0 for layer in self.chosen)
            facts.append(f"estimated on {self.target}: {us / bf16:.2f} of BF16's time of these layers")
        return facts

    def _heading(self) -> list[str]:
        first, *rest = self._facts()
        return [f"Tuned by measurement; {first}", *rest, *(f"note: {note}" for note in self.notes)]
