"""The pattern that the author of a pattern without matches may have meant.

The nearest of: the pattern with one edit (a letter too many, missing, wrong, or two swapped) that makes it
match; the same in other case; the pattern left open where it was anchored; the name most like it.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass

from mxcompile.policy.patterns import searching

_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|.", re.DOTALL)
_LEAST_LETTERS = 4


@dataclass(frozen=True, slots=True)
class _Edit:
    """Tokens `start` to `end` of a pattern become `text`."""

    start: int
    end: int
    text: str


def meant(pattern: str, names: Sequence[str]) -> str:
    """``" (did you mean 'x'?)"`` for what `pattern` was meant to be among `names`, or an empty string."""
    for guess in (one_edit, _other_case, _left_open, _most_like):
        found = guess(pattern, names)
        if found is not None:
            return f" (did you mean {found!r}?)"
    return ""


def one_edit(pattern: str, names: Sequence[str]) -> str | None:
    """The glob one edit from `pattern` that matches one of `names`, or None.

    Edits touch letters, never wildcards; a glob of less than four letters is one edit from anything.
    """
    if pattern.startswith("re:"):
        return None
    tokens = _TOKEN.findall(pattern)
    if sum(_is_letter(token) for token in tokens) < min(_LEAST_LETTERS, len(tokens)):
        return None
    for name in names:
        edit = _edit_towards(tokens, name)
        if edit is not None:
            return "".join((*tokens[: edit.start], edit.text, *tokens[edit.end :]))
    return None


def _edit_towards(tokens: Sequence[str], name: str) -> _Edit | None:
    """The edit of the glob `tokens` that makes it match `name`: a nondeterministic automaton with one error.

    A state is the number of tokens done; `clean` holds those reached without an edit, `edited` the edit each
    other one took, `swapped` those due one letter later.
    """
    clean: set[int] = {0}
    edited: dict[int, _Edit] = {}
    swapped: dict[int, _Edit] = {}
    for position, letter in enumerate(name):
        _skip(tokens, clean, edited)
        after: set[int] = set()
        touched = dict(swapped)
        swapped = {}
        for state in clean:
            if state < len(tokens) and _takes(tokens[state], letter):
                after.add(state + (tokens[state] != "*"))
            touched.setdefault(state, _Edit(state, state, letter))
            if state < len(tokens) and _is_letter(tokens[state]):
                touched.setdefault(state + 1, _Edit(state, state + 1, letter))
            two = "".join(tokens[state : state + 2])
            if len(two) == 2 and two[::-1] == name[position : position + 2]:
                swapped.setdefault(state + 2, _Edit(state, state + 2, two[::-1]))
        for state, edit in edited.items():
            if state < len(tokens) and _takes(tokens[state], letter):
                touched.setdefault(state + (tokens[state] != "*"), edit)
        clean, edited = after, touched
        if not (clean or edited or swapped):
            return None
    _skip(tokens, clean, edited)
    return edited.get(len(tokens))


def _skip(tokens: Sequence[str], clean: set[int], edited: dict[int, _Edit]) -> None:
    """Add what is reached without a letter: past a '*', and, as an edit, past a letter of the pattern."""
    for state in sorted(clean):
        while state < len(tokens) and tokens[state] == "*":
            state += 1
            clean.add(state)
    for state in sorted(clean):
        if state < len(tokens) and _is_letter(tokens[state]):
            edited.setdefault(state + 1, _Edit(state, state + 1, ""))
    for state in sorted(edited):
        edit = edited[state]
        while state < len(tokens) and tokens[state] == "*":
            state += 1
            edited.setdefault(state, edit)


def _is_letter(token: str) -> bool:
    return len(token) == 1 and token not in "*?"


def _takes(token: str, letter: str) -> bool:
    return token == letter or token in ("*", "?") or (len(token) > 1 and fnmatch.fnmatchcase(letter, token))


def _other_case(pattern: str, names: Sequence[str]) -> str | None:
    expression = re.compile(_expression(pattern), re.IGNORECASE)
    return next((name for name in names if expression.fullmatch(name)), None)


def _left_open(pattern: str, names: Sequence[str]) -> str | None:
    """`pattern` with wildcards at its ends, if it matches inside a name: patterns cover the whole path."""
    if pattern.startswith("re:"):
        inside = re.compile(_expression(pattern))
        found = any(inside.search(name) for name in names)
        return searching(pattern.removeprefix("re:")) if found else None
    for candidate in (f"*{pattern}", f"{pattern}*", f"*{pattern}*"):
        if any(fnmatch.fnmatchcase(name, candidate) for name in names):
            return candidate
    return None


def _most_like(pattern: str, names: Sequence[str]) -> str | None:
    close = difflib.get_close_matches(pattern, dict.fromkeys(names), n=1, cutoff=0.6)
    return close[0] if close else None


def _expression(pattern: str) -> str:
    return pattern.removeprefix("re:") if pattern.startswith("re:") else fnmatch.translate(pattern)
