"""Imports llm-compressor recipes, and the quantization_config that they write into a model's config.json.

A target is the name of a module, ``re:`` and an expression that matches the start of names, or a class with
its subclasses. ``ignore`` overrides all targets. Among targets, exact names precede expressions (sorted
alphabetically), which precede classes. The recipes are for inference, so only forward GEMMs are quantized.
Source: compressed_tensors/utils/match.py, llmcompressor/modifiers/quantization.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

from mxcompile.errors import shown
from mxcompile.policy.importers.draft import Setting
from mxcompile.policy.patterns import literal, starting

NAME = "llm-compressor"
TOOL = "an llm-compressor recipe: forward GEMMs only, all others stay in BF16"
PRESET = "bf16"

_QUANTIZES = frozenset({"QuantizationModifier", "GPTQModifier", "AWQModifier", "AutoRoundModifier"})
_SETS = ("scheme", "config_groups", "kv_cache_scheme", "targets", "ignore")
_SEND = {"fprop": "mxfp8"}
_BF16 = "bf16"

_WEIGHT_ONLY = "quantizes weights only: here the activations are quantized too"
_SCALES = "has scales of another shape: here one per 32 elements"
_STATIC = "has static scales: here they are computed from the current tensor"
_ROUNDING = "rounds MXFP8 scales in another way: here RCEIL"
_EXACT = frozenset({"MXFP8", "MXFP8A16"})
_FLOAT8 = {"FP8": "tensor", "FP8_DYNAMIC": "channel", "FP8_BLOCK": "block"}


def recognises(data: dict[Any, Any]) -> bool:
    """Whether `data` looks like a recipe, or like the configuration of a compressed model."""
    inner = data.get("quantization_config", data)
    compressed = isinstance(inner, dict) and (
        inner.get("quant_method") == "compressed-tensors" or "config_groups" in inner
    )
    return compressed or any(isinstance(key, str) and key.endswith("_stage") for key in data)


_Modifier = tuple[str, dict[str, Any], Setting]
"""The name of a modifier, its settings, and their location."""


def convert(data: Any, setting: Setting) -> None:
    """Adds the rules of all modifiers, the last first because it overwrites the others."""
    if not (modifiers := list(_modifiers(data, setting))):
        raise setting.error("no modifiers: expected stages, such as quant_stage, with quant_modifiers")
    quantizing = []
    for modifier in modifiers:
        name, settings, at = modifier
        if name in _QUANTIZES and any(key in settings for key in _SETS):
            quantizing.append(modifier)
        else:
            at.note("changes weights, not formats")
    ignores = [settings.get("ignore") for _, settings, _ in quantizing]
    sets = [frozenset(map(str, names)) if isinstance(names, list) else frozenset() for names in ignores]
    for (_, _, at), names in zip(quantizing, sets, strict=True):
        if alone := sorted(names - frozenset.intersection(*sets)):
            at.at("ignore").note(
                f"{', '.join(alone)}: ignored by this modifier alone: here in BF16 for all modifiers"
            )
    for name, settings, at in reversed(quantizing):
        ignored = _texts(settings.get("ignore") or [], at.at("ignore"))
        _rules([(target, _BF16) for target in _ordered(ignored)], f"{name}: ignore", at.at("ignore"))
        if settings.get("kv_cache_scheme"):
            at.at("kv_cache_scheme").note("a policy does not set the format of the KV cache")
        uses: dict[str, Any] = {}
        for targets, use in _groups(settings, at):
            uses.update(dict.fromkeys(targets, use))
        _rules([(target, uses[target]) for target in _ordered(uses)], name, at)


def _modifiers(data: Any, setting: Setting) -> Iterable[_Modifier]:
    if not isinstance(data, dict):
        raise setting.error("a recipe must be a mapping of stages")
    if "quantization_config" in data:
        data, setting = data["quantization_config"], setting.at("quantization_config")
        if not isinstance(data, dict):
            raise setting.expected("a mapping", data)
        yield "QuantizationModifier", data, setting
        return
    if "config_groups" in data:
        yield "QuantizationModifier", data, setting
        return
    for stage, groups in data.items():
        if not str(stage).endswith("_stage") or not isinstance(groups, dict):
            setting.at(stage).note("is not a stage")
            continue
        for group, modifiers in groups.items():
            if not str(group).endswith("_modifiers") or not isinstance(modifiers, dict):
                setting.at(stage, group).note("is not a group of modifiers")
                continue
            for name, settings in modifiers.items():
                at = setting.at(stage, group, name)
                if not isinstance(settings, dict | None):
                    raise at.expected("a mapping", settings)
                yield name, settings or {}, at


def _ordered(targets: Iterable[str]) -> list[str]:
    """Returns `targets` in the order of compressed-tensors: exact names, expressions, classes."""
    return sorted(targets, key=lambda target: (_is_class(target), "re:" in target, target))


def _is_class(target: str) -> bool:
    """Whether `target` names a class. By convention classes begin with a capital and paths contain dots."""
    return target.isidentifier() and target[:1].isupper()


def _rules(chosen: list[tuple[str, Any]], origin: str, setting: Setting) -> None:
    """Adds a rule for every run of consecutive targets with equal use: names and expressions, or classes."""
    for (is_class, use), run in itertools.groupby(chosen, lambda pair: (_is_class(pair[0]), pair[1])):
        targets = [target for target, _ in run]
        if not is_class:
            names = [starting(t.removeprefix("re:")) if t.startswith("re:") else literal(t) for t in targets]
            setting.rule({"name": names}, use, origin)
            continue
        if "Embedding" in targets:
            setting.note("Embedding: a table lookup is not a GEMM")
        classes = [name for name in targets if name != "Embedding"]
        if classes:
            setting.rule({"module": classes}, use, origin)
            setting.note(f"{', '.join(classes)}: classes derived from it are not matched, add their names")


def _groups(settings: dict[str, Any], setting: Setting) -> Iterable[tuple[list[str], Any]]:
    """Yields the targets of every group and their `use`."""
    scheme, groups = settings.get("scheme"), settings.get("config_groups")
    targets = _texts(settings.get("targets", ["Linear"]), setting.at("targets"))
    if isinstance(scheme, str):
        yield targets, _preset(scheme, setting.at("scheme"))
    elif isinstance(scheme, dict) and ("weights" in scheme or "input_activations" in scheme):
        yield targets, _scheme(scheme, setting.at("scheme"))
    elif isinstance(scheme, dict):
        for name, group_targets in scheme.items():
            at = setting.at("scheme", name)
            yield _texts(group_targets, at), _preset(str(name), at)
    elif isinstance(groups, dict):
        for name, group in groups.items():
            at = setting.at("config_groups", name)
            if isinstance(group, dict):
                yield _texts(group.get("targets", ["Linear"]), at), _scheme(group, at)
            else:
                yield _texts(group, at), _preset(str(name), at)
    elif not settings.get("kv_cache_scheme"):
        setting.note("gives no scheme, so it quantizes nothing")


def _texts(value: Any, setting: Setting) -> list[str]:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) and item for item in items):
        raise setting.expected("names or a list of names", value)
    return items


def _preset(name: str, setting: Setting) -> Any:
    """Returns the `use` of the named scheme."""
    upper = name.upper()
    if upper == "UNQUANTIZED":
        return _BF16
    if upper in _FLOAT8:
        if upper == "FP8":
            setting.note(f"{name} {_STATIC}")
        return {"fprop": "fp8", "scaling": _FLOAT8[upper]}
    if upper in _EXACT:
        setting.note(f"{name} {_ROUNDING}")
        if upper == "MXFP8A16":
            setting.note(f"{name} {_WEIGHT_ONLY}")
        return _SEND
    setting.note(f"{shown(name)} is not an 8-bit float: its layers stay in BF16")
    return _BF16


def _scheme(scheme: dict[str, Any], setting: Setting) -> Any:
    """Returns the `use` of an explicit scheme: FP8 with its scales, or MXFP8."""
    weights, activations = scheme.get("weights"), scheme.get("input_activations")
    if scheme.get("output_activations"):
        setting.at("output_activations").note("outputs of a layer are not quantized")
    if not isinstance(weights, dict):
        setting.note("quantizes no weights: its layers stay in BF16")
        return _BF16
    both = (weights, activations or weights)
    if not all(
        isinstance(tensor, dict) and (tensor.get("num_bits", 8), tensor.get("type", "int")) == (8, "float")
        for tensor in both
    ):
        setting.note("is not an 8-bit float: its layers stay in BF16")
        return _BF16
    if activations is None:
        setting.note(_WEIGHT_ONLY)
    strategies = weights.get("strategy"), both[1].get("strategy")
    scalings: dict[tuple[Any, Any], str] = {("tensor", "tensor"): "tensor"}
    scalings |= dict.fromkeys((("channel", "token"), ("channel", "channel")), "channel")
    if weights.get("block_structure") == [128, 128] and both[1].get("group_size") == 128:
        scalings["block", "group"] = "block"
    if (scaling := scalings.get(strategies)) is not None:
        if activations is not None and not activations.get("dynamic"):
            setting.note(_STATIC)
        return {"fprop": "fp8", "scaling": scaling}
    mx = all(tensor.get("strategy") == "group" and tensor.get("group_size") == 32 for tensor in both)
    setting.note(_ROUNDING if mx else _SCALES)
    return _SEND
