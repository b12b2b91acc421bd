"""The JSON form of a report, derived from its dataclasses: a checked reader and the JSON Schema.

The keys of an object are the fields of its dataclass. Fields with a default may be missing. Unknown keys are
skipped, because a later version may write more fields. A tuple is an array. Invalid data raises one error
with a JSON path, for example ``$.gemms[3].formats[0].elem``. A file states its kind (``kind``) and the
version of its form (``schema``).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

from mxcompile.errors import OptionError, nearest, shown
from mxcompile.formats import PRECISIONS, ElemRounding, precisions
from mxcompile.report.data.outline import KINDS, PHASES
from mxcompile.report.data.record import SCHEMA, STORED, ReportData

_T = TypeVar("_T")

SCHEMA_FILE = Path(__file__).parents[1] / "report.schema.json"
"""The published JSON Schema of reports, for third-party tools."""

KINDS_OF_FILES = ("report", "audit")

CHOICES: dict[tuple[str, str], tuple[str, ...]] = {
    ("OperandFormat", "operand"): ("x", "w", "dy"),
    ("OperandFormat", "elem"): precisions.elem_words(),
    ("OperandFormat", "block"): precisions.tile_words(),
    ("OperandFormat", "rounding"): (*precisions.derivation_words(), STORED),
    ("OperandFormat", "elements"): tuple(map(str, ElemRounding)),
    ("GemmRecord", "gemm"): ("fprop", "dgrad", "wgrad"),
    ("GemmRecord", "precision"): tuple(PRECISIONS),
    ("OutlineNode", "kind"): KINDS,
    ("OutlineNode", "phase"): PHASES,
    ("Summary", "cache"): ("hit", "miss", "partial", "off"),
}
"""Allowed values of fields with a closed vocabulary, by class and field."""

Measure = Annotated[float, "of any sign, finite or not"]
"""A number of any sign. JSON has no form for inf, -inf and nan, so files hold these as strings."""

_NOT_FINITE = ("inf", "-inf", "nan")
_LARGEST = 2**63 - 1
_OPTIONAL = (types.UnionType, typing.Union)
_WORDS: dict[Any, str] = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_SCHEMA_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def opened(text: str, kind: str, version: int) -> dict[str, Any]:
    """Returns the data of `text` without its kind and version. Raises `OptionError` if either differs."""
    data = parse(text)
    if not isinstance(data, dict) or "schema" not in data:
        raise OptionError(f"$: not an mxcompile {kind}: no key 'schema'")
    number, word = data.pop("schema"), _kind_of(data)
    data.pop("kind", None)
    if word != kind:
        raise OptionError(f"$.kind: this is an mxcompile {word}, where an mxcompile {kind} was expected")
    if type(number) is not int or number != version:
        newer = type(number) is int and number > version
        hint = "; a newer mxcompile wrote it: read it with that version" if newer else ""
        raise OptionError(f"$.schema: {shown(number)} is not {version}, which this mxcompile reads{hint}")
    return data


def kind_of(text: str) -> str:
    """Returns the kind of an mxcompile JSON file, "report" or "audit". Raises `OptionError` otherwise."""
    data = parse(text)
    return _kind_of(data) if isinstance(data, dict) else "report"


def _kind_of(data: dict[str, Any]) -> str:
    """Returns the value of ``kind``, or the kind of a file that was written before the key existed."""
    kind = data.get("kind", "audit" if "numerics" in data else "report")
    if kind not in KINDS_OF_FILES:
        allowed = ", ".join(KINDS_OF_FILES)
        raise OptionError(f"$.kind: unknown word {shown(kind)}; allowed: {allowed}")
    return str(kind)


def parse(text: str) -> Any:
    """Returns the data of `text`. Raises `OptionError` for NaN, duplicate keys and other invalid JSON."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_not_json)
    except RecursionError:
        raise OptionError("not a report: its JSON is nested too deeply") from None
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"not JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise OptionError(f"not a report: an object has the key {shown(twice)} twice")
    return mapping


def _not_json(word: str) -> Any:
    raise OptionError(f"not JSON: {word} is not a JSON number")


def read(owner: type[_T], data: Any, path: str = "$") -> _T:
    """Returns a dataclass `owner` with the parsed JSON `data`. Raises `OptionError` at the first fault.

    path: JSON path of `data` in its file, for the error.
    """
    if not isinstance(data, Mapping):
        raise OptionError(f"{path}: expected an object, found {_kind(data)}")
    fields = _fields(typing.cast("Any", owner))  # mypy: a type variable is not hashable
    values = {
        key: _value(fields[key].hint, fields[key].choices, value, f"{path}.{key}")
        for key, value in data.items()
        if key in fields
    }
    for name, field in fields.items():
        if field.required and name not in data:
            raise OptionError(f"{path}: key {name!r} is missing")
    return owner(**values)


