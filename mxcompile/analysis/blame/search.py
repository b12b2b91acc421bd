"""The search of a blame: the effect of each layer alone, the effect without it, and the GEMMs to exclude.

    alone     every layer is quantized alone; with more layers than runs, groups of neighbours are, and the
              group with the largest effect is halved repeatedly
    left out  if all layers together have a larger effect than the sum of the parts, each layer or group is
              left out in turn, which shows layers that do harm only together with others
    worst     the fewest of the worst layers whose exclusion removes the requested share of the effect;
              their number is found by bisection (delta debugging over layers)
    GEMMs     fprop, dgrad and wgrad of these layers are quantized alone; GEMMs with little effect stay
              quantized if the policy still removes the requested share

Each step has a limit of runs (see `RunPlan`). The total is fixed once the number of differing layers is
known, and never exceeded.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from mxcompile.analysis.blame.blamed import BlamedPart, Effect, Findings, exceeds, together
from mxcompile.analysis.blame.trials import BlameTrials
from mxcompile.analysis.study.session import Keys
from mxcompile.errors import OptionError, shown
from mxcompile.policy import Gemm, Policy
from mxcompile.report.data.fold import spelled
from mxcompile.report.forms.words import count

_NOTHING_MORE = 0.02
"""Groups with a smaller share of the whole effect are not halved."""

_SMALL = 1 / 3
"""GEMMs with a smaller share of the effect of the layer's worst GEMM may stay quantized."""

Names = tuple[str, ...]

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


class _Step:
    """The budget of one step of a search. runs: number of effects that it may still measure."""

    def __init__(self, trials: BlameTrials, effects: int) -> None:
        self._trials = trials
        self.runs = effects

    def allows(self, keys: Keys) -> bool:
        """Whether the effect of `keys` is known or may be measured."""
        return self.runs > 0 or self._trials.knows(keys)

    def effect(self, keys: Keys, description: str) -> Effect:
        self.runs -= not self._trials.knows(keys)
        return self._trials.effect(keys, description)


