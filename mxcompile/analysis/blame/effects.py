"""The distance of a run from a reference, as one number each for the gradients, the loss and the main output.

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
from mxcompile.analysis.study.session import Outcome
from mxcompile.report import GemmRecord

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
