"""Suggests the intended pattern for a pattern that matches no layer.

The first hit counts: the glob with one word respelled, the pattern in another case, the pattern with open
ends, the most similar name.
"""

from __future__ import annotations

import difflib
import fnmatch
import re
from collections.abc import Sequence

from mxcompile.policy.patterns import searching

_TOKEN = re.compile(r"\[!?\]?[^\]]*\]|[^\W_]+|.", re.DOTALL)
_WORD = re.compile(r"[^\W_]+")
_NEAR = 0.65
"""Least similarity (difflib's ratio) of two words that counts as a typo."""


def meant(pattern: str, names: Sequence[str]) -> str:
    """Returns ``" (did you mean 'x'?)"`` with the best guess among `names`, or an empty string."""
    for guess in (respelled, _other_case, _with_wildcards, _most_like):
        meaning = guess(pattern, names)
        if meaning is not None:
            return f" (did you mean {meaning!r}?)"
    return ""


def respelled(pattern: str, names: Sequence[str]) -> str | None:
    """Returns a glob that matches a name and differs from `pattern` in one word, or None."""
    if pattern.startswith("re:"):
        return None
    words = dict.fromkeys(word for name in names for word in _WORD.findall(name))
    tokens = _TOKEN.findall(pattern)
    for index, token in enumerate(tokens):
        for word in difflib.get_close_matches(token, words, cutoff=_NEAR) if _WORD.match(token) else ():
            guess = "".join([*tokens[:index], word, *tokens[index + 1 :]])
            if fnmatch.filter(names, guess):
                return guess
    return None


def _other_case(pattern: str, names: Sequence[str]) -> str | None:
    expression = pattern.removeprefix("re:") if pattern.startswith("re:") else fnmatch.translate(pattern)
    compiled = re.compile(expression, re.IGNORECASE)
    return next((name for name in names if compiled.fullmatch(name)), None)


def _with_wildcards(pattern: str, names: Sequence[str]) -> str | None:
    """Returns `pattern` with wildcards added at its ends, if that matches a name, else None."""
    if pattern.startswith("re:"):
        expression = pattern.removeprefix("re:")
        match = any(re.search(expression, name) for name in names)
        return searching(expression) if match else None
    for candidate in (f"*{pattern}", f"{pattern}*", f"*{pattern}*"):
        if fnmatch.filter(names, candidate):
            return candidate
    return None


def _most_like(pattern: str, names: Sequence[str]) -> str | None:
    close = difflib.get_close_matches(pattern, dict.fromkeys(names), n=1, cutoff=0.6)
    return close[0] if close else None
