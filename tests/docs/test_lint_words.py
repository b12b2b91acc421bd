"""The lint of words finds each fault, and passes over code."""

from __future__ import annotations

import ast

import lint_words
import pytest


@pytest.mark.parametrize(
    ("sentence", "fault"),
    [
        ("This is no layer.", 'say "is not a"'),
        ("The name is that of a layer.", "use the noun"),
        ("What runs is named.", "begins with What"),
        ("The tapped weights run.", "'tapped' is not in docs/glossary.md"),
        ("word " * 26, "26 words"),
    ],
)
def test_a_fault(sentence: str, fault: str):
    assert list(lint_words.faults_of(sentence, set())) == [fault]


@pytest.mark.parametrize(
    "sentence",
    ["What runs?", "There is no layer.", "It is no longer so.", "word " * 25, "The outline is drawn."],
)
def test_no_fault(sentence: str):
    assert list(lint_words.faults_of(sentence, {"outline"})) == []


def test_prose_is_paragraphs_items_and_cells():
    page = (
        '# Heading\n\nOne `is no` two.\n\n- Item "that of".\n\n| head |\n|---|\n| cell |\n\n```\ncode\n```\n'
    )
    assert [text for _, text in lint_words.prose(page)] == ["One CODE two.", "Item QUOTE.", "head", "cell"]


def test_code_has_nouns_and_docstrings_that_say_what_is_returned():
    source = 'def f(found):\n    """What it is."""\n    made = found\n\n\nclass C:\n    made: int\n'
    tree = ast.parse(source)
    assert list(lint_words.variables("f.py", tree)) == [
        "f.py:1: found is not a noun", "f.py:3: made is not a noun",
    ]  # fmt: skip
    assert list(lint_words.docstrings("f.py", tree)) == ["f.py:1: has no subject: What it is."]
