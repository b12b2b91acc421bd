"""The number of runs of a blame, fixed once the number of differing layers is known and never exceeded."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mxcompile.errors import OptionError, shown
from mxcompile.policy import Policy
from mxcompile.report.forms.words import count

LEAST = 8
"""Least number of effects for a useful result: the reference, all GEMMs together, and a few parts."""

REPEATS = 3
"""Repeats of a model that draws random numbers."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """The number of effects that each step may measure. An effect takes a run per repeat.

    alone: layers, or groups, quantized alone. left_out: layers or groups left out. worst: effects without the
    worst layers. kinds: kinds of GEMMs quantized alone. gemms: single GEMMs of the worst layers, and the
    effect without the worst GEMMs. more: runs of the reference in addition to its repeats.
    """

    repeats: int
    alone: int
    left_out: int
    worst: int
    kinds: int
    gemms: int
    more: int = 0

    @classmethod
    def from_counts(cls, layers: int, gemms: int, *, repeats: int, max_runs: int, more: int) -> RunPlan:
        """Returns the plan for `layers` differing layers with `gemms` separately searched kinds of GEMMs.

        max_runs: limit, at least `LEAST` per repeat. more: runs of the reference in addition to its repeats.
        """
        remaining = (max_runs - more) // repeats - 2
        kinds = gemms if gemms > 1 and remaining >= 4 * gemms else 0
        singles = min(10 if layers > 1 else 1, remaining // 4) if gemms > 1 else 0
        worst = min(2 * math.ceil(math.log2(layers + 1)) + 1, max(1, remaining // 4))
        remaining -= kinds + singles + worst
        alone = layers if layers <= remaining else remaining * 3 // 4
        return cls(
            repeats=repeats,
            alone=alone,
            left_out=min(layers, remaining - alone),
            worst=worst,
            kinds=kinds,
            gemms=singles,
            more=more,
        )

    @property
    def runs(self) -> int:
        """Largest number of runs of all steps, including the reference and everything quantized."""
        parts = self.alone + self.left_out + self.worst + self.kinds + self.gemms
        return self.repeats * (2 + parts) + self.more

    def __str__(self) -> str:
        repeated = f", each {self.repeats} times" if self.repeats > 1 else ""
        return (
            f"at most {count(self.runs, 'run')} of the model: the reference and all together,"
            f" {self.alone} of layers alone, {self.left_out} of layers left out, {self.kinds + self.gemms} of"
            f" GEMMs alone, {self.worst} without the worst{repeated}"
        )


def check(max_runs: object, repeats: object, remove: object) -> None:
    """Raises `OptionError` for an invalid number of runs or repeats, or an invalid share."""
    if not _is_whole(repeats, 1) and repeats is not None:
        raise OptionError(f"`repeats` must be a whole number of at least 1, found {shown(repeats)}")
    least = LEAST * (repeats if isinstance(repeats, int) else 1)
    if not _is_whole(max_runs, least):
        purpose = f" for {repeats} repeats" if repeats is not None else ""
        raise OptionError(
            f"`max_runs` must be a whole number of at least {least}{purpose}, found {shown(max_runs)}"
        )
    if isinstance(remove, bool) or not isinstance(remove, int | float) or not 0 < remove <= 1:
        raise OptionError(f"`remove` must be a share above 0 and at most 1, found {shown(remove)}")


def check_different(policy: Policy, against: Policy) -> None:
    """Raises `OptionError` if the two policies are equal."""
    if policy == against:
        raise OptionError(f"both policies are {policy.label}: name another policy with `policy` or `against`")


def _is_whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
