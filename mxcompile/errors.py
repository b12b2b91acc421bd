"""Every error a user of mxcompile can meet: one class per kind of mistake.

A message says what was found, what was expected and what to do. It has the arguments of a public function in
backquotes, for which the command line writes its flags. Errors that stand for a wrong value
also derive from the builtin that describes it, so that ``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class MXCompileError(Exception):
    """Base of all errors raised by mxcompile."""


class OptionError(MXCompileError, ValueError):
    """``options=`` of the backend, or an argument of a public function, is not valid."""


class FormatError(MXCompileError, ValueError):
    """A tensor, element type, rounding or scale does not describe MX data."""


class PolicyError(MXCompileError, ValueError):
    """A policy is not valid: says where, what was found and what is allowed."""


class UnsupportedError(MXCompileError, RuntimeError):
    """Strict mode: the policy sends layers to MXFP8 that cannot go there."""


class ModelError(MXCompileError, ValueError):
    """A model named on the command line cannot be made, or one given to a function cannot be traced."""


class TargetError(MXCompileError, ValueError):
    """The target is unknown, or this machine or these versions cannot serve it."""


class CheckpointError(MXCompileError, ValueError):
    """A checkpoint is damaged, holds what cannot be read, or cannot hold what is to be written."""


class NonFiniteError(MXCompileError, ArithmeticError):
    """A watched run has NaN or Inf in an operand, and its watch is to stop it."""


class WatchError(MXCompileError, ArithmeticError):
    """A rule of a watch stops a run."""


class VerificationError(MXCompileError, AssertionError):
    """A pass left an invalid graph: a defect of mxcompile, never of the user's model."""


def shown(value: object) -> str:
    """`value` as an error shows it: in one line, cut where it is longer than a reader needs."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def nearest(word: str, allowed: Iterable[str]) -> str:
    """``" (did you mean 'x'?)"`` for the allowed word closest to `word`, or an empty string."""
    by_lower = {known.lower(): known for known in allowed}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def not_allowed(what: str, value: object, allowed: Iterable[str]) -> str:
    """One sentence: `what` is `value`, allowed are `allowed`, nearest is ….

    Letters outside ASCII are shown by their code: a Cyrillic е in a key looks like the right one.
    """
    words = [str(word) for word in allowed]
    named = "".join(_by_code(sign) for sign in shown(value))
    return f"unknown {what} {named}{nearest(str(value), words)}; allowed: {', '.join(words)}"


def printable(text: str) -> str:
    """`text` as a comment may hold it: what ends the line or cannot be seen is shown by its code."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)


def _by_code(sign: str) -> str:
    return sign if sign.isascii() or not sign.isalpha() else ascii(sign)[1:-1]
