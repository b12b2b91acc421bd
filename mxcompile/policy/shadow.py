"""Which rules can never fire, because earlier ones take everything they match.

Sound, not complete: a rule is only called shadowed when that can be shown from the patterns alone,
one combination of name, role and module at a time, and there are at most `MAX_CASES`.
"""

from __future__ import annotations

import fnmatch
import itertools
import re
from collections.abc import Sequence

from mxcompile.policy.model import ATTENTION_PRODUCTS, Match, Role

MAX_CASES = 10_000

_ANY = "*"
_LINEAR = tuple(role for role in Role if role not in ATTENTION_PRODUCTS)


def shadowed_by(match: Match, earlier: Sequence[Match]) -> str | None:
    """``"rule 1"`` or ``"rules 1, 3"`` that together cover `match`, or None."""
    names = match.name or (_ANY,)
    roles = match.role or _LINEAR
    modules = match.module or (None,)
    if len(names) * len(roles) * len(modules) > MAX_CASES:
        return None
    covering: set[int] = set()
    for name, role, module in itertools.product(names, roles, modules):
        for index, known in enumerate(earlier):
            if _covers(known, name, role, module, match):
                covering.add(index + 1)
                break
        else:
            return None
    numbers = ", ".join(str(index) for index in sorted(covering))
    return f"rule {numbers}" if len(covering) == 1 else f"rules {numbers}"


def _covers(known: Match, name: str, role: Role, module: str | None, later: Match) -> bool:
    return (
        (not known.name or any(_pattern_covers(pattern, name) for pattern in known.name))
        and (not known.role or role in known.role)
        and (not known.module or module in known.module)
        and known.min_m <= later.min_m
        and known.min_n <= later.min_n
        and known.min_k <= later.min_k
    )


def _pattern_covers(known: str, later: str) -> bool:
    """Whether every name that `later` matches is matched by `known`."""
    if known in (later, _ANY):
        return True
    if known.startswith("re:"):
        return not _is_pattern(later) and re.fullmatch(known.removeprefix("re:"), later) is not None
    if later.startswith("re:"):
        return False
    # a '*' of the later pattern may stand for anything, so only a '*' of the known one may swallow
    # it; '?' and '[' in either make the comparison by text unsound unless the texts are equal
    if any(sign in known or sign in later for sign in "?["):
        return not _is_pattern(later) and fnmatch.fnmatchcase(later, known)
    return fnmatch.fnmatchcase(later, known)


def _is_pattern(name: str) -> bool:
    return name.startswith("re:") or any(sign in name for sign in "*?[")
