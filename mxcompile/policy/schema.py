"""The keys of a policy and how their values are read: one row each.

A `Value` reads one raw value: it gives what the model holds, or raises `Invalid` with a sentence that says
what is allowed; `parse` adds where. It also holds the same rule as JSON Schema, from which `json_schema`
makes the file that editors use.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from mxcompile.errors import not_allowed, shown
from mxcompile.formats import (
    ELEM_TYPES,
    NO_HADAMARD,
    PRECISIONS,
    Amax,
    AmaxKind,
    ElemRounding,
    Rounding,
    Scales,
)
from mxcompile.policy.model import Ends, Saved, Sent
from mxcompile.policy.presets import PRESETS
from mxcompile.policy.roles import Role

VERSION = 1
BLOCKS = ("first", "last")


class Invalid(ValueError):  # noqa: N818 - a signal inside this package, not an error users see
    """A value that its key does not allow. `index` is its place in a list or mapping, if it came in one."""

    def __init__(self, message: str, index: int | str | None = None) -> None:
        super().__init__(message)
        self.index = index


Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Value:
    """The values of one key. read: raw value to the model's. json: the values allowed, as JSON Schema."""

    read: Reader
    json: dict[str, Any]

    def says(self, description: str) -> Value:
        """The same with a description, which editors show."""
        return Value(self.read, {"description": description, **self.json})


def word(what: str, table: dict[str, Any]) -> Value:
    """One of the words of `table`; gives what the table holds for it."""

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in table:
            raise Invalid(not_allowed(what, value, table))
        return table[value]

    return Value(read, {"enum": list(table)})


def listed(single: Value) -> Value:
    """One value or a list of values; gives a tuple without repetitions."""

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            return (single.read(value),)
        if not value:
            raise Invalid("an empty list matches nothing: remove the key or name a value")
        items = []
        for index, item in enumerate(value):
            try:
                items.append(single.read(item))
            except Invalid as error:
                raise Invalid(str(error), index) from None
        return tuple(dict.fromkeys(items))

    return Value(read, {"anyOf": [single.json, {"type": "array", "items": single.json, "minItems": 1}]})


