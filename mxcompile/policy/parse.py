"""Converts raw data (YAML or dict) to rules and checks every key and value; errors contain the place."""

from __future__ import annotations

import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from mxcompile.errors import PolicyError, not_allowed, shown
from mxcompile.formats import PRECISIONS, AmaxKind, ScaleType, Tile
from mxcompile.policy import schema
from mxcompile.policy.model import Backward, Match, Preset, Rule, Use
from mxcompile.policy.presets import DEFAULT, PRESETS
from mxcompile.policy.roles import ATTENTION_PRODUCTS
from mxcompile.policy.shadow import Shadows
from mxcompile.policy.values import PRECISION, VERSION, VERSION_VALUE, Invalid, Value
from mxcompile.policy.yaml_data import MAX_BYTES, Path, YamlProblem, load


class Origin:
    """The source of raw data, for errors: a dict, or a file with line numbers."""

    def __init__(self, label: str, lines: dict[Path, int] | None = None) -> None:
        self.label = label
        self.lines = lines or {}

    def error(self, path: Path, message: str) -> PolicyError:
        """Returns a `PolicyError` that names `path` and, for a file, its line."""
        line = self.line(path)
        location = f"{self.label}:{line}" if line else self.label
        return PolicyError(f"{location}: {_dotted(path)}{message}")

    def sentence(self, path: Path, message: str) -> str:
        """Returns `message` with `path` and, for a file, its line."""
        line = self.line(path)
        return f"{f'line {line}: ' if line else ''}{_dotted(path)}{message}"

    def line(self, path: Path) -> int:
        """Returns the line where `path`, or its longest known prefix, begins; 0 without lines."""
        ends = range(len(path), -1, -1)
        return next((self.lines[path[:end]] for end in ends if path[:end] in self.lines), 0)


def _dotted(path: Path) -> str:
    text = ""
    for step in path:
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


def load_yaml(raw: bytes, label: str) -> tuple[Any, Origin]:
    """Returns data and origin of the YAML document `raw`, called `label` in errors. Raises `PolicyError`."""
    try:
        data, lines = load(raw)
    except YamlProblem as problem:
        location = f"{label}:{problem.line}" if problem.line else label
        raise PolicyError(f"{location}: {problem}") from None
    return data, Origin(label, lines)


def parse_data(data: Any, source: Origin) -> tuple[str, tuple[Rule, ...]]:
    """Returns preset name and rules of `data`, a mapping with version, preset and rules."""
    if not isinstance(data, dict):
        kind = "nothing" if data is None else type(data).__name__
        raise source.error(
            (),
            f"a policy must be a mapping with the keys {_words(schema.TOP)}, found {kind}:"
            f" start with 'version: {VERSION}'",
        )
    _check_keys(data, schema.TOP, (), source)
    if "version" not in data:
        raise source.error((), f"the key 'version' is missing: add 'version: {VERSION}'")
    _read(VERSION_VALUE, data["version"], ("version",), source)
    preset = data.get("preset", DEFAULT)
    _read(schema.PRESET, preset, ("preset",), source)
    raw_rules = data.get("rules")
    if raw_rules is None:
        raw_rules = []
    if not isinstance(raw_rules, list):
        raise source.error(("rules",), f"expected a list of rules, found {type(raw_rules).__name__}")
    rules: list[Rule] = []
    shadows = Shadows()
    for index, raw in enumerate(raw_rules):
        rule = _parse_rule(raw, ("rules", index), PRESETS[preset], source)
        earlier = shadows.add(rule.match)
        if earlier:
            raise source.error(
                ("rules", index),
                f"rule {index + 1} can never fire, because all its layers are decided by"
                f" {_named_rules(earlier, source)}; move it up or remove it",
            )
        rules.append(rule)
    return preset, tuple(rules)


def _named_rules(numbers: tuple[int, ...], source: Origin) -> str:
    """Returns the rules as text: ``rule 1 (line 3)`` or ``rules 1, 3 (lines 3, 9)``."""
    lines = [str(line) for number in numbers if (line := source.line(("rules", number - 1)))]
    where = f" (line{'s' * (len(numbers) > 1)} {', '.join(lines)})" if lines else ""
    return f"{rule_words(numbers)}{where}"


def rule_words(numbers: Sequence[int]) -> str:
    """Returns the rules as text: ``rule 1`` or ``rules 1, 3``."""
    return f"rule{'s' * (len(numbers) > 1)} {_words(numbers)}"


def _parse_rule(raw: Any, path: Path, preset: Preset, source: Origin) -> Rule:
    if not isinstance(raw, dict):
        raise source.error(
            path, f"a rule must be a mapping with the keys {_words(schema.RULE)}, found {shown(raw)}"
        )
    _check_keys(raw, schema.RULE, path, source)
    for key in schema.RULE:
        if key not in raw:
            raise source.error(path, f"the key {key!r} is missing: a rule has both, {_words(schema.RULE)}")
    match = _parse_match(raw["match"], (*path, "match"), source)
    use = _parse_use(raw["use"], (*path, "use"), source)
    _check_choices(raw["use"], use, preset, (*path, "use"), source)
    products = [role for role in match.role if role in ATTENTION_PRODUCTS]
    if products and use.quantizes:
        raise source.error(
            (*path, "match", "role"),
            f"{products[0]} is an attention product, which stays in BF16; remove it from the rule",
        )
    return Rule(match=match, use=use)


