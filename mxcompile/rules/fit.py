"""How every rule of a policy falls on the layers of a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mxcompile.policy import ATTENTION_PRODUCTS, Decision, Gemm, Layer, Limit, Policy, Rule

NEAR = 0.9
"""A size of at least this part of a limit is just under it; so is a limit of a size that is over it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleFit:
    """One rule and the layers it is about, in their order.

    number: of the rule, from 1. decides: layers it decides for. taken: layers it matches, but earlier rules
    decide for. missed: layers it would match but for a size limit. near: those of `missed` that are just
    outside the limit and for which no rule decides, so that the preset does something else.
    """

    number: int
    rule: Rule
    decides: tuple[Layer, ...]
    taken: tuple[Layer, ...]
    missed: tuple[Layer, ...]
    near: tuple[Layer, ...]

    @property
    def unused(self) -> bool:
        """Whether the rule matches no layer."""
        return not self.decides and not self.taken


def fits(policy: Policy, layers: Sequence[Layer]) -> tuple[RuleFit, ...]:
    """How the rules of `policy` fall on `layers`. Attention products count only for rules with their role."""
    deciding = [deciding_rule(policy, layer) for layer in layers]
    results = []
    for index, rule in enumerate(policy.rules):
        about = [(layer, by) for layer, by in zip(layers, deciding, strict=True) if _about(rule, layer)]
        missed = [(layer, by) for layer, by in about if rule.match.missed(layer) is not None]
        results.append(
            RuleFit(
                number=index + 1,
                rule=rule,
                decides=tuple(layer for layer, by in about if by == index),
                taken=tuple(layer for layer, by in about if by != index and rule.match.missed(layer) is None),
                missed=tuple(layer for layer, _ in missed),
                near=tuple(
                    layer for layer, by in missed if by is None and _just_outside(policy, rule, layer)
                ),
            )
        )
    return tuple(results)


def deciding_rule(policy: Policy, layer: Layer) -> int | None:
    """Index of the rule of `policy` that decides for `layer`, or None for the preset."""
    if layer.role not in ATTENTION_PRODUCTS:
        return policy.rule_for(layer)
    fitting = (i for i, rule in enumerate(policy.rules) if _about(rule, layer))
    return next((i for i in fitting if policy.rules[i].match.missed(layer) is None), None)


def _about(rule: Rule, layer: Layer) -> bool:
    """Whether `rule` matches `layer` but for its size."""
    addressed = layer.role not in ATTENTION_PRODUCTS or layer.role in rule.match.role
    return addressed and rule.match.fits(layer)


def _just_outside(policy: Policy, rule: Rule, layer: Layer) -> bool:
    """Whether `layer` nearly keeps the limits of `rule`, and without them would be decided otherwise."""
    if any(_part(limit) < NEAR for limit in rule.match.limits(layer)):
        return False
    open_rule = dataclasses.replace(rule, match=rule.match.of_any_size())
    with_rule = dataclasses.replace(policy, rules=(open_rule,)).decide(layer)
    return _outcome(with_rule) != _outcome(policy.decide(layer))


def _part(limit: Limit) -> float:
    """How near a size is to the limit it does not keep; 1 and more if it keeps it."""
    if limit.size is None:
        return 0.0 if limit.upper else 1.0
    return limit.limit / max(limit.size, 1) if limit.upper else limit.size / limit.limit


def _outcome(decision: Decision) -> tuple[object, ...]:
    """Returns the part of `decision` that changes the result of a layer: everything but the reasons."""
    choices = [decision.choice(gemm) for gemm in Gemm]
    return *((choice.precision, choice.formats) for choice in choices), decision.saved, decision.sent
