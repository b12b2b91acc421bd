"""Finds rules that can never fire, because earlier rules match everything they match.

The check is sound but incomplete: it reports a rule only if the patterns alone prove it. It compares one
combination of name, role, module and end of a block stack at a time, with at most `MAX_STEPS` comparisons per
policy.
"""

from __future__ import annotations

import fnmatch
import itertools
import re

from mxcompile.policy.model import Ends, Match
from mxcompile.policy.roles import ATTENTION_PRODUCTS, Role

MAX_STEPS = 400_000
"""Most comparisons for a policy, about half a second."""

_MAX_REPEATS = 4
_ANY = "*"
_LINEAR = tuple(role for role in Role if role not in ATTENTION_PRODUCTS)


class Shadows:
    """Finds rules that never decide, because earlier rules match all of their layers."""

    def __init__(self) -> None:
        self._earlier: list[_Earlier] = []
        self._steps = 0

    def add(self, match: Match) -> tuple[int, ...]:
        """Adds `match`. Returns the numbers (from 1) of earlier rules that together cover it, if any."""
        if not (covering := self._covering(match)):
            self._earlier.append(_Earlier(match))
        return tuple(sorted(covering))

    def _covering(self, match: Match) -> set[int]:
        """Returns the numbers of the rules that cover `match`, if any can be found within the step limit."""
        covering: set[int] = set()
        sides: list[Ends | None] = [None]
        if (blocks := match.blocks) is not None:  # one end at a time
            sides = [ends for ends in (Ends(first=blocks.first), Ends(last=blocks.last)) if ends != Ends()]
        cases = itertools.product(
            match.name or (_ANY,), match.role or _LINEAR, match.module or (None,), sides
        )
        for name, role, module, ends in cases:
            for number, earlier in enumerate(self._earlier, 1):
                self._steps += 1 + len(earlier.patterns)
                if self._steps > MAX_STEPS:
                    return set()
                if earlier.covers(name, role, module, ends, match):
                    covering.add(number)
                    break
            else:
                return set()
        return covering


class _Earlier:
    """An earlier condition. names: its name patterns. patterns: name patterns that fit several layers."""

    __slots__ = ("match", "names", "patterns")

    def __init__(self, match: Match) -> None:
        self.match = match
        self.names = frozenset(match.name)
        self.patterns = tuple(name for name in match.name if is_pattern(name))

    def covers(self, name: str, role: Role, module: str | None, ends: Ends | None, later: Match) -> bool:
        earlier, blocks = self.match, self.match.blocks
        return (
            (not earlier.role or role in earlier.role)
            and (not earlier.module or module in earlier.module)
            and (
                blocks is None
                or (ends is not None and ends.first <= blocks.first and ends.last <= blocks.last)
            )
            and (earlier.steps is None or (later.steps is not None and later.steps.within(earlier.steps)))
            and all(_allows(earlier, later, letter) for letter in "mnk")
            and (not self.names or name in self.names or any(_covers(p, name) for p in self.patterns))
        )


def _allows(earlier: Match, later: Match, letter: str) -> bool:
    """Whether `earlier` allows every size that `later` allows of m, n or k. A maximum of 0 means no limit."""
    largest, of_later = getattr(earlier, f"max_{letter}"), getattr(later, f"max_{letter}")
    at_least = getattr(earlier, f"min_{letter}") <= getattr(later, f"min_{letter}")
    return bool(at_least and (not largest or 0 < of_later <= largest))


def _covers(earlier: str, later: str) -> bool:
    if earlier == _ANY:
        return True
    if earlier.startswith("re:"):
        expression = earlier.removeprefix("re:")
        # few repetitions and none of a group: backtracking over (a+)+ is exponential
        many = re.search(r"\)[*+{]", expression) or len(re.findall(r"[*+{]", expression)) > _MAX_REPEATS
        return not is_pattern(later) and not many and bool(re.fullmatch(expression, later))
    if later.startswith("re:"):
        return False
    # The text of the later pattern is matched like a name. A '*' in it stands for anything, and only a '*'
    # of the earlier pattern matches it. With '?' or '[' in either pattern this would be unsound.
    if any(sign in earlier or sign in later for sign in "?["):
        return not is_pattern(later) and fnmatch.fnmatchcase(later, earlier)
    return fnmatch.fnmatchcase(later, earlier)


def is_pattern(name: str) -> bool:
    """Whether `name` can match more than one layer."""
    return name.startswith("re:") or any(sign in name for sign in "*?[")