def _positive(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise Invalid(f"expected a positive integer, found {shown(value)}")
    return value


def _name_pattern(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Invalid(f"expected a glob or 're:…' over module paths, found {shown(value)}")
    space = "\n\t" if value.startswith("re:") else ""  # of a verbose expression
    hidden = next((s for s in value if unicodedata.category(s) in ("Cc", "Cf") and s not in space), None)
    if hidden is not None:
        raise Invalid(f"{shown(value)} holds the invisible character U+{ord(hidden):04X}: remove it")
    if value.startswith("re:"):
        try:
            re.compile(value.removeprefix("re:"))
        except (re.error, OverflowError, RecursionError) as error:
            raise Invalid(f"{shown(value)} is not a regular expression: {error}") from None
    return value


def _class_name(value: Any) -> str:
    if not isinstance(value, str) or not value.isidentifier():
        raise Invalid(f"expected the class name of a module, such as Linear, found {shown(value)}")
    return value


def _ends(value: Any) -> Ends:
    if not isinstance(value, dict) or not value:
        raise Invalid(
            f"expected a mapping with {' or '.join(BLOCKS)}, such as {{first: 2, last: 2}},"
            f" found {shown(value)}"
        )
    numbers = {}
    for key, number in value.items():
        if key not in BLOCKS:
            raise Invalid(not_allowed("key", key, BLOCKS), key)
        try:
            numbers[key] = _positive(number)
        except Invalid as error:
            raise Invalid(str(error), key) from None
    return Ends(**numbers)


def _version(value: Any) -> int:
    if type(value) is not int or value != VERSION:
        raise Invalid(f"this mxcompile reads policy version {VERSION}, found {shown(value)}")
    return VERSION


def _table(words: Any) -> dict[str, Any]:
    return {str(item): item for item in words}


def _words(key: str) -> list[str]:
    """The words of the tables of tiles that `key` takes."""
    tiles = [word for row in PRECISIONS.values() if row.tiles_key == key for word in row.tiles]
    return list(dict.fromkeys(tiles))


_BLOCKS = sorted(_words("block"), key=int)


def _block(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or str(value) not in _words("block"):
        raise Invalid(not_allowed("block", value, _BLOCKS))
    return str(value)


def _margin(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not -16 <= value <= 16:
        raise Invalid(f"expected a whole number from -16 to 16, found {shown(value)}")
    return value


_AMAX = {"percentile": (100.0, True), "ema": (1.0, False)}
"""By kind the upper end of its number, and whether that is allowed; 0 never is."""


def _amax(value: Any) -> Amax:
    if not isinstance(value, dict) or len(value) != 1:
        raise Invalid(f"expected {{percentile: 99.99}} or {{ema: 0.9}}, found {shown(value)}")
    ((kind, number),) = value.items()
    if kind not in _AMAX:
        raise Invalid(not_allowed("key", kind, _AMAX), kind)
    end, inclusive = _AMAX[kind]
    is_number = isinstance(number, int | float) and not isinstance(number, bool)
    if not is_number or not (0 < number < end or (inclusive and number == end)):
        raise Invalid(f"expected a number between 0 and {end:g}, found {shown(number)}", kind)
    return Amax(kind=AmaxKind(kind), value=float(number))


def _hadamard(value: Any) -> int:
    if value is False:
        return NO_HADAMARD
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 0xFFFF:
        raise Invalid(f"expected 16 signs as a number from 0 to 65535, or false, found {shown(value)}")
    return value


POSITIVE = Value(_positive, {"type": "integer", "minimum": 1})
NAME_PATTERN = Value(_name_pattern, {"type": "string", "minLength": 1})
CLASS_NAME = Value(_class_name, {"type": "string", "pattern": r"^[^\W\d]\w*$"})
_WEIGHT_BLOCKS = [tile for row in PRECISIONS.values() for tile in row.weight_blocks]


def _precision(value: Any) -> Any:
    """A row of the table; of a preset's name, the error says what a rule would say instead."""
    if isinstance(value, str) and value in PRESETS and value not in PRECISIONS:
        preset = PRESETS[value]
        key, tiles, grad = preset.precision.tiles_key, preset.formats.tiles, preset.formats.grad_elem
        says = {"precision": preset.precision, **({key: tiles[0]} if tiles else {})}
        says |= {"grad_dtype": grad} if grad else {}
        conditions = ", ".join(f"{key}: {word}" for key, word in says.items())
        raise Invalid(
            f"{value!r} is a preset, of a whole policy ('preset: {value}'); a rule says {{{conditions}}}"
        )
    return _WORDS.read(value)


_WORDS = word("precision", PRECISIONS)
PRECISION = Value(_precision, _WORDS.json)

MATCH: dict[str, Value] = {
    "name": listed(NAME_PATTERN).says(
        "Glob over the whole module path, '*' crosses dots; or 're:' and a full-match regular expression."
    ),
    "role": listed(word("role", _table(Role))).says("What the layer does, found from the graph's structure."),
    "module": listed(CLASS_NAME).says("Class name of the module that runs the layer."),
    "blocks": Value(
        _ends,
        {
            "type": "object",
            "properties": dict.fromkeys(BLOCKS, POSITIVE.json),
            "minProperties": 1,
            "additionalProperties": False,
        },
    ).says("In the first or last repeated blocks of the model, of every stack of them."),
    "min_m": POSITIVE.says("Least number of tokens of the forward GEMM."),
    "min_n": POSITIVE.says("Least number of output features."),
    "min_k": POSITIVE.says("Least number of input features."),
    "max_m": POSITIVE.says("Largest number of tokens of the forward GEMM."),
    "max_n": POSITIVE.says("Largest number of output features."),
    "max_k": POSITIVE.says("Largest number of input features."),
}

USE: dict[str, Value] = {
    "precision": PRECISION.says("Of all three GEMMs."),
    "fprop": PRECISION.says("Of y = x·Wᵀ."),
    "dgrad": PRECISION.says("Of dx = dy·W."),
    "wgrad": PRECISION.says("Of dW = dyᵀ·x."),
    "elem_dtype": word("element type", ELEM_TYPES).says("Of input and weight."),
    "grad_dtype": word("element type", ELEM_TYPES).says("Of the output gradient."),
    "rounding": word("rounding", _table(Rounding)).says(
        "How a block's scale follows from its largest value."
    ),
    "grad_rounding": word("rounding of elements", _table(ElemRounding)).says(
        "Of the output gradient's elements; stochastic is unbiased, and reproducible under a seed."
    ),
    "weight_block": word("weight block", _table(_WEIGHT_BLOCKS)).says(
        "32x32 of mxfp8, 16x16 of nvfp4: one copy of the weight serves fprop and dgrad."
    ),
    "block": Value(_block, {"enum": [int(word) for word in _BLOCKS]}).says(
        "Elements along the contraction that share a scale."
    ),
    "scaling": word("scaling", {name: name for name in _words("scaling")}).says(
        "What one FP32 scale is for: the tensor, a row along the contraction, or a block."
    ),
    "scale": word("scale", _table(Scales)).says("Of fp8: any FP32 number, or powers of two, rounded up."),
    "history": POSITIVE.says("Of scaling: delayed: how many calls a scale looks back."),
    "margin": Value(_margin, {"type": "integer", "minimum": -16, "maximum": 16}).says(
        "Of scaling: delayed: powers of two that a scale has to spare."
    ),
    "amax": Value(
        _amax,
        {
            "type": "object",
            "properties": {
                "percentile": {"type": "number", "exclusiveMinimum": 0, "maximum": 100},
                "ema": {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1},
            },
            "minProperties": 1,
            "maxProperties": 1,
            "additionalProperties": False,
        },
    ).says("What a scale follows from in the place of the largest magnitude; larger elements saturate."),
    "hadamard": Value(
        _hadamard,
        {"anyOf": [{"type": "integer", "minimum": 0, "maximum": 0xFFFF}, {"const": False}]},
    ).says("Of nvfp4: signs of the random Hadamard transform of wgrad's operands, 16 bits; false: none."),
    "saved": word("saved form", _table(Saved)).says(
        "What is kept of the input for backward; mxfp8: of what it is made from too."
    ),
    "sent": word("sent form", _table(Sent)).says(
        "What ranks exchange of input and output gradient; mxfp8: wgrad's copies are made from what arrives."
    ),
}

VERSION_VALUE = Value(_version, {"const": VERSION}).says("Of the policy language.")
PRESET = word("preset", PRESETS).says("What decides where no rule matches.")

TOP = ("version", "preset", "rules")
RULE = ("match", "use")
