"""What a name pattern that matches nothing was meant to be."""

from __future__ import annotations

import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from import_checks import layer

from mxcompile.policy import Gemm, Match, Policy, keeping
from mxcompile.policy.patterns import literal, searching, starting
from mxcompile.rules.check import meant, respelled

NAMES = [
    f"model.layers.{block}.{layer}"
    for block in range(12)
    for layer in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
] + ["lm_head"]


@pytest.mark.parametrize(
    ("pattern", "guess"),
    [
        ("*.up_prj", "*.up_proj"),
        ("*.gaet_proj", "*.gate_proj"),
        ("*.mlp.*_projj", "*.mlp.*_proj"),
        ("model.layrs.0.*", "model.layers.0.*"),
        ("model.layers.7.mlp.up_porj", "model.layers.7.mlp.up_proj"),
        ("*.sel_attn.[qk]_proj", "*.self_attn.[qk]_proj"),
        ("model.?ayers.[0-3].mlq.*", "model.?ayers.[0-3].mlp.*"),
        ("LM_head", "lm_head"),
        ("q_proj", "*q_proj"),
        ("layers.0.*", "*layers.0.*"),
        ("mlp", "*mlp*"),
        ("re:q_proj", "re:.*q_proj.*"),
        ("re:q_proj|up_proj$", "re:.*(?:q_proj|up_proj$).*"),
        ("model.layer.3.up_proj", "model.layers.3.mlp.up_proj"),
    ],
)
def test_mistyped_pattern_suggests_the_nearest_name(pattern: str, guess: str):
    assert meant(pattern, NAMES) == f" (did you mean {guess!r}?)"


@pytest.mark.parametrize("pattern", ["transformer.h.*", "re:.*up_prj", "*.x", "zzz"])
def test_pattern_unlike_every_name_has_no_guess(pattern: str):
    assert meant(pattern, NAMES) == ""


@pytest.mark.parametrize(
    ("pattern", "guess"), [("*.up_prj", "*.up_proj"), ("q_proj", None), ("*.k_proj", None), ("mlpp.[x", None)]
)
def test_only_the_spelling_of_a_word_is_a_slip(pattern: str, guess: str | None):
    assert respelled(pattern, NAMES) == guess


@settings(max_examples=200, deadline=None)
@given(text=st.text("re:a.*?[]!-", min_size=1, max_size=8), other=st.text("re:a.*?[]!-", max_size=8))
def test_a_literal_matches_its_text_and_nothing_else(text: str, other: str):
    match = Match(name=(literal(text),))
    assert match.names(text)
    assert match.names(other) == (text == other)


def test_a_layer_that_a_watch_keeps_is_named_and_no_other():
    """Whatever its name looks like: a glob, or an expression."""
    layers = [layer(name) for name in ("re:.*", "b[0]*", "b0")]
    policy = keeping(Policy(), {kept: {Gemm.DGRAD: "why"} for kept in layers[:2]}, "kept")
    assert [policy.decide(layer).dgrad.precision for layer in layers] == ["bf16", "bf16", "mxfp8"]


EXPRESSIONS = [
    "fc1", "^fc", "fc$", "a|b", ".*(fc1|fc2)", "(?i)FC", "(?i)(?s)A.B", "(?x) f c  # spaced", "(a)\\1",
    "(?<=b)a", "self_attn.*", "a.*|$", "[.]b", "(?:x)?", "q_proj$|^k", "\\.mlp\\.", "",
    "^self.*", "a\\.*", "fc\\$", "\\\\.*", "(?s)^fc", "[.*]$", ".*+b", ".*?b", "(a|b)$", "[|]*", "(?i:A)",
]  # fmt: skip
WRAPPED_NAMES = [
    "fc1", "x.fc1.y", "aa", "ba", "ab", "A.B", "a.b", "self_attn", "q_proj", "k", "x.mlp.y", "", "fc",
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_wrapped_expression_matches_as_the_function_it_was_for(expression: str):
    for wrapped, function in ((searching(expression), re.search), (starting(expression), re.match)):
        Policy.from_dict({"version": 1, "rules": [{"match": {"name": wrapped}, "use": "bf16"}]})
        for name in WRAPPED_NAMES:
            assert Match(name=(wrapped,)).names(name) == (function(expression, name) is not None), name
