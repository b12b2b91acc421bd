"""Finds the layers of a model that each rule of a policy matches, decides for, or nearly matches."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from mxcompile.policy import ATTENTION_PRODUCTS, Decision, Gemm, Layer, Limit, Policy, Rule

NEAR = 0.9
"""Least ratio of a size to its lower limit, or of an upper limit to the size, for a near miss."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RuleFit:
    """One rule and the layers that it concerns, in model order.

    number: number of the rule, from 1. decides: layers that the rule decides for. taken: matching layers that
    an earlier rule decides for, or that the rule decides for in other training steps. missed: layers that
    only a size limit excludes. near: layers of `missed` just outside the limit, without another deciding
    rule, for which the preset decides differently.
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
    """Returns a `RuleFit` for each rule of `policy`.

    Attention products match only rules that name their role.
    """
    deciding = [deciding_rule(policy, layer) for layer in layers]
    results = []
    for index, written in enumerate(policy.rules):
        rule = in_force(written)
        pairs = zip(layers, deciding, strict=True)
        about = [(layer, by) for layer, by in pairs if _matches_but_size(rule, layer)]
        missed = [(layer, by) for layer, by in about if rule.match.missed(layer) is not None]
        undecided = (layer for layer, by in missed if by is None)
        results.append(
            RuleFit(
                number=index + 1,
                rule=written,
                decides=tuple(layer for layer, by in about if by == index),
                taken=tuple(layer for layer, by in about if by != index and rule.match.missed(layer) is None),
                missed=tuple(layer for layer, _ in missed),
                near=tuple(layer for layer in undecided if _narrowly_misses(policy, rule, layer)),
            )
        )
    return tuple(results)


def in_force(rule: Rule) -> Rule:
    """Returns `rule` as it is in the first of its training steps, so that it can match layers."""
    steps = rule.match.steps
    return rule if steps is None else dataclasses.replace(rule, match=rule.match.at(steps.start))


def deciding_rule(policy: Policy, layer: Layer) -> int | None:
    """Returns the index of the rule that decides for `layer`, or None if the preset decides."""
    fitting = ((i, rule.match) for i, rule in enumerate(policy.rules) if _matches_but_size(rule, layer))
    return next((i for i, match in fitting if match.missed(layer) is None), None)


def _matches_but_size(rule: Rule, layer: Layer) -> bool:
    addressed = layer.role not in ATTENTION_PRODUCTS or layer.role in rule.match.role
    return addressed and rule.match.fits(layer)


def _narrowly_misses(policy: Policy, rule: Rule, layer: Layer) -> bool:
    """Whether `layer` narrowly misses the size limits of `rule`, which would change its decision."""
    if any(_size_ratio(limit) < NEAR for limit in rule.match.limits(layer)):
        return False
    open_rule = dataclasses.replace(rule, match=rule.match.of_any_size())
    with_rule = dataclasses.replace(policy, rules=(open_rule,)).decide(layer)
    return _numerics_of(with_rule) != _numerics_of(policy.decide(layer))


def _size_ratio(limit: Limit) -> float:
    """Returns the ratio of a size to its limit, at least 1 if the size satisfies the limit."""
    if limit.size is None:
        return 0.0 if limit.upper else 1.0
    return limit.limit / max(limit.size, 1) if limit.upper else limit.size / limit.limit


def _numerics_of(decision: Decision) -> tuple[object, ...]:
    """Returns the numerical content of `decision`: everything but the reasons."""
    choices = [decision.choice(gemm) for gemm in Gemm]
    return (
        *((choice.precision, choice.formats) for choice in choices),
        decision.saved,
        decision.sent,
        decision.backward,
    )
