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
def test_sentence_that_breaks_a_rule_is_a_fault(sentence: str, fault: str):
    assert list(lint_words.faults_of(sentence, set())) == [fault]


@pytest.mark.parametrize(
    "sentence",
    ["What runs?", "There is no layer.", "It is no longer so.", "word " * 25, "The outline is drawn."],
)
def test_sentence_within_the_rules_has_no_fault(sentence: str):
    assert list(lint_words.faults_of(sentence, {"outline"})) == []


def test_prose_is_paragraphs_items_and_cells():
    page = (
        '# Heading\n\nOne `is no` two.\n\n- Item "that of".\n\n| head |\n|---|\n| cell |\n\n```\ncode\n```\n'
    )
    assert [text for _, text in lint_words.prose(page)] == ["One CODE two.", "Item QUOTE.", "head", "cell"]


@pytest.mark.parametrize(
    ("name", "faults"), [("_tell_limit", 1), ("adopt", 1), ("knowledge", 0), ("is_known", 0)]
)
def test_functions_have_common_verbs(name: str, faults: int):
    assert len(list(lint_words.variables("f.py", ast.parse(f"def {name}(): pass")))) == faults


def test_lint_reports_variables_without_noun_and_docstrings_without_subject():
    source = 'def f(found):\n    """What it is."""\n    left_dim = found\n\n\nclass C:\n    made: int\n'
    tree = ast.parse(source)
    assert list(lint_words.variables("f.py", tree)) == [
        "f.py:1: found is not a noun of the field", "f.py:7: made is not a noun of the field",
    ]  # fmt: skip
    assert list(lint_words.docstrings("f.py", tree)) == ["f.py:1: has no subject: What it is."]


@pytest.mark.parametrize(
    ("statement", "faults"),
    [
        ("left, rest = sides", 1),
        ("left, right = sides", 0),
        ("self._held = sizes", 1),
        ("sizes = [one for one in x]", 1),
        ("def place(x): pass", 1),
        ("lhs, rhs = sides", 0),
        ("x = left", 0),
    ],
)
def test_names_that_hold_values_are_nouns_of_the_field(statement: str, faults: int):
    assert len(list(lint_words.variables("f.py", ast.parse(statement)))) == faults
    picture = "mxcompile/report/forms/picture.py"
    assert not list(lint_words.variables(picture, ast.parse("left = 1"))), "an edge of a picture"


@pytest.mark.parametrize(
    ("name", "faults"),
    [
        ("test_errors", 1),
        ("test_others_stay", 1),
        ("test_a_text_is_no_policy", 1),
        ("test_rule_without_match_raises", 0),
    ],
)
def test_short_or_odd_name_of_a_test_is_a_fault(name: str, faults: int):
    assert len(list(lint_words.tests("f.py", ast.parse(f"def {name}(): pass")))) == faults


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("Returns what it is called with.", 'name the noun instead of "what"'),
        ("Returns the groups, of which one is freed.", 'repeat the noun instead of "of which"'),
        ("Yields snapshots; of equal layers the last.", 'repeat the noun after ";"'),
        ("Returns the cast.\n\nscale: of the weight.", 'begin a field with a noun, not with "of"'),
        ("Returns the name, that of a layer.", "use the noun"),
        ("Returns the snapshot of the last one.", 'use the noun instead of "one"'),
        ("Returns the sizes, symbolic ones by their hint.", 'use the noun instead of "one"'),
        (
            "Returns the text that the reason says.",
            "name the function or the file that does it: things do not speak",
        ),
        ("Returns the requests that it meets.", "use a common verb"),
        ("Returns x.\n\nExample:\n    >>> f()", "write Examples:, which mkdocstrings renders"),
    ],
)
def test_strict_rule_finds_docstring(text: str, fault: str):
    (line,) = lint_words.strict("f.py", f"def f():\n    {text!r}\n")
    assert line.startswith(f"f.py:2: {fault}: ")


@pytest.mark.parametrize(
    "text",
    [
        "Whether one rank has `what it says`.",
        'Returns "the last one".',
        "Yields both.\n\n    what is tabled    those of a table\n\nThe rest is prose.",
        "Returns x.\n\nArgs:\n    x: A number.\n\nRaises:\n    OptionError: x is negative.",
    ],
)
def test_strict_rules_pass_over_code_quotes_and_tables(text: str):
    assert list(lint_words.strict("f.py", f"def f():\n    {text!r}\n")) == []


def test_strict_rules_read_comments_and_strings_behind_variables():
    source = 'X = 1  # what it is\n"""Of those that say."""\nY = 2  # a size\n'
    assert [line.split(":")[1] for line in lint_words.strict("f.py", source)] == ["2", "1"]


def test_strict_function_docstring_without_verb_in_s_is_a_fault():
    source = (
        'def f():\n    """Return x."""\n\n\nclass C:\n    @property\n    def g(self):\n        """Size."""\n'
    )
    assert list(lint_words.strict("f.py", source)) == [
        'f.py:1: begin with a verb, as "Returns", or with "Whether": Return'
    ]


@pytest.mark.parametrize(
    ("statement", "fault"),
    [
        ('raise OptionError(f"`{name}` is a number, found {value}")', 'say "must be", as in '),
        ('log.warning("%s keeps what was compiled", name)', 'name the noun instead of "what"'),
        ('reason = "the number of groups is not known"', "say what the user has"),
        ('command.add_argument("x", help="a file, that of a report")', "use the noun"),
        ('draft.note(path, f"{name} is no GEMM of the layer")', 'say "is not a"'),
    ],
)
def test_message_rule_finds_string(statement: str, fault: str):
    (line,) = lint_words.messages("f.py", ast.parse(f"import x\n{statement}\n"))
    assert line.startswith(f"f.py:2: {fault}")


@pytest.mark.parametrize(
    "statement",
    [
        '"""A docstring has other rules: what is returned."""',
        'raise OptionError(f"`{name}` must be a number, found {value}: pass 1")',
        'code = "{% if what is set %}\\n    acc = what is it\\n"',
        "word = 'that of'",
    ],
)
def test_message_rules_pass_over_code_and_short_strings(statement: str):
    assert list(lint_words.messages("f.py", ast.parse(statement))) == []
