"""The search of a blame: the effect of each layer alone, the effect without it, and the GEMMs to exclude.

    alone     every layer is quantized alone; with more layers than runs, groups of neighbours are, and the
              group with the largest effect is halved repeatedly
    left out  if all layers together have a larger effect than the sum of the parts, each layer or group is
              left out in turn, which shows layers that do harm only together with others
    worst     the fewest of the worst layers whose exclusion removes the requested share of the effect;
              their number is found by bisection (delta debugging over layers)
    GEMMs     fprop, dgrad and wgrad of these layers are quantized alone; GEMMs with little effect stay
              quantized if the policy still removes the requested share

Each step has a limit of runs (see `plan`).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from mxcompile.analysis.blame.blamed import BlamedPart, Findings
from mxcompile.analysis.blame.effects import Effect, exceeds, together
from mxcompile.analysis.blame.plan import RunPlan
from mxcompile.analysis.blame.trials import BlameTrials
from mxcompile.analysis.study.session import Keys
from mxcompile.policy import Gemm
from mxcompile.report.data.fold import spelled

_NOTHING_MORE = 0.02
"""Groups with a smaller share of the whole effect are not halved."""

_SMALL = 1 / 3
"""GEMMs with a smaller share of the effect of the layer's worst GEMM may stay quantized."""

Names = tuple[str, ...]


class _Step:
    """The budget of one step of a search. runs: number of effects that it may still measure."""

    def __init__(self, trials: BlameTrials, effects: int) -> None:
        self._trials = trials
        self.runs = effects

    def allows(self, keys: Keys) -> bool:
        """Whether the effect of `keys` is known or may be measured."""
        return self.runs > 0 or self._trials.knows(keys)

    def effect(self, keys: Keys, description: str) -> Effect:
        """Returns the effect of `keys`."""
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
        alone = self._groups(_Step(self._trials, self._plan.alone), self._alone, self._size)
        parts = [
            BlamedPart(layers=names, gemms=self._kinds(names), alone=effect)
            for names, effect in alone.items()
        ]
        if exceeds(self._whole.on(self._measure), together(self._measure, alone.values())):
            parts = self._with_left_out(parts)
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

    def _groups(
        self, step: _Step, effect: Callable[[_Step, Names], Effect], size: Callable[[Effect], float]
    ) -> dict[Names, Effect]:
        """Returns the effects of all layers, in groups if `step` has too few runs for single layers.

        size: returns the size of an effect, by which the next group to halve is chosen.
        """
        count = len(self._trials.layers) if len(self._trials.layers) <= step.runs else max(1, step.runs // 2)
        effects = {names: effect(step, names) for names in _pieces(self._trials.layers, count)}
        while step.runs >= 2:
            wide = [names for names in effects if len(names) > 1]
            most = max(wide, key=lambda names: size(effects[names]), default=())
            if not most or size(effects[most]) <= _NOTHING_MORE * self._size(self._whole):
                break
            del effects[most]
            effects |= {names: effect(step, names) for names in _pieces(most, 2)}
        return effects

    def _alone(self, step: _Step, names: Names) -> Effect:
        return step.effect(self._of(names), f"{spelled(names)} alone")

    def _rest(self, step: _Step, names: Names) -> Effect:
        return step.effect(self._keys - self._of(names), f"all but {spelled(names)}")

    def _with_left_out(self, parts: Sequence[BlamedPart]) -> list[BlamedPart]:
        """Returns `parts` and further groups, each with the effect of leaving it out."""
        rests = self._groups(_Step(self._trials, self._plan.left_out), self._rest, self._drop)
        by_layers = {part.layers: part for part in parts}
        both = [dataclasses.replace(part, left_out=rests.get(part.layers)) for part in parts]
        more = [
            BlamedPart(layers=names, gemms=self._kinds(names), left_out=effect)
            for names, effect in rests.items()
            if names not in by_layers and len(rests) > 1
        ]
        return both + more

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
        guess = self._guess(parts)
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

    def _guess(self, parts: Sequence[BlamedPart]) -> int:
        """Returns a guess of the number of `parts` to exclude. It assumes that effects add in squares."""
        sizes = [0.0 if part.alone is None else self._size(part.alone) for part in parts]
        whole = math.hypot(*filter(math.isfinite, sizes))
        rests = (math.hypot(*sizes[number:]) for number in range(1, len(parts)))
        return next(
            (number for number, rest in enumerate(rests, 1) if rest <= self._tolerated * whole), len(parts)
        )

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