class _Field(NamedTuple):
    """Type and allowed values of a field of a dataclass, and whether a file must have it."""

    hint: Any
    choices: tuple[str, ...] | None
    required: bool


@functools.cache
def _fields(owner: Any) -> dict[str, _Field]:
    hints = typing.get_type_hints(owner, include_extras=True)
    return {
        field.name: _Field(
            hints[field.name],
            CHOICES.get((owner.__name__, field.name)),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(owner)
    }


def _value(hint: Any, choices: tuple[str, ...] | None, data: Any, path: str) -> Any:
    """Returns `data`, which is at `path`, as a value of type `hint`. Raises `OptionError`."""
    if hint in _WORDS:
        return _scalar(hint, choices, data, path)
    if hint == Measure:
        if type(data) not in (int, float) and data not in _NOT_FINITE:
            raise OptionError(f"{path}: expected {_WORDS[float]}, found {_kind(data)}")
        return float(data)
    if dataclasses.is_dataclass(hint):
        return read(typing.cast("type[Any]", hint), data, path)
    arguments = typing.get_args(hint)
    if typing.get_origin(hint) in _OPTIONAL:
        return None if data is None else _value(arguments[0], choices, data, path)
    if not isinstance(data, list):
        raise OptionError(f"{path}: expected an array, found {_kind(data)}")
    hints = [arguments[0]] * len(data) if arguments[-1] is Ellipsis else arguments
    if len(data) != len(hints):
        raise OptionError(f"{path}: expected {len(hints)} items, found {len(data)}")
    pairs = enumerate(zip(hints, data, strict=True))
    return tuple(_value(of_item, None, item, f"{path}[{index}]") for index, (of_item, item) in pairs)


def _scalar(hint: Any, choices: tuple[str, ...] | None, data: Any, path: str) -> Any:
    if type(data) is not hint and not (hint is float and type(data) is int):
        raise OptionError(f"{path}: expected {_WORDS[hint]}, found {_kind(data)}")
    if hint in (int, float) and not 0 <= data <= _LARGEST:
        raise OptionError(f"{path}: expected {_WORDS[hint]} from 0 to 2⁶³ − 1, found {shown(data)}")
    if choices is not None and data not in choices:
        allowed = ", ".join(choices)
        raise OptionError(f"{path}: unknown word {shown(data)}{nearest(data, choices)}; allowed: {allowed}")
    return float(data) if hint is float else data


def _kind(data: Any) -> str:
    if isinstance(data, Mapping):
        return "an object"
    if isinstance(data, list):
        return "an array"
    return "null" if data is None else shown(data)


def json_schema() -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of reports."""
    definitions: dict[str, Any] = {}
    top = _object_schema(ReportData, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mxcompile report",
        **top,
        "properties": {"schema": {"const": SCHEMA}, "kind": {"const": "report"}, **top["properties"]},
        "required": ["schema", *top["required"]],
        "$defs": dict(sorted(definitions.items())),
    }


def publish() -> None:
    """Writes `SCHEMA_FILE`. Run it after the dataclasses change."""
    SCHEMA_FILE.write_text(json.dumps(json_schema(), indent=1) + "\n", encoding="utf-8")


def _object_schema(owner: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    fields = _fields(owner)
    properties = {name: _type_schema(f.hint, definitions, f.choices) for name, f in fields.items()}
    required = [name for name, field in fields.items() if field.required]
    return {"type": "object", "properties": properties, "required": required}


def _type_schema(hint: Any, definitions: dict[str, Any], choices: tuple[str, ...] | None) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _OPTIONAL:
        return {"anyOf": [_type_schema(arguments[0], definitions, choices), {"type": "null"}]}
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return {"type": "array", "items": _type_schema(arguments[0], definitions, None)}
        count = len(arguments)
        items = [_type_schema(argument, definitions, None) for argument in arguments]
        same = all(item == items[0] for item in items)
        members: dict[str, Any] = {"items": items[0]} if same else {"prefixItems": items}
        return {"type": "array", **members, "minItems": count, "maxItems": count}
    if dataclasses.is_dataclass(hint):
        name = typing.cast("type[Any]", hint).__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object_schema(typing.cast("type[Any]", hint), definitions)
        return {"$ref": f"#/$defs/{name}"}
    schema: dict[str, Any] = {"type": _SCHEMA_TYPES[hint]}
    if hint in (int, float):
        schema |= {"minimum": 0, "maximum": _LARGEST}
    return schema | ({"enum": list(choices)} if choices else {})
