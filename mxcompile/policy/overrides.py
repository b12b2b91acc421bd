"""A policy with GEMMs of single layers put back into their own dtype: what a watch does while a run goes on.

rules of the policy   →   a rule for each layer, which says of its other GEMMs what the policy says
                          the rules of the policy, but those that could no longer fire
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mxcompile.formats import KEPT
from mxcompile.policy.model import Gemm, Layer, Match, Rule, Use
from mxcompile.policy.patterns import literal
from mxcompile.policy.policy import Policy
from mxcompile.policy.shadow import Shadows


def keeping(policy: Policy, kept: Mapping[Layer, Mapping[Gemm, str]], label: str) -> Policy:
    """`policy`, with GEMMs of layers not quantized.

    kept: why, by layer and GEMM. label: of the result. The result is written and read back as any policy.
    """
    shadows = Shadows()
    rules = [_rule(policy, layer, why) for layer, why in kept.items()]
    for rule in rules:
        shadows.add(rule.match)
    rules += (rule for rule in policy.rules if not shadows.add(rule.match))
    return replace(policy, rules=tuple(rules), label=label)


def _rule(policy: Policy, layer: Layer, why: Mapping[Gemm, str]) -> Rule:
    index = policy.rule_for(layer)
    use = Use() if index is None else policy.rules[index].use
    if set(why) == set(Gemm):
        use = Use()
    own: dict[str, Any] = {gemm.value: KEPT for gemm in why}
    use = replace(use, **own)
    return Rule(match=Match(name=(literal(layer.name),)), use=use, kept=tuple(why.items()))
