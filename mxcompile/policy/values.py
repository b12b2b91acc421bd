"""Readers, writers and JSON Schemas of the values of policy keys.

A `Value` converts one raw value for the model, or raises `Invalid` with the allowed values. `parse` adds the
place.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mxcompile.errors import not_allowed, shown
from mxcompile.formats import NO_HADAMARD, PRECISIONS, Amax, AmaxKind, Precision
from mxcompile.formats.four_over_six import BOUNDS, BlockError, FourOverSix
from mxcompile.policy.model import Ends, StepRange
from mxcompile.policy.presets import PRESETS

VERSION = 1
BLOCKS = ("first", "last")
STEPS = ("first", "last", "of", "from", "until")


class Invalid(ValueError):  # noqa: N818 - a signal inside this package, not an error users see
    """An illegal value. index: its index or key if it is inside a list or mapping."""

    def __init__(self, message: str, index: int | str | None = None) -> None:
        super().__init__(message)
        self.index = index


Reader = Callable[[Any], Any]


@dataclass(frozen=True, slots=True)
class Value:
    """The values of one key, which is the name of a field of `Match` or `Use`.

    read: converts a raw value to the model's. json: JSON Schema of the raw value. write: converts the model's
    value to a raw one. means: whether a precision has the key; None if every precision has it. allowed: the
    values that a precision has, if precisions differ. needs: another key and the value it must have.
    """

    read: Reader
    json: dict[str, Any]
    write: Callable[[Any], Any] = str
    means: Callable[[Precision], bool] | None = None
    allowed: Callable[[Precision], Sequence[Any]] | None = None
    needs: tuple[str, str] | None = None

    def says(self, description: str, **facts: Any) -> Value:
        """Returns a copy with a description, which editors show, and with the fields in `facts` replaced."""
        return replace(self, json={"description": description, **self.json}, **facts)


def word(noun: str, table: dict[str, Any]) -> Value:
    """Returns the `Value` of a key: its words are the keys of `table`, and mean the entries of `table`."""

    def read(value: Any) -> Any:
        if not isinstance(value, str) or value not in table:
            raise Invalid(not_allowed(noun, value, table))
        return table[value]

    return Value(read, {"enum": list(table)})


def listed(single: Value) -> Value:
    """Returns the `Value` of a raw value or a list of raw values, read as a tuple without duplicates."""

    def read(value: Any) -> Any:
        if not isinstance(value, list):
            return (single.read(value),)
        if not value:
            raise Invalid("an empty list matches nothing: remove the key or name a value")
        return tuple(dict.fromkeys(_inside(index, item, single.read) for index, item in enumerate(value)))

    def write(values: tuple[Any, ...]) -> Any:
        words = [str(item) for item in values]
        return words[0] if len(words) == 1 else words

    json = {"anyOf": [single.json, {"type": "array", "items": single.json, "minItems": 1}]}
    return Value(read, json, write)


def _inside(key: int | str, value: Any, reader: Reader) -> Any:
    """Returns `reader(value)`. An `Invalid` names `key`."""
    try:
        return reader(value)
    except Invalid as error:
        raise Invalid(str(error), key) from None


def _whole(form: str, least: int, most: int | None = None) -> Value:
    """Returns the `Value` of a whole number from `least` to `most`. form: the expected form, for errors."""

    def read(value: Any) -> int:
        is_whole = isinstance(value, int) and not isinstance(value, bool)
        if not is_whole or value < least or (most is not None and value > most):
            raise Invalid(f"expected {form}, found {shown(value)}")
        return int(value)

    limits = {"minimum": least} | ({} if most is None else {"maximum": most})
    return Value(read, {"type": "integer", **limits}, int)


POSITIVE = _whole("a positive integer", 1)
MARGIN = _whole("a whole number from -16 to 16", -16, 16)
_STEP = _whole("a step, an integer from 0", 0)
_SIGNS = _whole("16 signs as a number from 0 to 65535, or false", 0, 0xFFFF)


def _name_pattern(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise Invalid(f"expected a glob or 're:…' over module paths, found {shown(value)}")
    space = "\n\t" if value.startswith("re:") else ""  # verbose expressions may have newlines and tabs
    hidden = next((s for s in value if unicodedata.category(s) in ("Cc", "Cf") and s not in space), None)
    if hidden is not None:
        raise Invalid(f"{shown(value)} contains the invisible character U+{ord(hidden):04X}: remove it")
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
        numbers[key] = _inside(key, number, POSITIVE.read)
    return Ends(**numbers)


def _share(value: Any, total: int | None, key: str) -> int:
    """Returns `value`, a positive integer or a percentage of `total` such as "10%", as a number of steps."""
    percent = re.fullmatch(r"(\d+(?:\.\d+)?) ?%", value) if isinstance(value, str) else None
    if percent is None:
        steps: int = _inside(key, value, POSITIVE.read)
        if total is not None and steps > total:
            raise Invalid(f"a run of {total} steps has no {steps}", key)
        return steps
    if total is None:
        raise Invalid(f"{value!r} needs the number of steps of the whole run: add 'of: 10000'", key)
    if not 0 < float(percent[1]) <= 100:
        raise Invalid(f"expected more than 0 % and at most 100 %, found {value!r}", key)
    return round(total * float(percent[1]) / 100)


_RANGES = ({"first"}, {"first", "of"}, {"last"}, {"last", "of"}, {"from"}, {"from", "until"})


def _steps(value: Any) -> StepRange:
    for key in value if isinstance(value, dict) else ():
        if key not in STEPS:
            raise Invalid(not_allowed("key", key, STEPS), key)
    if not isinstance(value, dict) or set(value) not in _RANGES:
        raise Invalid(
            "expected {first: 100}, {last: 10 %, of: 10000} or {from: 100, until: 200},"
            f" found {shown(value)}"
        )
    total = _inside("of", value["of"], POSITIVE.read) if "of" in value else None
    if "first" in value:
        return StepRange(stop=_share(value["first"], total, "first"))
    if "last" in value:
        if total is None:
            raise Invalid("'last' needs the number of steps of the whole run: add 'of: 10000'")
        return StepRange(start=total - _share(value["last"], total, "last"))
    start = _inside("from", value["from"], _STEP.read)
    stop = _inside("until", value["until"], _STEP.read) if "until" in value else None
    if stop is not None and stop <= start:
        raise Invalid(f"no step is at least {start} and less than {stop}", "until")
    return StepRange(start=start, stop=stop)


def _raw_steps(steps: StepRange) -> dict[str, int]:
    if not steps.start and steps.stop is not None:
        return {"first": steps.stop}
    return {"from": steps.start} | ({} if steps.stop is None else {"until": steps.stop})


def _version(value: Any) -> int:
    if type(value) is not int or value != VERSION:
        raise Invalid(f"this mxcompile reads policy version {VERSION}, found {shown(value)}")
    return VERSION


def table(words: Iterable[Any]) -> dict[str, Any]:
    """Returns `words` by their spelling in a policy."""
    return {str(item): item for item in words}


def tile_choices(key: str) -> list[str]:
    """Returns the tile words of all precisions whose tiles are set by `key`."""
    tiles = [word for row in PRECISIONS.values() if row.tiles_key == key for word in row.tiles]
    return list(dict.fromkeys(tiles))


_BLOCKS = sorted(tile_choices("block"), key=int)


def _block(value: Any) -> str:
    if isinstance(value, bool) or not isinstance(value, int) or str(value) not in _BLOCKS:
        raise Invalid(not_allowed("block", value, _BLOCKS))
    return str(value)


_AMAX = {"percentile": (100.0, True), "ema": (1.0, False)}
"""Upper bound of the number of each kind, and whether the bound is allowed. The lower bound 0 is excluded."""


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


_OPERANDS = ("x", "w", "dy")
_Choices = tuple[tuple[str, FourOverSix], ...]


def _four_over_six(value: Any) -> _Choices:
    sides = dict(value) if isinstance(value, dict) else {}
    error = sides.pop("error", str(BlockError.MAE))
    if not sides:
        raise Invalid(
            f"expected operands and largest scales, such as {{x: 256, w: 256}}, found {shown(value)}"
        )
    if error not in list(BlockError):
        raise Invalid(not_allowed("error", error, list(BlockError)), "error")
    for operand, bound in sides.items():
        if operand not in _OPERANDS:
            raise Invalid(not_allowed("key", operand, (*_OPERANDS, "error")), operand)
        if isinstance(bound, bool) or bound not in BOUNDS:
            raise Invalid(not_allowed("largest scale", bound, map(str, BOUNDS)), operand)
    choices = {operand: FourOverSix(bound=bound, error=BlockError(error)) for operand, bound in sides.items()}
    return tuple((operand, choices[operand]) for operand in _OPERANDS if operand in choices)


def _raw_four_over_six(choices: _Choices) -> dict[str, Any]:
    _, first = choices[0]
    error = {} if first.error is BlockError.MAE else {"error": str(first.error)}
    return {operand: choice.bound for operand, choice in choices} | error


def mapping(properties: dict[str, Any], **limits: Any) -> dict[str, Any]:
    """Returns the schema of a mapping with no keys but `properties`. limits: further keywords."""
    return {"type": "object", "properties": properties, **limits, "additionalProperties": False}


NAME_PATTERN = Value(_name_pattern, {"type": "string", "minLength": 1})
CLASS_NAME = Value(_class_name, {"type": "string", "pattern": r"^[^\W\d]\w*$"})
ENDS = Value(
    _ends,
    mapping(dict.fromkeys(BLOCKS, POSITIVE.json), minProperties=1),
    lambda ends: {key: getattr(ends, key) for key in BLOCKS if getattr(ends, key)},
)
_PERCENT = {"type": "string", "pattern": r"^\d+(\.\d+)? ?%$"}
_SHARE = {"anyOf": [POSITIVE.json, _PERCENT]}
STEP_RANGE = Value(
    _steps,
    {
        "anyOf": [
            mapping({"first": POSITIVE.json, "of": POSITIVE.json}, required=["first"]),
            mapping({"first": _PERCENT, "of": POSITIVE.json}, required=["first", "of"]),
            mapping({"last": _SHARE, "of": POSITIVE.json}, required=["last", "of"]),
            mapping({"from": _STEP.json, "until": _STEP.json}, required=["from"]),
        ]
    },
    _raw_steps,
)
BLOCK = Value(_block, {"enum": [int(word) for word in _BLOCKS]}, int)
_PERCENTILE = {"type": "number", "exclusiveMinimum": 0, "maximum": 100}
_DECAY = {"type": "number", "exclusiveMinimum": 0, "exclusiveMaximum": 1}
AMAX = Value(
    _amax,
    mapping({"percentile": _PERCENTILE, "ema": _DECAY}, minProperties=1, maxProperties=1),
    lambda amax: {str(amax.kind): amax.value},
)
HADAMARD = Value(
    lambda value: NO_HADAMARD if value is False else _SIGNS.read(value),
    {"anyOf": [_SIGNS.json, {"const": False}]},
    lambda signs: signs != NO_HADAMARD and signs,
)
_SCALES = {operand: {"enum": list(BOUNDS)} for operand in _OPERANDS}
FOUR_OVER_SIX = Value(
    _four_over_six,
    mapping(
        {**_SCALES, "error": {"enum": list(map(str, BlockError))}},
        anyOf=[{"required": [operand]} for operand in _OPERANDS],
    ),
    _raw_four_over_six,
)
VERSION_VALUE = Value(_version, {"const": VERSION}).says("Version of the policy language.")
WEIGHT_BLOCKS = [tile for row in PRECISIONS.values() for tile in row.weight_blocks]


def _precision(value: Any) -> Any:
    """Returns a row of `PRECISIONS`. For the name of a preset, the error suggests keys for the rule."""
    if isinstance(value, str) and value in PRESETS and value not in PRECISIONS:
        preset = PRESETS[value]
        keys = (preset.precision.tiles_key, "grad_dtype")
        says = {"precision": preset.precision} | {key: getattr(preset.formats, key, None) for key in keys}
        conditions = ", ".join(f"{key}: {choice}" for key, choice in says.items() if choice)
        raise Invalid(
            f"{value!r} is a preset of a whole policy ('preset: {value}'); in a rule write {{{conditions}}}"
        )
    return _WORDS.read(value)


_WORDS = word("precision", PRECISIONS)
PRECISION = Value(_precision, _WORDS.json)
