"""The candidate precisions of a layer, their costs, and the policy of a mix of them.

A candidate is the name of a precision or preset, applied to the three GEMMs of a layer. Its cost is the
estimated time of the layer's GEMMs and casts on a target (see `offline/record_work.py`), 0 if the target has
no data sheet, then the bytes of the operands.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcompile.errors import OptionError, not_allowed
from mxcompile.formats import KEPT, PRECISIONS, Choices, Precision, is_quantized
from mxcompile.offline.record_work import estimate, operand_bytes
from mxcompile.policy import Gemm, Layer, Match, Policy, Rule, Use
from mxcompile.policy.patterns import literal
from mxcompile.policy.presets import PRESETS
from mxcompile.policy.schema import keys_of
from mxcompile.report import GemmRecord, Report

_ALL = tuple(map(str, Gemm))
_NOTHING = Use(fprop=KEPT, dgrad=KEPT, wgrad=KEPT)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A candidate. word: its name. use: its rule, None for the decisions of the start policy."""

    word: str
    use: Use | None

    @classmethod
    def start(cls, policy: Policy) -> Candidate:
        """Returns the candidate for the decisions of `policy`."""
        return cls(word=Path(policy.label).name, use=None)

    @classmethod
    def of(cls, word: str, under: Choices) -> Candidate:
        """Returns the candidate of the precision or preset `word`, independent of the formats `under`.

        under: formats of the preset from which tuning starts. Raises `OptionError` for an unknown word.
        """
        if word in PRESETS and PRESETS[word].gemms:
            preset = PRESETS[word]
            return cls(word=word, use=_use(preset.precision, preset.gemms, preset.formats, under))
        if word in PRECISIONS and PRECISIONS[word].quantizes:
            return cls(word=word, use=_use(PRECISIONS[word], frozenset(Gemm), Choices(), under))
        words = [name for name, row in PRECISIONS.items() if row.quantizes]
        presets = [name for name, preset in PRESETS.items() if preset.gemms]
        raise OptionError(not_allowed("precision or preset", word, [*words, *presets]))


def stated(policy: Policy, layer: Layer, under: Choices) -> Use:
    """Returns the decision of `policy` for `layer` as a rule over a preset with the formats `under`."""
    decision, index = policy.decide(layer), policy.rule_for(layer)
    rows = {str(gemm): PRECISIONS[decision.choice(gemm).precision] for gemm in Gemm}
    quantizing = next((row for row in rows.values() if row.quantizes), None)
    if quantizing is None:
        return _NOTHING
    use = Use() if index is None else policy.rules[index].use
    full = _use(quantizing, frozenset(Gemm), use.over(policy.base.formats), under)
    own = {each.name: getattr(use, each.name) for each in dataclasses.fields(use)}
    return dataclasses.replace(full, **{key: value for key, value in own.items() if value is not None} | rows)


def _use(row: Precision, gemms: frozenset[Gemm], choices: Choices, under: Choices) -> Use:
    """Returns the keys of a preset with `row`, `gemms` and `choices`, with all keys that `under` sets."""
    keys: dict[str, Any] = {str(gemm): row if gemm in gemms else KEPT for gemm in Gemm}
    for key in keys_of(row):
        keys[key] = getattr(choices, key)
        if keys[key] is None and getattr(under, key) is not None:
            keys[key] = getattr(row.defaults, key)
    return Use(**keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A candidate for a layer, by index (-1 for BF16). kept: the GEMMs that stay in BF16."""

    candidate: int
    kept: tuple[str, ...]


BF16 = Option(candidate=-1, kept=_ALL)

Mix = Mapping[str, Option]
"""The option of each layer, by name."""

Cost = tuple[float, float]
"""Estimated time in µs, bytes of the operands."""


class Costs:
    """The costs of options, from the reports of all candidates, which have the same GEMMs."""

    def __init__(self, reports: Sequence[Report], target: str) -> None:
        self._of: dict[tuple[str, int, str], Cost] = {}
        self._quantized: set[tuple[str, int, str]] = set()
        self.estimated = False
        for index, report in enumerate(reports):
            aimed = dataclasses.replace(report.summary, target=target)
            estimated = estimate(dataclasses.replace(report, summary=aimed))
            self.estimated = estimated.summary.estimate_us is not None
            for gemm in estimated.gemms:
                quantized, bf16 = operand_bytes(gemm)
                self._add(gemm, index, gemm.estimate_us, quantized)
                if not index:
                    self._add(gemm, BF16.candidate, gemm.estimate_bf16_us, bf16)

    def _add(self, gemm: GemmRecord, candidate: int, us: float | None, num_bytes: float) -> None:
        key = gemm.name, candidate, gemm.gemm
        before = self._of.get(key, (0.0, 0.0))
        self._of[key] = before[0] + (us or 0.0), before[1] + num_bytes
        if is_quantized(gemm.precision):
            self._quantized.add(key)

    def __call__(self, layer: str, option: Option) -> Cost:
        """Returns the cost of `layer` with `option`."""
        costs = [
            self._of.get((layer, BF16.candidate if gemm in option.kept else option.candidate, gemm), (0, 0))
            for gemm in _ALL
        ]
        return round(sum(us for us, _ in costs), 6), sum(size for _, size in costs)

    def quantized(self, layer: str, candidate: int) -> frozenset[str]:
        """Returns the kinds of GEMMs of `layer` that the candidate quantizes."""
        return frozenset(gemm for gemm in _ALL if (layer, candidate, gemm) in self._quantized)


def by_use(
    start: Policy, layers: Mapping[str, Layer], candidates: Sequence[Candidate], mix: Mix
) -> dict[Use, list[str]]:
    """Returns the layers of each rule that turns `start` into `mix`, in the order of their first layers."""
    names: dict[Use, list[str]] = {}
    for name, option in mix.items():
        use = _NOTHING if option == BF16 else candidates[option.candidate].use
        if use is None and option.kept:
            index = start.rule_for(layers[name])
            use = Use() if index is None else start.rules[index].use
        if use is not None:
            kept: dict[str, Any] = dict.fromkeys(option.kept, KEPT)
            names.setdefault(dataclasses.replace(use, **kept), []).append(name)
    return names


def mixed(
    policy: Policy,
    uses: Mapping[Use, Sequence[str]],
    layers: Mapping[str, Layer],
    label: str = "tuned policy",
) -> Policy:
    """Returns `policy` with a rule for each of `uses` before its own rules, without rules that never fire."""
    rules = tuple(Rule(match=Match(name=tuple(map(literal, names))), use=use) for use, names in uses.items())
    others = [layer for name, layer in layers.items() if not any(name in names for names in uses.values())]
    idle = _deciding(policy, layers.values()) - _deciding(policy, others)
    left = tuple(rule for index, rule in enumerate(policy.rules) if index not in idle)
    return dataclasses.replace(policy, rules=rules + left, label=label)


def _deciding(policy: Policy, layers: Iterable[Layer]) -> set[int | None]:
    return {policy.rule_for(layer) for layer in layers}
