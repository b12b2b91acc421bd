"""Mixes: every layer of a model follows one of several candidates, and some of its GEMMs stay in BF16."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcompile.errors import OptionError, not_allowed
from mxcompile.formats import PRECISIONS, UNQUANTIZED, Choices, Precision
from mxcompile.policy import Gemm, Layer, Match, Policy, Rule, Use
from mxcompile.policy.patterns import literal
from mxcompile.policy.presets import PRESETS
from mxcompile.policy.schema import USE, keys_of

GEMMS = tuple(map(str, Gemm))
_NOTHING = Use(fprop=UNQUANTIZED, dgrad=UNQUANTIZED, wgrad=UNQUANTIZED)


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """The source of a layer's decisions in a mix: a rule, a policy, or the start policy.

    word: name of the candidate. use: rule for all layers, or None. policy: policy, or None. If both are None,
    the decisions are the start policy's.
    """

    word: str
    use: Use | None = None
    policy: Policy | None = None

    @classmethod
    def start(cls, policy: Policy) -> Candidate:
        """Returns the candidate that keeps the decisions of the start policy, `policy`."""
        return cls(word=Path(policy.label).name)

    @classmethod
    def parse(cls, word: str, under: Choices) -> Candidate:
        """Returns the candidate of the precision or preset `word`, independent of the formats `under`.

        under: formats of the preset of the start policy. Raises `OptionError` for an unknown word.
        """
        if word in PRESETS and PRESETS[word].gemms:
            preset = PRESETS[word]
            return cls(word=word, use=_use(preset.precision, preset.gemms, preset.formats, under))
        if word in PRECISIONS and PRECISIONS[word].quantizes:
            return cls(word=word, use=_use(PRECISIONS[word], frozenset(Gemm), Choices(), under))
        words = [name for name, row in PRECISIONS.items() if row.quantizes]
        presets = [name for name, preset in PRESETS.items() if preset.gemms]
        raise OptionError(not_allowed("precision or preset", word, [*words, *presets]))

    def rule(self, start: Policy, layer: Layer) -> Use | None:
        """Returns the rule for `layer`, to precede the rules of `start`; None if `start` decides."""
        return self.use if self.policy is None else _stated(self.policy, layer, start.base.formats)


def _stated(policy: Policy, layer: Layer, under: Choices) -> Use:
    """Returns the decision of `policy` for `layer` as a rule. under: formats that its preset sets."""
    decision, index = policy.decide(layer), policy.rule_for(layer)
    rows = {str(gemm): PRECISIONS[decision.choice(gemm).precision] for gemm in Gemm}
    quantizing = next((row for row in rows.values() if row.quantizes), None)
    if quantizing is None:
        return _NOTHING
    use = Use() if index is None else policy.rules[index].use
    full = _use(quantizing, frozenset(Gemm), use.over(policy.base.formats), under)
    values = {key.name: getattr(use, key.name) for key in dataclasses.fields(use)}
    return dataclasses.replace(full, **{name: v for name, v in values.items() if v is not None} | rows)


def _use(row: Precision, gemms: frozenset[Gemm], choices: Choices, under: Choices) -> Use:
    """Returns a rule that quantizes `gemms` in the precision `row` with `choices`, whatever `under` sets."""
    keys: dict[str, Any] = {str(gemm): row if gemm in gemms else UNQUANTIZED for gemm in Gemm}
    for key in keys_of(row):
        keys[key] = getattr(choices, key)
        needed, word = USE[key].needs or (key, None)
        if keys[key] is None and getattr(choices, needed) == word and getattr(under, key) is not None:
            keys[key] = getattr(row.defaults, key)
    return Use(**keys)


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """A candidate for a layer, by index (-1 for BF16). kept: the GEMMs that stay in BF16."""

    candidate: int
    kept: tuple[str, ...] = ()


BF16 = Option(candidate=-1, kept=GEMMS)

Mix = Mapping[str, Option]
"""Options of layers, by name; all other layers follow the start policy."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mixes:
    """The policies of mixes.

    start: the start policy. layers: layers that may have options, by name. candidates: candidates of the
    options. label: name of the policies.
    """

    start: Policy
    layers: Mapping[str, Layer]
    candidates: Sequence[Candidate]
    label: str

    def uses(self, mix: Mix) -> dict[Use, list[str]]:
        """Returns the layers of each rule that turns the start policy into `mix`, in the order of `mix`."""
        names: dict[Use, list[str]] = {}
        for name, option in mix.items():
            layer = self.layers[name]
            use = _NOTHING if option == BF16 else self.candidates[option.candidate].rule(self.start, layer)
            if use is None and option.kept:
                index = self.start.rule_for(layer)
                use = Use() if index is None else self.start.rules[index].use
            if use is not None:
                kept: dict[str, Any] = dict.fromkeys(option.kept, UNQUANTIZED)
                names.setdefault(dataclasses.replace(use, **kept), []).append(name)
        return names

    def policy(self, mix: Mix) -> Policy:
        """Returns the policy of `mix`: its rules, then the start policy's except rules that never fire."""
        uses, start = self.uses(mix), self.start
        rules = tuple(Rule(match=Match(name=tuple(map(literal, uses[use]))), use=use) for use in uses)
        changed = {name for names in uses.values() for name in names}
        others = (layer for name, layer in self.layers.items() if name not in changed)
        idle = _deciding(start, self.layers.values()) - _deciding(start, others)
        start_rules = tuple(rule for index, rule in enumerate(start.rules) if index not in idle)
        return dataclasses.replace(start, rules=rules + start_rules, label=self.label)


def _deciding(policy: Policy, layers: Iterable[Layer]) -> set[int | None]:
    return {policy.rule_for(layer) for layer in layers}
