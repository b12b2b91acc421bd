"""The result of tuning: a policy with a measured reason for every exception, and its audit."""

from __future__ import annotations

import textwrap
from dataclasses import dataclass
from pathlib import Path

from mxcompile.analysis.audit import Audit
from mxcompile.analysis.audit.text import decibels
from mxcompile.analysis.policy_file import annotated
from mxcompile.analysis.tune.bounds import Bounds
from mxcompile.policy import Policy
from mxcompile.report.files import save
from mxcompile.report.forms.tables import drawn, fitted, wrapped


@dataclass(frozen=True, kw_only=True, slots=True)
class Chosen:
    """A layer that has a choice of its own.

    name: its path. use: word of the precision or preset, or of the policy that tuning started from, "bf16"
    for none. kept: its GEMMs in BF16 for all that. sqnr_db: the lowest of its GEMMs, None if none is
    quantized. estimate_us, estimate_bf16_us: of its GEMMs and casts so and in BF16, None without a data sheet
    of the target. reason: why nothing cheaper.
    """

    name: str
    use: str
    kept: tuple[str, ...]
    sqnr_db: float | None
    estimate_us: float | None
    estimate_bf16_us: float | None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuned:
    """The result of `tune`.

    policy: an ordinary one. bounds: what was asked for. chosen: every layer with a choice of its own, in the
    order of the model: all layers of a mix, else those that stay in BF16 in part. comments: for the first
    rules of the policy, why they are there. audit: of the model under `policy`. flop_share_before: share of
    the matmul FLOPs that was quantized at the start; ``audit.report.summary.flop_share`` is what was kept.
    met: whether the audit is within the bounds and quantizes anything, or could and BF16 is estimated to be
    faster. notes: what a reader should know. target: that costs were estimated for, "" if none was.
    """

    policy: Policy
    bounds: Bounds
    chosen: tuple[Chosen, ...] = ()
    comments: tuple[str, ...] = ()
    audit: Audit
    flop_share_before: float
    met: bool
    notes: tuple[str, ...] = ()
    target: str = ""

    def __str__(self) -> str:
        lines = wrapped(self._facts())
        if self.chosen:
            rows = [["layer", "in", "but in BF16", "dB", "of BF16's time", "nothing cheaper because"]]
            rows += map(_row, self.chosen)
            lines += ["", drawn(fitted(rows, ("layer", "in")))]
        return "\n".join(lines)

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
            f"bound: {self.bounds}: {'met' if self.met else 'CANNOT BE MET'}",
            f"reached: {', '.join(reached)}",
            f"kept quantized: {kept:.1%} of matmul FLOPs, {self.flop_share_before:.1%} before",
            *self._estimated(),
            *(f"note: {note}" for note in self.notes),
        ]

    def _estimated(self) -> list[str]:
        """How long the layers of a mix would take, if that is known."""
        if not self.chosen or not self.target:
            return []
        us, bf16 = (
            sum(each or 0.0 for each in times)
            for times in zip(*((c.estimate_us, c.estimate_bf16_us) for c in self.chosen), strict=True)
        )
        return [f"estimated on {self.target}: {us / bf16:.2f} of BF16's time of these layers"]

    def to_yaml(self) -> str:
        """The policy as a file, with the reasons as comments; `Policy.load` reads it back."""
        first, *rest = self._facts()
        return annotated(self.policy, [f"Tuned by measurement; {first}", *rest], self.comments)

    def dump(self, path: str | Path) -> None:
        """Write `to_yaml` to `path`, whole or not at all. Raises `OptionError` if it cannot be written."""
        save(path, self.to_yaml(), "policy")


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