def _parse_match(raw: Any, path: Path, source: Origin) -> Match:
    if not isinstance(raw, dict) or not raw:
        raise source.error(
            path,
            f"expected a mapping with at least one of {_words(schema.MATCH)}, found {shown(raw)}",
        )
    _check_keys(raw, schema.MATCH, path, source)
    match = Match(**{key: _read(schema.MATCH[key], raw[key], (*path, key), source) for key in raw})
    for letter in "mnk":
        least, largest = getattr(match, f"min_{letter}"), getattr(match, f"max_{letter}")
        if 0 < largest < least:
            raise source.error(
                (*path, f"max_{letter}"),
                f"no size is at least min_{letter} {least} and at most max_{letter} {largest}",
            )
    return match


def _parse_use(raw: Any, path: Path, source: Origin) -> Use:
    if isinstance(raw, str):
        precision = _read(PRECISION, raw, path, source)
        return Use(fprop=precision, dgrad=precision, wgrad=precision)
    if not isinstance(raw, dict) or not raw:
        raise source.error(
            path,
            f"expected {_words(PRECISIONS)} or a mapping with some of {_words(schema.USE)},"
            f" found {shown(raw)}",
        )
    _check_keys(raw, schema.USE, path, source)
    values = {key: _read(schema.USE[key], raw[key], (*path, key), source) for key in raw}
    gemms = [gemm for gemm in ("fprop", "dgrad", "wgrad") if gemm in values]
    if "precision" in values:
        if gemms:
            raise source.error(
                (*path, gemms[0]),
                f"give either 'precision' for all three GEMMs or {_words(gemms)}, not both",
            )
        precision = values.pop("precision")
        values |= {"fprop": precision, "dgrad": precision, "wgrad": precision}
    others = [gemm for gemm in gemms if gemm != "fprop"]
    if others and values.get("backward") is Backward.DEQUANTIZED:
        raise source.error(
            (*path, others[0]),
            f"'backward: dequantized' leaves dgrad and wgrad in the model's dtype: remove {_words(others)}",
        )
    return Use(**values)


def _check_choices(raw: Any, use: Use, preset: Preset, path: Path, source: Origin) -> None:
    """Raises `PolicyError` for a choice that has no meaning in any precision the rule may lead to."""
    chosen = [row for row in (use.fprop, use.dgrad, use.wgrad) if row is not None]
    rows = {row.name: row for row in chosen if row.quantizes} or {preset.precision.name: preset.precision}
    settings = raw if isinstance(raw, dict) else {}
    means = frozenset[str]().union(*map(schema.keys_of, rows.values()))
    for key in settings:
        if schema.USE[key].means is not None and key not in means:
            has = f"it has {_words(sorted(means))}" if means else "it has no choices"
            raise source.error((*path, key), f"{key!r} does not belong to {_words(rows)}: {has}")
    for key in settings:
        needed, word = schema.USE[key].needs or ("", "")
        if needed and getattr(use, needed) != word:
            raise source.error((*path, key), f"{key!r} needs {needed}: {word}")
    formats = [row.formats(use.over(preset.formats)).x for row in rows.values()]
    if use.amax is not None and any(fmt.amax.kind is AmaxKind.DELAYED for fmt in formats):
        raise source.error(
            (*path, "amax"),
            "'amax' cannot be combined with scaling: delayed, whose scales follow from a history",
        )
    is_tensor = all(fmt.scale is ScaleType.FP32 and fmt.tile == Tile.TENSOR for fmt in formats)
    if use.amax is not None and use.amax.stateful and not is_tensor:
        raise source.error(
            (*path, "amax"), "'ema' needs one scale a tensor (precision: fp8, scaling: tensor)"
        )
    for key in settings:
        allowed = schema.USE[key].allowed
        choices = [] if allowed is None else [value for row in rows.values() for value in allowed(row)]
        if choices and (choice := getattr(use, key)) not in choices:
            raise source.error(
                (*path, key), f"{choice} does not belong to {_words(rows)}: it has {_words(choices)}"
            )
    if use.weight_block is not None and use.block not in (None, "32"):
        raise source.error((*path, "weight_block"), "'weight_block' needs block: 32")


def _check_keys(raw: dict[Any, Any], allowed: Iterable[str], path: Path, source: Origin) -> None:
    allowed = tuple(allowed)
    for key in raw:
        if key not in allowed:
            raise source.error((*path, key), not_allowed("key", key, allowed))


def _read(kind: Value, value: Any, path: Path, source: Origin) -> Any:
    try:
        return kind.read(value)
    except Invalid as invalid:
        at = path if invalid.index is None else (*path, invalid.index)
        raise source.error(at, str(invalid)) from None


def _words(items: Iterable[Any]) -> str:
    return ", ".join(str(item) for item in items)
