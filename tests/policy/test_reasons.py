"""Reasons: a code and facts, one sentence."""

from __future__ import annotations

import copy
import pickle

import pytest
from helpers.policies import policy, rule

from mxcompile.policy import Code, Layer, Reason, Role


def test_the_sentence_names_the_facts():
    reason = Reason(Code.DTYPE, "int8")
    assert reason == "unsupported dtype int8: use FP32, BF16 or FP16"
    assert (reason.code, reason.facts) == (Code.DTYPE, ("int8",))


@pytest.mark.parametrize("code", Code)
def test_every_code_has_a_sentence(code: Code):
    assert Reason(code, "a", "b", "c")


def test_a_further_reason_leaves_code_and_facts():
    reason = Reason(Code.RULE, 2).also(Reason(Code.CUT, "x")).also(Reason(Code.NO_HISTORY))
    assert reason.startswith("policy: rule 2; decided on a part of the model: x; scales of")
    assert (reason.code, reason.facts) == (Code.RULE, ("2",))


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda reason: pickle.loads(pickle.dumps(reason))])
def test_copied_reason_keeps_code_and_facts(copied):
    reason = Reason(Code.LIMIT, "min_k 256 (k=48)").also(Reason(Code.CUT, "x"))
    restored = copied(reason)
    assert (restored, restored.code, restored.facts) == (reason, reason.code, reason.facts)


def test_decision_of_a_policy_has_a_code():
    rules = policy(rule("bf16", name="a"), rule(role="qkv", min_k=256))
    for name, role, k, *expected in [
        ("a", Role.QKV, 512, Code.RULE, "1"),
        ("b", Role.QKV, 512, Code.RULE, "2"),
        ("b", Role.QKV, 48, Code.LIMIT, "min_k 256 (k=48)"),
        ("b", Role.HEAD, 512, Code.PRESET, "bf16"),
    ]:
        reason = rules.decide(Layer(name=name, role=role, module="Linear", m=64, n=64, k=k)).fprop.reason
        assert [reason.code, *reason.facts] == expected
