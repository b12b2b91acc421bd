"""Policies with single GEMMs moved back to the model's dtype, as a watch does during a run.

The new policy has a rule per affected layer, whose other GEMMs keep their decision. The rules of the policy
follow, without rules that can no longer fire.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from mxcompile.formats import UNQUANTIZED
from mxcompile.policy.model import Gemm, Layer, Match, Rule, Use
from mxcompile.policy.patterns import literal
from mxcompile.policy.policy import Policy
from mxcompile.policy.shadow import Shadows


def keeping(policy: Policy, kept: Mapping[Layer, Mapping[Gemm, str]], label: str) -> Policy:
    """Returns `policy` with some GEMMs not quantized.

    kept: reasons by layer and GEMM. label: name of the result, which can be saved and loaded like any policy.
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
    by_gemm: dict[str, Any] = {gemm.value: UNQUANTIZED for gemm in why}
    use = replace(use, **by_gemm)
    return Rule(match=Match(name=(literal(layer.name),)), use=use, kept=tuple(why.items()))
