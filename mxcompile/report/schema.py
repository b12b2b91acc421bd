"""The JSON form of a report, derived from its dataclasses: reading with checks, and the JSON Schema.

An object has the keys of its dataclass: those with a default may be missing, no others are allowed. A tuple
is an array. What is not as declared is one error with the place of the fault: ``$.gemms[3].formats[0].elem``.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import types
import typing
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from mxcompile.errors import OptionError, nearest, shown
from mxcompile.report.outline import KINDS, PHASES

_T = TypeVar("_T")

SCHEMA_FILE = Path(__file__).with_name("report.schema.json")
"""The JSON Schema of reports, for other people's tools."""

CHOICES: dict[tuple[str, str], tuple[str, ...]] = {
    ("OperandFormat", "operand"): ("x", "w", "dy"),
    ("OperandFormat", "elem"): ("e4m3", "e5m2"),
    ("OperandFormat", "block"): ("1x32", "32x32"),
    ("OperandFormat", "rounding"): ("rceil", "floor", "ceil", "even"),
    ("GemmRecord", "gemm"): ("fprop", "dgrad", "wgrad"),
    ("GemmRecord", "precision"): ("mxfp8", "bf16"),
    ("OutlineNode", "kind"): KINDS,
    ("OutlineNode", "phase"): PHASES,
    ("Summary", "cache"): ("hit", "miss", "partial", "off"),
}
"""Fields of a closed set of words, by class and field."""

_WORDS: dict[Any, str] = {str: "a string", int: "a whole number", float: "a number", bool: "true or false"}
_SCHEMA_TYPES: dict[Any, str] = {str: "string", int: "integer", float: "number", bool: "boolean"}


def parse(text: str) -> Any:
    """`text`, strict JSON: no NaN, no key twice. Raises `OptionError`."""
    try:
        return json.loads(text, object_pairs_hook=_object, parse_constant=_not_json)
    except RecursionError:
        raise OptionError("not JSON that a report could be: nested too deeply") from None
    except OptionError:
        raise
    except ValueError as error:
        raise OptionError(f"not JSON: {error}") from None


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise OptionError(f"not a report: an object has the key {shown(twice)} twice")
    return found


def _not_json(word: str) -> Any:
    raise OptionError(f"not JSON: {word} is not a JSON number")


def read(owner: type[_T], data: Any, where: str = "$") -> _T:
    """The dataclass `owner` from what JSON gave. Raises `OptionError` with the place of the first fault."""
    if not isinstance(data, Mapping):
        raise OptionError(f"{where}: expected an object, found {_kind(data)}")
    declared = _fields(typing.cast("Hashable", owner))
    for key in data:
        if key not in declared:
            raise OptionError(f"{where}: unknown key {shown(key)}{nearest(key, declared)}")
    values = {}
    for name, (hint, required) in declared.items():
        if name in data:
            values[name] = _value(hint, data[name], f"{where}.{name}", CHOICES.get((owner.__name__, name)))
        elif required:
            raise OptionError(f"{where}: key {name!r} is missing")
    return owner(**values)


@functools.cache
def _fields(owner: Any) -> dict[str, tuple[Any, bool]]:
    """Type of every field of the dataclass `owner`, and whether it has no default."""
    hints = typing.get_type_hints(owner)
    return {
        field.name: (
            hints[field.name],
            field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING,
        )
        for field in dataclasses.fields(owner)
    }


def _value(hint: Any, data: Any, where: str, choices: tuple[str, ...] | None = None) -> Any:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return None if data is None else _value(arguments[0], data, where, choices)
    if origin is tuple:
        if not isinstance(data, list):
            raise OptionError(f"{where}: expected an array, found {_kind(data)}")
        if arguments[-1] is not Ellipsis and len(data) != len(arguments):
            raise OptionError(f"{where}: expected {len(arguments)} items, found {len(data)}")
        return tuple(_value(arguments[0], item, f"{where}[{i}]") for i, item in enumerate(data))
    if dataclasses.is_dataclass(hint):
        return read(typing.cast("type[Any]", hint), data, where)
    return _scalar(hint, data, where, choices)


def _scalar(hint: Any, data: Any, where: str, choices: tuple[str, ...] | None) -> Any:
    allowed = (int, float) if hint is float else (hint,)
    if not isinstance(data, allowed) or (isinstance(data, bool) and hint is not bool):
        raise OptionError(f"{where}: expected {_WORDS[hint]}, found {_kind(data)}")
    if hint in (int, float) and data < 0:
        raise OptionError(f"{where}: expected {_WORDS[hint]} from 0 on, found {shown(data)}")
    if choices is not None and data not in choices:
        listed = ", ".join(choices)
        raise OptionError(
            f"{where}: unknown word {shown(data)}{nearest(str(data), choices)}; allowed: {listed}"
        )
    return float(data) if hint is float else data


def _kind(data: Any) -> str:
    if isinstance(data, Mapping):
        return "an object"
    if isinstance(data, list):
        return "an array"
    return "null" if data is None else shown(data)


def json_schema(owner: type[Any], version: int) -> dict[str, Any]:
    """The JSON Schema (draft 2020-12) of files that hold `owner` and a ``schema`` key of value `version`."""
    definitions: dict[str, Any] = {}
    top = _object_schema(owner, definitions)
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "mxcompile report",
        **top,
        "properties": {"schema": {"const": version}, **top["properties"]},
        "required": ["schema", *top["required"]],
        "$defs": dict(sorted(definitions.items())),
    }


def publish() -> None:
    """Write `SCHEMA_FILE` anew, after a change of the classes."""
    from mxcompile.report.record import SCHEMA
    from mxcompile.report.report import Report

    SCHEMA_FILE.write_text(json.dumps(json_schema(Report, SCHEMA), indent=1) + "\n", encoding="utf-8")


def _object_schema(owner: type[Any], definitions: dict[str, Any]) -> dict[str, Any]:
    fields = _fields(typing.cast("Hashable", owner))
    return {
        "type": "object",
        "properties": {
            name: _type_schema(hint, definitions, CHOICES.get((owner.__name__, name)))
            for name, (hint, _) in fields.items()
        },
        "required": [name for name, (_, required) in fields.items() if required],
        "additionalProperties": False,
    }


def _type_schema(hint: Any, definitions: dict[str, Any], choices: tuple[str, ...] | None) -> dict[str, Any]:
    origin, arguments = typing.get_origin(hint), typing.get_args(hint)
    if origin is types.UnionType:
        return {"anyOf": [_type_schema(arguments[0], definitions, choices), {"type": "null"}]}
    if origin is tuple:
        array: dict[str, Any] = {"type": "array", "items": _type_schema(arguments[0], definitions, None)}
        if arguments[-1] is not Ellipsis:
            array |= {"minItems": len(arguments), "maxItems": len(arguments)}
        return array
    if dataclasses.is_dataclass(hint):
        name = typing.cast("type[Any]", hint).__name__
        if name not in definitions:
            definitions[name] = {}
            definitions[name] = _object_schema(typing.cast("type[Any]", hint), definitions)
        return {"$ref": f"#/$defs/{name}"}
    schema: dict[str, Any] = {"type": _SCHEMA_TYPES[hint]}
    if hint in (int, float):
        schema["minimum"] = 0
    return schema | ({"enum": list(choices)} if choices else {})
