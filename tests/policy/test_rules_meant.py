"""What a name pattern that matches nothing was meant to be."""

from __future__ import annotations

import fnmatch
import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mxcompile.policy.patterns import literal, searching, starting
from mxcompile.rules.meant import meant, one_edit

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
def test_the_nearest_is_meant(pattern: str, guess: str):
    assert meant(pattern, NAMES) == f" (did you mean {guess!r}?)"


@pytest.mark.parametrize("pattern", ["transformer.h.*", "re:.*up_prj", "*.x", "zzz"])
def test_what_is_like_no_name_has_no_guess(pattern: str):
    assert meant(pattern, NAMES) == ""


LETTERS = "ab.1"
SHORT = st.text(LETTERS, min_size=1, max_size=6)
PATTERN = st.text(LETTERS + "*?", min_size=1, max_size=6)


def edits(pattern: str) -> set[str]:
    """Every pattern one edit of a letter away, by trying them all."""
    found = set()
    for i in range(len(pattern) + 1):
        found |= {pattern[:i] + letter + pattern[i:] for letter in LETTERS}
        if i < len(pattern) and pattern[i] not in "*?":
            found.add(pattern[:i] + pattern[i + 1 :])
            found |= {pattern[:i] + letter + pattern[i + 1 :] for letter in LETTERS}
        if pattern[i : i + 2].strip("*?") == pattern[i : i + 2] and len(pattern[i : i + 2]) == 2:
            found.add(pattern[:i] + pattern[i + 1] + pattern[i] + pattern[i + 2 :])
    return found


@settings(max_examples=400, deadline=None)
@given(pattern=PATTERN, name=SHORT)
def test_one_edit_is_found_exactly_where_trying_all_finds_one(pattern: str, name: str):
    assume(not fnmatch.fnmatchcase(name, pattern))
    letters = len(pattern) - pattern.count("*") - pattern.count("?")
    enough = letters >= min(4, len(pattern))
    guess = one_edit(pattern, [name])
    assert (guess is not None) == (enough and any(fnmatch.fnmatchcase(name, edit) for edit in edits(pattern)))
    if guess is not None:
        assert guess in edits(pattern)
        assert fnmatch.fnmatchcase(name, guess)


@settings(max_examples=200, deadline=None)
@given(text=st.text("re:a.*?[]!-", min_size=1, max_size=8), other=st.text("re:a.*?[]!-", max_size=8))
def test_a_literal_matches_its_text_and_nothing_else(text: str, other: str):
    from mxcompile.policy import Match

    match = Match(name=(literal(text),))
    assert match.names(text)
    assert match.names(other) == (text == other)


EXPRESSIONS = [
    "fc1", "^fc", "fc$", "a|b", ".*(fc1|fc2)", "(?i)FC", "(?i)(?s)A.B", "(?x) f c  # spaced", "(a)\\1",
    "(?<=b)a", "self_attn.*", "a.*|$", "[.]b", "(?:x)?", "q_proj$|^k", "\\.mlp\\.", "",
    "^self.*", "a\\.*", "fc\\$", "\\\\.*", "(?s)^fc", "[.*]$", ".*+b", ".*?b", "(a|b)$", "[|]*", "(?i:A)",
]  # fmt: skip


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_a_wrapped_expression_matches_as_the_function_it_was_for(expression: str):
    from mxcompile.policy import Match, Policy

    names = [
        "fc1",
        "x.fc1.y",
        "aa",
        "ba",
        "ab",
        "A.B",
        "a.b",
        "self_attn",
        "q_proj",
        "k",
        "x.mlp.y",
        "",
        "fc",
    ]
    for wrapped, function in ((searching(expression), re.search), (starting(expression), re.match)):
        Policy.from_dict({"version": 1, "rules": [{"match": {"name": wrapped}, "use": "bf16"}]})
        for name in names:
            assert Match(name=(wrapped,)).names(name) == (function(expression, name) is not None), name
