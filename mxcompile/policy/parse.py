"""Converts raw data (YAML or dict) to rules and checks every key and value; errors contain the place."""

from __future__ import annotations

import pathlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from mxcompile.errors import PolicyError, not_allowed, shown
from mxcompile.formats import PRECISIONS, AmaxKind, ScaleType, Tile
from mxcompile.policy import schema
from mxcompile.policy.model import Backward, Match, Preset, Rule, Use
from mxcompile.policy.presets import DEFAULT, PRESETS
from mxcompile.policy.roles import ATTENTION_PRODUCTS
from mxcompile.policy.shadow import Shadows
from mxcompile.policy.values import PRECISION, VERSION, VERSION_VALUE, Invalid, Value
from mxcompile.policy.yaml_data import MAX_BYTES, Path, YamlProblem, load


@dataclass(frozen=True, slots=True)
class Location:
    """The location of a value in raw data, for errors: its path in a dict, or in a file with line numbers."""

    label: str
    lines: Mapping[Path, int] = field(default_factory=dict)
    path: Path = ()

    def at(self, *steps: Any) -> Self:
        """Returns the location of a value inside this value."""
        return replace(self, path=(*self.path, *steps))

    def error(self, message: str) -> PolicyError:
        """Returns a `PolicyError` that names the path and, for a file, the line."""
        location = f"{self.label}:{self.line}" if self.line else self.label
        return PolicyError(f"{location}: {self._dotted}{message}")

    def sentence(self, message: str) -> str:
        """Returns `message` with the path and, for a file, the line."""
        return f"{f'line {self.line}: ' if self.line else ''}{self._dotted}{message}"

    @property
    def line(self) -> int:
        """The line where the path, or its longest known prefix, begins; 0 without lines."""
        prefixes = (self.path[:end] for end in range(len(self.path), -1, -1))
        return next((self.lines[prefix] for prefix in prefixes if prefix in self.lines), 0)

    @property
    def _dotted(self) -> str:
        text = ""
        for step in self.path:
            plain = isinstance(step, str) and step.isidentifier()
            text += f".{step}" if plain else f"[{shown(step)}]"
        return f"{text.removeprefix('.')}: " if text else ""


def read_file(path: pathlib.Path) -> bytes:
    """Returns the bytes of the file `path`, at most one more than a policy may have. Raises `PolicyError`."""
    try:
        with path.open("rb") as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise PolicyError(f"{path}: cannot be read: {error.strerror}") from None
    except ValueError as error:  # not a legal file name, for example with a null byte
        raise PolicyError(f"{shown(str(path))}: cannot be read: {error}") from None


def load_yaml(raw: bytes, label: str) -> tuple[Any, Location]:
    """Returns the data of the YAML document `raw`, and its location `label`. Raises `PolicyError`."""
    try:
        data, lines = load(raw)
    except YamlProblem as problem:
        location = f"{label}:{problem.line}" if problem.line else label
        raise PolicyError(f"{location}: {problem}") from None
    return data, Location(label, lines)


def parse_data(data: Any, source: Location) -> tuple[str, tuple[Rule, ...]]:
    """Returns preset name and rules of `data`, a mapping with version, preset and rules."""
    if not isinstance(data, dict):
        kind = "nothing" if data is None else type(data).__name__
        raise source.error(
            f"a policy must be a mapping with the keys {_words(schema.TOP)}, found {kind}:"
            f" start with 'version: {VERSION}'"
        )
    _check_keys(data, schema.TOP, source)
    if "version" not in data:
        raise source.error(f"the key 'version' is missing: add 'version: {VERSION}'")
    _read(VERSION_VALUE, data["version"], source.at("version"))
    preset = data.get("preset", DEFAULT)
    _read(schema.PRESET, preset, source.at("preset"))
    raw_rules = [] if data.get("rules") is None else data["rules"]
    if not isinstance(raw_rules, list):
        raise source.at("rules").error(f"expected a list of rules, found {type(raw_rules).__name__}")
    rules: list[Rule] = []
    shadows = Shadows()
    for index, raw in enumerate(raw_rules):
        rule = _parse_rule(raw, PRESETS[preset], source.at("rules", index))
        if earlier := shadows.add(rule.match):
            lines = [str(line) for number in earlier if (line := source.at("rules", number - 1).line)]
            where = f" (line{'s' * (len(earlier) > 1)} {', '.join(lines)})" if lines else ""
            raise source.at("rules", index).error(
                f"rule {index + 1} can never fire, because all its layers are decided by"
                f" {rule_words(earlier)}{where}; move it up or remove it"
            )
        rules.append(rule)
    return preset, tuple(rules)


def rule_words(numbers: Sequence[int]) -> str:
    """Returns the rules as text: ``rule 1`` or ``rules 1, 3``."""
    return f"rule{'s' * (len(numbers) > 1)} {_words(numbers)}"


