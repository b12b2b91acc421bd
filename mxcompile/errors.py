"""The errors that mxcompile raises: one class per kind of mistake.

A message gives the value found, the value expected and the remedy. It quotes arguments of public functions
in backquotes; the command line replaces them by its flags. Errors about a wrong value also derive from the
builtin class for it, so ``except ValueError`` keeps working.
"""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable


class MXCompileError(Exception):
    """Base of all errors raised by mxcompile."""


class OptionError(MXCompileError, ValueError):
    """An entry of the backend's ``options=``, or an argument of a public function, is not valid."""


class FormatError(MXCompileError, ValueError):
    """A tensor, element type, rounding or scale does not describe MX data."""


class PolicyError(MXCompileError, ValueError):
    """A policy is not valid. The message has the location, the value found and the allowed values."""


class UnsupportedError(MXCompileError, RuntimeError):
    """MXFP8 does not support the request: a layer under strict mode, or gradients of an MXFP8 cache."""

    @classmethod
    def from_refused(cls, refused: Iterable[str], precisions: str) -> UnsupportedError:
        """Returns the error of strict mode for GEMMs that stay unquantized.

        Args:
            refused: A line for each GEMM, with its name and the reason.
            precisions: The labels of the precisions that the policy selects for these GEMMs.
        """
        return cls(
            f"strict: the policy quantizes these GEMMs to {precisions}, but that is not possible;"
            " change the policy, or turn strict off:\n  " + "\n  ".join(refused)
        )


class ModelError(MXCompileError, ValueError):
    """A model named on the command line cannot be built, or a model passed to a function cannot be traced."""


class TargetError(MXCompileError, ValueError):
    """The target is unknown, or this machine or the installed versions do not support it."""


class CheckpointError(MXCompileError, ValueError):
    """A checkpoint is damaged, has contents that cannot be read, or cannot store the requested contents."""


class NonFiniteError(MXCompileError, ArithmeticError):
    """An operand of a watched run has NaN or Inf, and the watch is configured to stop the run."""


class WatchError(MXCompileError, ArithmeticError):
    """A rule of a watch stops the run."""


class VerificationError(MXCompileError, AssertionError):
    """A pass produced an invalid graph. This is a defect of mxcompile, never of the user's model."""


def shown(value: object) -> str:
    """Returns the ``repr`` of `value` for an error message, cut to 80 characters."""
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:79]}…"


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Returns ``" (did you mean 'x'?)"`` for the allowed word closest to `word`, or ""."""
    by_lower = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(word.lower(), by_lower, n=1, cutoff=0.6)
    return f" (did you mean {by_lower[close[0]]!r}?)" if close else ""


def not_allowed(noun: str, value: object, allowed: Iterable[str]) -> str:
    """Returns "unknown `noun` `value` (did you mean …?); allowed: …".

    Non-ASCII letters are shown by their code point, because a Cyrillic е in a key looks like a Latin e.
    """
    words = [str(word) for word in allowed]
    named = "".join(
        sign if sign.isascii() or not sign.isalpha() else ascii(sign)[1:-1] for sign in shown(value)
    )
    return f"unknown {noun} {named}{nearest(str(value), words)}; allowed: {', '.join(words)}"


def check_word(
    noun: str, word: object, allowed: Collection[object], error: type[MXCompileError] = OptionError
) -> None:
    """Raises `error` with the message of `not_allowed` unless `word` is in `allowed`."""
    if word not in allowed:
        raise error(not_allowed(noun, word, map(str, allowed)))


def printable(text: str) -> str:
    """Returns `text` for use in a one-line comment: line breaks and invisible characters become escapes."""
    return "".join(sign if sign.isprintable() else ascii(sign)[1:-1] for sign in text)
