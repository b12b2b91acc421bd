"""The result of tuning: a policy, the measured reason for every exception, and an audit."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass

from mxcompile.analysis.audit import Audit
from mxcompile.analysis.audit.text import decibels
from mxcompile.analysis.study.policy_file import MeasuredPolicy
from mxcompile.analysis.tune.bounds import Bounds
from mxcompile.report.forms.tables import Table


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
        headers = ["layer", "in", "but in BF16", "dB", "of BF16's time", "nothing cheaper because"]
        return [headers, *map(_row, self.chosen)]

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
        return [
            f"bound: {self.bounds}: {'fulfilled' if self.met else 'CANNOT BE FULFILLED'}",
            f"reached: {', '.join(reached)}",
            f"kept quantized: {kept:.1%} of matmul FLOPs, {self.flop_share_before:.1%} before",
            *self._estimated(),
        ]

    def _estimated(self) -> list[str]:
        """Returns a sentence on the estimated time of the layers of a mix, if known."""
        if not self.chosen or not self.target:
            return []
        us, bf16 = (
            sum(time or 0.0 for time in times)
            for times in zip(*((c.estimate_us, c.estimate_bf16_us) for c in self.chosen), strict=True)
        )
        return [f"estimated on {self.target}: {us / bf16:.2f} of BF16's time of these layers"]

    def _heading(self) -> list[str]:
        first, *rest = self._facts()
        return [f"Tuned by measurement; {first}", *rest, *(f"note: {note}" for note in self.notes)]


def _row(chosen: Chosen) -> list[str]:
    us, bf16 = chosen.estimate_us, chosen.estimate_bf16_us
    return [
        chosen.name or "(root)",
        chosen.use,
        ", ".join(chosen.kept),
        "" if chosen.sqnr_db is None else decibels(chosen.sqnr_db),
        f"{us / bf16:.2f}" if us and bf16 else "",
        textwrap.fill(chosen.reason, 40),
    ]
