"""Name patterns for policies, from literal names or from regular expressions of other tools."""

from __future__ import annotations

import re

_FLAGS = re.compile(r"\(\?([aiLmsux]+)\)")
_OPEN_END = re.compile(r"(?<!\\)(\\\\)*(\$|\.\*)$")
"""An end that already matches any rest: an unescaped '$' or '.*'."""


def literal(name: str) -> str:
    """Returns the glob that matches only `name`."""
    escaped = re.sub(r"[*?[]", lambda sign: f"[{sign[0]}]", name)
    return f"[r]{escaped[1:]}" if escaped.startswith("re:") else escaped


def searching(expression: str) -> str:
    """Returns the pattern for names that contain a match of `expression`, like `re.search`."""
    return _within(expression, before=".*")


def starting(expression: str) -> str:
    """Returns the pattern for names that begin with a match of `expression`, like `re.match`."""
    return _within(expression, before="")


def _within(expression: str, before: str) -> str:
    """Returns `before`, `expression` and any rest as one pattern, with global flags moved to the start."""
    flags = ""
    while match := _FLAGS.match(expression):
        flags += match[1]
        expression = expression[match.end() :]
    prefix = f"(?{''.join(dict.fromkeys(flags))})" if flags else ""
    if "x" in flags:  # a verbose expression may end in a comment, which a newline closes
        return f"re:{prefix}{before}(?:{expression}\n).*"
    if splits(expression):
        return f"re:{prefix}{before}(?:{expression}).*"
    if expression.startswith("^") or re.match(r"\.\*(?!\+)", expression):
        before = ""
    return f"re:{prefix}{before}{expression}{'' if _OPEN_END.search(expression) else '.*'}"


def splits(expression: str) -> bool:
    """Whether `expression` has a '|' outside all brackets, so that a suffix would join only one branch."""
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
