"""The keys of a policy and how their values are read: one row each.

A reader takes the raw value and returns what the model holds, or raises `Invalid` with a sentence
that says what is allowed; `parse` adds where.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mxcompile.errors import not_allowed, shown
from mxcompile.formats import ELEM_TYPES, Rounding, Tile
from mxcompile.policy.model import Precision, Role, Saved
from mxcompile.policy.presets import PRESETS

VERSION = 1


class Invalid(ValueError):  # noqa: N818 - a signal inside this package, not an error users see
    """A value that its key does not allow. `index` is its place in a list, if it came in one."""

    def __init__(self, message: str, index: int | None = None) -> None:
        super().__init__(message)
        self.index = index


Reader = Callable[[Any], Any]


def word(what: str, table: dict[str, Any]) -> Reader:
    """One of the words of `table`; gives what the table holds for it."""

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in table:
            raise Invalid(not_allowed(what, value, table))
        return table[value]

    return read


def listed(read: Reader) -> Reader:
    """One value or a list of values; gives a tuple without repetitions."""

    def read_list(value: Any) -> Any:
        if not isinstance(value, list):
            return (read(value),)
        if not value:
            raise Invalid("an empty list matches nothing: remove the key or name a value")
        items = []
        for index, item in enumerate(value):
            try:
                items.append(read(item))
            except Invalid as error:
                raise Invalid(str(error), index) from None
        return tuple(dict.fromkeys(items))

    return read_list


def positive(value: Any) -> int:
    """A positive integer."""
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Invalid(f"expected a positive integer, found {shown(value)}")
    return value


def name_pattern(value: Any) -> str:
    """A glob or a ``re:`` expression over module paths."""
    if not isinstance(value, str) or not value:
        raise Invalid(f"expected a glob or 're:…' over module paths, found {shown(value)}")
    if value.startswith("re:"):
        try:
            re.compile(value.removeprefix("re:"))
        except (re.error, OverflowError, RecursionError) as error:
            raise Invalid(f"{shown(value)} is not a regular expression: {error}") from None
    return value


def class_name(value: Any) -> str:
    """The name of a module class."""
    if not isinstance(value, str) or not value.isidentifier():
        raise Invalid(f"expected the class name of a module, such as Linear, found {shown(value)}")
    return value


def version(value: Any) -> int:
    """The version of the policy language."""
    if value != VERSION or isinstance(value, bool):
        raise Invalid(f"this mxcompile reads policy version {VERSION}, found {shown(value)}")
    return VERSION


def _table(words: Any) -> dict[str, Any]:
    return {str(item): item for item in words}


PRECISION = word("precision", _table(Precision))

MATCH: dict[str, Reader] = {
    "name": listed(name_pattern),
    "role": listed(word("role", _table(Role))),
    "module": listed(class_name),
    "min_m": positive,
    "min_n": positive,
    "min_k": positive,
}

USE: dict[str, Reader] = {
    "precision": PRECISION,
    "fprop": PRECISION,
    "dgrad": PRECISION,
    "wgrad": PRECISION,
    "elem_dtype": word("element type", ELEM_TYPES),
    "grad_dtype": word("element type", ELEM_TYPES),
    "rounding": word("rounding", _table(Rounding)),
    "weight_block": word("weight block", _table(Tile)),
    "saved": word("saved form", _table(Saved)),
}

PRESET = word("preset", PRESETS)

TOP = ("version", "preset", "rules")
RULE = ("match", "use")
