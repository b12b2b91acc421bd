"""The result of a blame: layers with their effects, and a policy that excludes the worst of them.

An effect is the distance of a run from a reference: a number each for gradients, loss and main output.

    gradients  √(Σ FLOPs · rel_error² / Σ FLOPs)   over the parameters, weighted by the FLOPs of their wgrad
    loss       loss / reference − 1                signed
    output     √(Σ (y − y₀)² / Σ y₀²)

Independent errors add in squares, so effects on gradients or output sum to √(Σ effect²). Effects on the loss
have signs and add linearly. rel_error is defined in `mxcompile.report.data.numerics`.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from mxcompile.analysis.audit.collect import compared, loss_gap, parameters
from mxcompile.analysis.audit.text import percent
from mxcompile.analysis.study.policy_file import MeasuredPolicy
from mxcompile.analysis.study.session import Outcome
from mxcompile.report import GemmRecord
from mxcompile.report.data.fold import grouped, spelled
from mxcompile.report.forms.tables import Table
from mxcompile.report.forms.words import count

MEASURES = ("gradients", "loss", "output")
"""Quantities whose change is measured."""

_BEYOND = 1.5
"""Ratio of the whole to the sum of its parts from which effects count as not additive."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Spread:
    """A mean over repeats (inf if not finite) and its standard error (None without repeats)."""

    mean: float
    error: float | None = None

    @classmethod
    def from_values(cls, values: Sequence[float]) -> Spread:
        """Returns the spread of `values`, one per repeat."""
        if not all(map(math.isfinite, values)):
            return cls(mean=math.inf)
        error = statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else None
        return cls(mean=statistics.fmean(values), error=error)

    @property
    def size(self) -> float:
        """Absolute value of the mean."""
        return abs(self.mean)

    def __str__(self) -> str:
        if math.isinf(self.mean):
            return "not finite"
        sign = "-" if self.mean < 0 else ""
        return f"{sign}{percent(self.size)}" + ("" if self.error is None else f" ± {percent(self.error)}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Effect:
    """The effect of quantizing some GEMMs, by measure (see the module); None if the model lacks it."""

    gradients: Spread | None = None
    loss: Spread | None = None
    output: Spread | None = None

    def on(self, measure: str) -> Spread:
        """Returns the effect on `measure`, which must not be None."""
        spread: Spread | None = getattr(self, measure)
        assert spread is not None
        return spread


def effect_of(gemms: Sequence[GemmRecord], pairs: Iterable[tuple[Outcome, Outcome]]) -> Effect:
    """Returns the effect from (reference, outcome) `pairs`, one per repeat. gemms: records of the report."""
    values = [_distances(gemms, reference, outcome) for reference, outcome in pairs]
    present = [measure for measure in MEASURES if all(measure in value for value in values)]
    return Effect(**{name: Spread.from_values([value[name] for value in values]) for name in present})


def _distances(gemms: Sequence[GemmRecord], reference: Outcome, outcome: Outcome) -> Mapping[str, float]:
    distances: dict[str, float] = {}
    errors = list(parameters(gemms, reference, outcome))
    errors = [error for error in errors if error.flops] or errors
    if errors:
        harm, flops = sum(error.harm for error in errors), sum(max(error.flops, 1) for error in errors)
        distances["gradients"] = math.sqrt(harm / flops)
    if (gap := loss_gap(outcome.loss, reference.loss)) is not None:
        distances["loss"] = gap if math.isfinite(reference.loss or 0.0) else math.nan
    if (sums := compared(reference.logits, outcome.logits)) is not None:
        distances["output"] = sums.rel_error
    return distances


def together(measure: str, effects: Iterable[Effect]) -> float:
    """Returns the sum of `effects` on `measure`, assuming that they are independent."""
    spreads = [effect.on(measure) for effect in effects]
    if measure == "loss":
        return abs(sum(spread.mean for spread in spreads))
    return math.sqrt(sum(spread.mean**2 for spread in spreads))


def exceeds(whole: Spread, parts: float) -> bool:
    """Whether `whole` is larger than the sum `parts`, beyond the standard error."""
    return whole.size - 2 * (whole.error or 0.0) > _BEYOND * parts


def falls_short(whole: Spread, parts: float) -> bool:
    """Whether `whole` is smaller than the sum `parts`, beyond the standard error."""
    return _BEYOND * (whole.size + 2 * (whole.error or 0.0)) < parts


@dataclass(frozen=True, kw_only=True, slots=True)
class BlamedPart:
    """A layer or a group of neighbouring layers, and the GEMMs that were quantized or left out together.

    layers: paths. gemms: "fprop", "dgrad", "wgrad". alone: effect if only these are quantized. left_out:
    effect if all others are quantized. An effect is None if it was not measured.
    """

    layers: tuple[str, ...]
    gemms: tuple[str, ...]
    alone: Effect | None = None
    left_out: Effect | None = None


@dataclass(frozen=True, kw_only=True)
class Findings:
    """The result of a search.

    whole: effect of all differing GEMMs. kinds: all GEMMs of one kind. parts: layers or groups, the worst
    first; together they are all layers that differ. gemms: single GEMMs of the worst parts. worst: (layer,
    GEMM) pairs to exclude. left: effect of all other GEMMs.
    """

    whole: Effect
    left: Effect
    parts: tuple[BlamedPart, ...] = ()
    kinds: tuple[BlamedPart, ...] = ()
    gemms: tuple[BlamedPart, ...] = ()
    worst: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True, kw_only=True)