class Search:
    """A search for the GEMMs that cause the share `remove` of the effect on `measure`."""

    def __init__(self, trials: BlameTrials, plan: RunPlan, measure: str, remove: float) -> None:
        self._trials, self._plan, self._measure = trials, plan, measure
        self._keys = frozenset(trials.keys)
        self._whole = trials.effect(self._keys, "all together")
        self._tolerated = 1 - remove

    def findings(self) -> Findings:
        """Returns the result of the search."""
        if self._size(self._whole) == 0:
            return Findings(whole=self._whole, left=self._trials.self_effect)
        alone = self._groups(self._plan.alone, is_left_out=False)
        parts = [
            BlamedPart(layers=names, gemms=self._kinds(names), alone=effect)
            for names, effect in alone.items()
        ]
        if exceeds(self._whole.on(self._measure), together(self._measure, alone.values())):
            rests = self._groups(self._plan.left_out, is_left_out=True)
            parts = [dataclasses.replace(part, left_out=rests.get(part.layers)) for part in parts]
            parts += [
                BlamedPart(layers=names, gemms=self._kinds(names), left_out=effect)
                for names, effect in rests.items()
                if names not in alone and len(rests) > 1
            ]
        parts.sort(key=self._harm, reverse=True)
        worst, remaining = self._worst(parts)
        kinds = tuple(self._single(self._trials.layers, _Step(self._trials, self._plan.kinds)))
        step = _Step(self._trials, self._plan.gemms - 1)
        of_worst = (part for part in parts if self._of(part.layers) <= worst)
        gemms = tuple(gemm for part in of_worst for gemm in self._single(part.layers, step))
        worst, remaining = self._narrowed(worst, remaining, gemms)
        ordered = tuple(key for key in self._trials.keys if key in worst)
        return Findings(
            whole=self._whole, kinds=kinds, parts=tuple(parts), gemms=gemms, worst=ordered, left=remaining
        )

    def _size(self, effect: Effect) -> float:
        return effect.on(self._measure).size

    def _is_enough(self, remaining: Effect) -> bool:
        """Whether the effect `remaining` is within the bound, or finite where the whole effect is not."""
        whole, size = self._size(self._whole), self._size(remaining)
        return math.isfinite(size) and (math.isinf(whole) or size <= self._tolerated * whole)

    def _of(self, names: Iterable[str]) -> Keys:
        """Returns the differing GEMMs of the layers `names`."""
        chosen = set(names)
        return frozenset(key for key in self._keys if key[0] in chosen)

    def _kinds(self, names: Iterable[str]) -> tuple[str, ...]:
        kinds = {gemm for _, gemm in self._of(names)}
        return tuple(str(gemm) for gemm in Gemm if gemm in kinds)

    def _groups(self, effects: int, *, is_left_out: bool) -> dict[Names, Effect]:
        """Returns the effect of each layer alone or left out, or of groups if `effects` is too small."""
        step, size = _Step(self._trials, effects), self._drop if is_left_out else self._size

        def effect(names: Names) -> Effect:
            if is_left_out:
                return step.effect(self._keys - self._of(names), f"all but {spelled(names)}")
            return step.effect(self._of(names), f"{spelled(names)} alone")

        layers = self._trials.layers
        number = len(layers) if len(layers) <= step.runs else max(1, step.runs // 2)
        by_group = {names: effect(names) for names in _pieces(layers, number)}
        while step.runs >= 2:
            wide = [names for names in by_group if len(names) > 1]
            most = max(wide, key=lambda names: size(by_group[names]), default=())
            if not most or size(by_group[most]) <= _NOTHING_MORE * self._size(self._whole):
                break
            del by_group[most]
            by_group |= {names: effect(names) for names in _pieces(most, 2)}
        return by_group

    def _drop(self, effect: Effect) -> float:
        """Returns by how much the whole exceeds `effect`, the effect without a group."""
        whole, rest = self._size(self._whole), self._size(effect)
        return 0.0 if whole == rest else whole - rest

    def _harm(self, part: BlamedPart) -> float:
        """Returns the larger of the effect of `part` alone and the decrease of the effect without it."""
        alone = 0.0 if part.alone is None else self._size(part.alone)
        return max(alone, 0.0 if part.left_out is None else self._drop(part.left_out))

    def _worst(self, parts: Sequence[BlamedPart]) -> tuple[Keys, Effect]:
        """Returns the GEMMs of the fewest worst `parts` to exclude, and the effect of the other parts.

        The remaining effect is within the target. Excluding all parts always suffices.
        """
        step = _Step(self._trials, self._plan.worst)
        fails, does, result = 0, len(parts), (self._keys, self._trials.self_effect)
        # the first guess assumes that effects add in squares
        sizes = [0.0 if part.alone is None else self._size(part.alone) for part in parts]
        bound = self._tolerated * math.hypot(*filter(math.isfinite, sizes))
        few = (number for number in range(1, len(parts)) if math.hypot(*sizes[number:]) <= bound)
        guess = next(few, len(parts))
        while does - fails > 1:
            number = guess if fails < guess < does else (fails + does) // 2
            first = self._of(name for part in parts[:number] for name in part.layers)
            rest = self._keys - first
            if not step.allows(rest):
                break
            remaining = step.effect(rest, f"without the worst {number}")
            if self._is_enough(remaining):
                does, result, guess = number, (first, remaining), number - 1
            else:
                fails, guess = number, number + 1
        return result

    def _single(self, names: Names, step: _Step) -> Iterator[BlamedPart]:
        """Yields each kind of GEMM of the layers `names` alone, if they have several and `step` allows it."""
        kinds = {
            gemm: frozenset(key for key in self._of(names) if key[1] == gemm) for gemm in self._kinds(names)
        }
        new = sum(not self._trials.knows(keys) for keys in kinds.values())
        if len(kinds) < 2 or not self._trials.switched or step.runs < new:
            return
        for gemm, keys in kinds.items():
            effect = step.effect(keys, f"{gemm} of {spelled(names)} alone")
            yield BlamedPart(layers=names, gemms=(gemm,), alone=effect)

    def _narrowed(self, worst: Keys, remaining: Effect, gemms: Sequence[BlamedPart]) -> tuple[Keys, Effect]:
        """Returns `worst` without GEMMs of little effect if the others suffice, and the remaining effect."""
        small: set[tuple[str, str]] = set()
        most: dict[Names, float] = {}
        for part in gemms:
            most[part.layers] = max(most.get(part.layers, 0.0), self._harm(part))
        for part in gemms:
            if self._harm(part) < _SMALL * most[part.layers]:
                small |= {key for key in worst if key[0] in part.layers and key[1] in part.gemms}
        if not small:
            return worst, remaining
        fewer = worst - small
        rest = _Step(self._trials, 1).effect(self._keys - fewer, "without the worst GEMMs")
        return (fewer, rest) if self._is_enough(rest) else (worst, remaining)


def _pieces(names: Names, number: int) -> Iterator[Names]:
    """Yields `number` runs of neighbouring `names` whose lengths differ by at most 1."""
    for index in range(number):
        piece = names[len(names) * index // number : len(names) * (index + 1) // number]
        if piece:
            yield piece