def _parse_rule(raw: Any, preset: Preset, source: Location) -> Rule:
    if not isinstance(raw, dict):
        raise source.error(
            f"a rule must be a mapping with the keys {_words(schema.RULE)}, found {shown(raw)}"
        )
    _check_keys(raw, schema.RULE, source)
    for key in schema.RULE:
        if key not in raw:
            raise source.error(f"the key {key!r} is missing: a rule has both, {_words(schema.RULE)}")
    match = _parse_match(raw["match"], source.at("match"))
    use = _parse_use(raw["use"], source.at("use"))
    _check_choices(raw["use"], use, preset, source.at("use"))
    products = [role for role in match.role if role in ATTENTION_PRODUCTS]
    if products and use.quantizes:
        raise source.at("match", "role").error(
            f"{products[0]} is an attention product, which stays in BF16; remove it from the rule"
        )
    return Rule(match=match, use=use)


def _parse_match(raw: Any, source: Location) -> Match:
    if not isinstance(raw, dict) or not raw:
        words = _words(schema.MATCH)
        raise source.error(f"expected a mapping with at least one of {words}, found {shown(raw)}")
    _check_keys(raw, schema.MATCH, source)
    match = Match(**{key: _read(schema.MATCH[key], raw[key], source.at(key)) for key in raw})
    for letter in "mnk":
        least, largest = getattr(match, f"min_{letter}"), getattr(match, f"max_{letter}")
        if 0 < largest < least:
            raise source.at(f"max_{letter}").error(
                f"no size is at least min_{letter} {least} and at most max_{letter} {largest}"
            )
    return match


def _parse_use(raw: Any, source: Location) -> Use:
    if isinstance(raw, str):
        precision = _read(PRECISION, raw, source)
        return Use(fprop=precision, dgrad=precision, wgrad=precision)
    if not isinstance(raw, dict) or not raw:
        raise source.error(
            f"expected {_words(PRECISIONS)} or a mapping with some of {_words(schema.USE)},"
            f" found {shown(raw)}"
        )
    _check_keys(raw, schema.USE, source)
    values = {key: _read(schema.USE[key], raw[key], source.at(key)) for key in raw}
    gemms = [gemm for gemm in ("fprop", "dgrad", "wgrad") if gemm in values]
    if "precision" in values:
        if gemms:
            raise source.at(gemms[0]).error(
                f"give either 'precision' for all three GEMMs or {_words(gemms)}, not both"
            )
        precision = values.pop("precision")
        values |= {"fprop": precision, "dgrad": precision, "wgrad": precision}
    others = [gemm for gemm in gemms if gemm != "fprop"]
    if others and values.get("backward") is Backward.DEQUANTIZED:
        raise source.at(others[0]).error(
            f"'backward: dequantized' leaves dgrad and wgrad in the model's dtype: remove {_words(others)}"
        )
    return Use(**values)


def _check_choices(raw: Any, use: Use, preset: Preset, source: Location) -> None:
    """Raises `PolicyError` for a choice that applies to no precision that the rule may select."""
    chosen = [row for row in (use.fprop, use.dgrad, use.wgrad) if row is not None]
    rows = {row.name: row for row in chosen if row.quantizes} or {preset.precision.name: preset.precision}
    settings = raw if isinstance(raw, dict) else {}
    means = frozenset[str]().union(*map(schema.keys_of, rows.values()))
    for key in settings:
        if schema.USE[key].means is not None and key not in means:
            has = f"it has {_words(sorted(means))}" if means else "it has no choices"
            raise source.at(key).error(f"{key!r} does not belong to {_words(rows)}: {has}")
    for key in settings:
        needed, word = schema.USE[key].needs or ("", "")
        if needed and getattr(use, needed) != word:
            raise source.at(key).error(f"{key!r} needs {needed}: {word}")
    formats = [row.formats(use.over(preset.formats)).x for row in rows.values()]
    if use.amax is not None and any(fmt.amax.kind is AmaxKind.DELAYED for fmt in formats):
        raise source.at("amax").error(
            "'amax' cannot be combined with scaling: delayed, whose scales follow from a history"
        )
    is_tensor = all(fmt.scale is ScaleType.FP32 and fmt.tile == Tile.TENSOR for fmt in formats)
    if use.amax is not None and use.amax.stateful and not is_tensor:
        raise source.at("amax").error("'ema' needs one scale a tensor (precision: fp8, scaling: tensor)")
    for key in settings:
        allowed = schema.USE[key].allowed
        choices = [] if allowed is None else [value for row in rows.values() for value in allowed(row)]
        if choices and (choice := getattr(use, key)) not in choices:
            raise source.at(key).error(
                f"{choice} does not belong to {_words(rows)}: it has {_words(choices)}"
            )
    if use.weight_block is not None and use.block not in (None, "32"):
        raise source.at("weight_block").error("'weight_block' needs block: 32")


def _check_keys(raw: dict[Any, Any], allowed: Collection[str], source: Location) -> None:
    for key in raw:
        if key not in allowed:
            raise source.at(key).error(not_allowed("key", key, allowed))


def _read(kind: Value, value: Any, source: Location) -> Any:
    try:
        return kind.read(value)
    except Invalid as invalid:
        steps = () if invalid.index is None else (invalid.index,)
        raise source.at(*steps).error(str(invalid)) from None


def _words(items: Iterable[Any]) -> str:
    return ", ".join(str(item) for item in items)
