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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, TypeVar

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
    """Returns the data of `text` without the keys ``kind`` and ``schema``.

    kind: expected kind, "report" or "audit". version: expected version. Raises `OptionError` if either
    differs.
    """
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

    path: JSON path of `data` in its file, a prefix of the path in the error.
    """
    try:
        result: _T = _read_object(owner, data)
        return result
    except _FaultError as fault:
        raise OptionError(f"{path}{fault.where}: {fault}") from None


class _FaultError(Exception):
    """A fault in the data. While it propagates, each reader prepends its step of the JSON path."""

    where = ""

    def inside(self, step: str) -> _FaultError:
        self.where = step + self.where
        return self


_Reader = Callable[[Any], Any]


@functools.cache
def _fields(owner: Any) -> dict[str, tuple[Any, tuple[str, ...] | None, bool]]:
    """Returns type and allowed values of every field of the dataclass `owner`, and whether it is required."""
    hints = typing.get_type_hints(owner, include_extras=True)
    return {
        field.name: (
            hints[field.name],
            CHOICES.get((owner.__name__, field.name)),
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(owner)
    }


@functools.cache
def _reader(hint: Any, choices: tuple[str, ...] | None) -> _Reader:
    """Returns a function that checks and converts a value of type `hint`."""
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin in _OPTIONAL:
        inner = _reader(arguments[0], choices)
        return lambda data: None if data is None else inner(data)
    if origin is tuple:
        if arguments[-1] is Ellipsis:
            return functools.partial(_read_items, _reader(arguments[0], None))
        return functools.partial(_read_items, [_reader(argument, None) for argument in arguments])
    if dataclasses.is_dataclass(hint):
        return functools.partial(_read_object, hint)
    if hint == Measure:
        return _read_measure
    return functools.partial(_read_scalar, hint, choices)


def _read_object(owner: Any, data: Any) -> Any:
    if not isinstance(data, Mapping):
        raise _FaultError(f"expected an object, found {_kind(data)}")
    fields, values = _fields(owner), {}
    for key, value in data.items():
        if key not in fields:
            continue
        hint, choices, _ = fields[key]
        try:
            values[key] = _reader(hint, choices)(value)
        except _FaultError as fault:
            raise fault.inside(f".{key}") from None
    for name, (*_, required) in fields.items():
        if required and name not in data:
            raise _FaultError(f"key {name!r} is missing")
    return owner(**values)


def _read_items(readers: Sequence[_Reader] | _Reader, data: Any) -> tuple[Any, ...]:
    """Reads an array with a reader per item, or with the same reader for all items. Returns a tuple."""
    if not isinstance(data, list):
        raise _FaultError(f"expected an array, found {_kind(data)}")
    readers = [readers] * len(data) if callable(readers) else readers
    if len(data) != len(readers):
        raise _FaultError(f"expected {len(readers)} items, found {len(data)}")
    values = []
    for index, (read_item, item) in enumerate(zip(readers, data, strict=True)):
        try:
            values.append(read_item(item))
        except _FaultError as fault:
            raise fault.inside(f"[{index}]") from None
    return tuple(values)


def _read_scalar(hint: Any, choices: tuple[str, ...] | None, data: Any) -> Any:
    if type(data) is not hint and not (hint is float and type(data) is int):
        raise _FaultError(f"expected {_WORDS[hint]}, found {_kind(data)}")
    if hint in (int, float) and not 0 <= data <= _LARGEST:
        raise _FaultError(f"expected {_WORDS[hint]} from 0 to 2⁶³ − 1, found {shown(data)}")
    if choices is not None and data not in choices:
        allowed = ", ".join(choices)
        raise _FaultError(f"unknown word {shown(data)}{nearest(data, choices)}; allowed: {allowed}")
    return float(data) if hint is float else data


def _read_measure(data: Any) -> float:
    if type(data) not in (int, float) and data not in _NOT_FINITE:
        raise _FaultError(f"expected {_WORDS[float]}, found {_kind(data)}")
    return float(data)


def _kind(data: Any) -> str:
    if isinstance(data, Mapping):
        return "an object"
    if isinstance(data, list):
        return "an array"
    return "null" if data is None else shown(data)


def json_schema(owner: type[Any], version: int) -> dict[str, Any]:
    """Returns the JSON Schema (draft 2020-12) of files that hold `owner`, with ``schema`` = `version`."""
    definitions: dict[str, Any] = {}
    top = _object_schema(owner, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mxcompile report",
        **top,
        "properties": {"schema": {"const": version}, "kind": {"const": "report"}, **top["properties"]},
        "required": ["schema", *top["required"]],
        "$defs": dict(sorted(definitions.items())),
    }


def publish() -> None:
    """Writes `SCHEMA_FILE`. Run it after the dataclasses change."""
    SCHEMA_FILE.write_text(json.dumps(json_schema(ReportData, SCHEMA), indent=1) + "\n", encoding="utf-8")


def _object_schema(owner: Any, definitions: dict[str, Any]) -> dict[str, Any]:
    fields = _fields(owner)
    return {
        "type": "object",
        "properties": {
            name: _type_schema(hint, definitions, choices) for name, (hint, choices, _) in fields.items()
        },
        "required": [name for name, (*_, required) in fields.items() if required],
    }


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