class Blamed(MeasuredPolicy, Findings):
    """The result of `blame`. Its policy is the examined policy, with `worst` as in the reference.

    `asked`, against: names of the examined and the reference policy. measure: measure of the search. remove:
    requested share of the effect to remove.

    num_layers, num_gemms: numbers of differing layers and GEMMs. runs: runs of the model. max_runs: announced
    limit. repeats: repeats of each effect. flop_share_before, flop_share: quantized share of the matmul FLOPs
    under the examined policy and under `policy`.
    """

    asked: str
    against: str
    measure: str
    remove: float
    num_layers: int
    num_gemms: int
    runs: int
    max_runs: int
    repeats: int
    flop_share_before: float
    flop_share: float

    def _facts(self) -> list[str]:
        repeated = f" of {count(self.repeats, 'repeat')} each" if self.repeats > 1 else ""
        facts = [
            f"blame: effect of {self.asked} against {self.against} on the {self.measure}:"
            f" {count(self.num_layers, 'layer')}, {count(self.num_gemms, 'GEMM')};"
            f" {count(self.runs, 'run')} of the model, at most {self.max_runs} planned{repeated}"
        ]
        if not self.parts:
            return facts
        words = [f"{name} {spread}" for name in MEASURES if (spread := getattr(self.whole, name)) is not None]
        facts.append(f"all together: {', '.join(words)}")
        whole, alone = self.whole.on(self.measure), [part.alone for part in self.parts if part.alone]
        if len(self.parts) > 1 and alone:
            parts = together(self.measure, alone)
            how = "with their signs" if self.measure == "loss" else "as independent errors, in squares"
            facts.append(f"one by one, added up {how}: {Spread(mean=parts)}")
            start = "THE SUM OF THE PARTS IS NOT THE WHOLE: together they do"
            sizes = f"{Spread(mean=whole.size)} instead of {Spread(mean=parts)}"
            if exceeds(whole, parts):
                facts.append(f"{start} more, {sizes}; the column 'without' shows the rest without a layer")
            elif falls_short(whole, parts):
                facts.append(f"{start} less, {sizes}: effects of some layers cancel or hide others")
        names = list(dict.fromkeys(name for name, _ in self.worst))
        excluded = f"{count(len(self.worst), 'GEMM')} of {count(len(names), 'layer')} as in {self.against}"
        facts.append(
            f"the policy: {excluded} leave {self.left.on(self.measure)} of {whole}, and"
            f" {self.flop_share:.1%} of the matmul FLOPs quantized, {self.flop_share_before:.1%} before"
        )
        if self.num_layers > 3 and 2 * len(names) > self.num_layers:
            facts.append(
                f"the difference is spread over many layers: {len(names)} of {self.num_layers} must change to"
                f" remove {self.remove:.0%} of it"
            )
        if self.repeats > 1:
            facts.append(
                f"± is the standard error of the mean of {self.repeats} repeats; each repeat and its"
                " reference draw the same new random numbers"
            )
        return facts

    def _table(self) -> Table:
        """Returns headers, then rows for all GEMMs, each kind of GEMM, and the parts with their GEMMs."""
        measures = [self.measure, *(measure for measure in MEASURES if measure != self.measure)]
        measures = [measure for measure in measures if getattr(self.whole, measure) is not None]
        left_out = any(part.left_out for part in self.parts)
        everything = BlamedPart(layers=(), gemms=("all",), alone=self.whole)
        of_layers = grouped(self.gemms, lambda part: part.layers)
        rows = [("(all)", everything), *(("(all)", kind) for kind in self.kinds)]
        for part in self.parts:
            name = spelled(part.layers) or "(root)"
            rows += [(name, row) for row in (part, *of_layers.get(part.layers, ()))]
        headers = ["layer", "GEMMs", "of all", *measures, *(["without"] if left_out else [])]
        table = [headers]
        for name, part in rows if self.parts else []:
            whole = self.whole.on(self.measure).size
            size = None if part.alone is None else part.alone.on(self.measure).size
            share = "" if size is None or whole in (0.0, float("inf")) else f"{size / whole:.0%}"
            cells = ["" if part.alone is None else str(part.alone.on(measure)) for measure in measures]
            if left_out:
                cells.append("" if part.left_out is None else str(part.left_out.on(self.measure)))
            table.append([name, ", ".join(part.gemms), share, *cells])
        return table
