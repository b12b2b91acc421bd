"""Name patterns made from other things: exact texts, and regular expressions that need not match it all."""

from __future__ import annotations

import re

_FLAGS = re.compile(r"\(\?([aiLmsux]+)\)")
_OPEN_END = re.compile(r"(?<!\\)(\\\\)*(\$|\.\*)$")
"""An end that leaves nothing to match behind it: '$' or '.*', neither of them escaped."""


def literal(name: str) -> str:
    """The glob that matches `name` and nothing else."""
    escaped = re.sub(r"[*?[]", lambda sign: f"[{sign[0]}]", name)
    return f"[r]{escaped[1:]}" if escaped.startswith("re:") else escaped


def searching(expression: str) -> str:
    """The pattern of names in which `expression` is found anywhere, as by `re.search`."""
    return _within(expression, before=".*")


def starting(expression: str) -> str:
    """The pattern of names that begin with a match of `expression`, as by `re.match`."""
    return _within(expression, before="")


def _within(expression: str, before: str) -> str:
    """`expression` after `before` and with anything behind it; flags that it sets for all stay first."""
    flags = ""
    while match := _FLAGS.match(expression):
        flags += match[1]
        expression = expression[match.end() :]
    prefix = f"(?{''.join(dict.fromkeys(flags))})" if flags else ""
    if "x" in flags:  # it may end in a comment
        return f"re:{prefix}{before}(?:{expression}\n).*"
    if splits(expression):
        return f"re:{prefix}{before}(?:{expression}).*"
    if expression.startswith("^") or re.match(r"\.\*(?!\+)", expression):
        before = ""
    return f"re:{prefix}{before}{expression}{'' if _OPEN_END.search(expression) else '.*'}"


def splits(expression: str) -> bool:
    """Whether `expression` has a '|' outside all brackets: its end is not the end of all it matches."""
    depth, index, in_set = 0, 0, False
    while index < len(expression):
        sign = expression[index]
        if sign == "\\":
            index += 1
        elif in_set:
            in_set = sign != "]"
        elif sign == "|" and depth == 0:
            return True
        else:
            in_set = sign == "["
            depth += (sign == "(") - (sign == ")")
        index += 1
    return False
