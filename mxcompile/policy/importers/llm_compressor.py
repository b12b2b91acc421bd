"""Imports llm-compressor recipes, and the quantization_config that they write into a model's config.json.

A target is the name of a module, ``re:`` and an expression that matches the start of names, or a class with
its subclasses. ``ignore`` overrides all targets. Among targets, exact names precede expressions (sorted
alphabetically), which precede classes. The recipes are for inference, so only forward GEMMs are quantized.
Source: compressed_tensors/utils/match.py, llmcompressor/modifiers/quantization.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from mxcompile.errors import shown
from mxcompile.policy.importers.draft import Draft
from mxcompile.policy.patterns import literal, starting
from mxcompile.policy.yaml_data import Path

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
_SCHEMES_WEIGHT_ONLY = frozenset({"MXFP8A16"})


def recognises(data: Any) -> bool:
    """Whether `data` looks like a recipe, or like the configuration of a compressed model."""
    if not isinstance(data, dict):
        return False
    inner = data.get("quantization_config", data)
    compressed = isinstance(inner, dict) and (
        inner.get("quant_method") == "compressed-tensors" or "config_groups" in inner
    )
    return compressed or any(isinstance(key, str) and key.endswith("_stage") for key in data)


def convert(data: Any, draft: Draft) -> None:
    """Adds the rules of all modifiers to `draft`, the last first because it overwrites the others."""
    modifiers = list(_modifiers(data, draft))
    if not modifiers:
        raise draft.source.error(
            (), "no modifiers: expected stages, such as quant_stage, with quant_modifiers"
        )
    quantizing = []
    for name, settings, path in modifiers:
        if name not in _QUANTIZES or not any(key in settings for key in _SETS):
            draft.note(path, "changes weights, not formats")
            continue
        quantizing.append((name, settings, path))
    _note_different_ignores(quantizing, draft)
    for name, settings, path in reversed(quantizing):
        _modifier(name, settings, path, draft)


def _modifiers(data: Any, draft: Draft) -> Iterable[tuple[str, dict[str, Any], Path]]:
    """Yields name, settings and path of every modifier, in order."""
    if not isinstance(data, dict):
        raise draft.source.error((), "a recipe must be a mapping of stages")
    if "quantization_config" in data or "config_groups" in data:
        nested = "quantization_config" in data
        inner = data["quantization_config"] if nested else data
        if not isinstance(inner, dict):
            raise draft.source.error(("quantization_config",), f"expected a mapping, found {shown(inner)}")
        yield "QuantizationModifier", inner, ("quantization_config",) if nested else ()
        return
    for stage, groups in data.items():
        if not str(stage).endswith("_stage") or not isinstance(groups, dict):
            draft.note((stage,), "is not a stage")
            continue
        for group, modifiers in groups.items():
            if not str(group).endswith("_modifiers") or not isinstance(modifiers, dict):
                draft.note((stage, group), "is not a group of modifiers")
                continue
            for name, settings in modifiers.items():
                path = (stage, group, name)
                if not isinstance(settings, dict | None):
                    raise draft.source.error(path, f"expected a mapping, found {shown(settings)}")
                yield name, settings or {}, path


def _note_different_ignores(modifiers: list[tuple[str, dict[str, Any], Path]], draft: Draft) -> None:
    ignores = [settings.get("ignore") for _, settings, _ in modifiers]
    sets = [frozenset(map(str, names)) if isinstance(names, list) else frozenset() for names in ignores]
    for (_, _, path), names in zip(modifiers, sets, strict=True):
        alone = sorted(names - frozenset.intersection(*sets))
        if alone:
            draft.note(
                (*path, "ignore"),
                f"{', '.join(alone)}: ignored by this modifier alone: here in BF16 for all modifiers",
            )


def _modifier(name: str, settings: dict[str, Any], path: Path, draft: Draft) -> None:
    ignored = _texts(settings.get("ignore") or [], (*path, "ignore"), draft)
    _rules([(target, _BF16) for target in _ordered(ignored)], (*path, "ignore"), f"{name}: ignore", draft)
    if settings.get("kv_cache_scheme"):
        draft.note((*path, "kv_cache_scheme"), "a policy does not set the format of the KV cache")
    uses: dict[str, Any] = {}
    for targets, use in _groups(settings, path, draft):
        uses.update(dict.fromkeys(targets, use))
    _rules([(target, uses[target]) for target in _ordered(uses)], path, name, draft)


def _ordered(targets: Iterable[str]) -> list[str]:
    """Returns `targets` in the order of compressed-tensors: exact names, expressions, classes."""
    return sorted(targets, key=lambda target: (_is_class(target), "re:" in target, target))


def _is_class(target: str) -> bool:
    """Whether `target` names a class. By convention classes begin with a capital and paths contain dots."""
    return target.isidentifier() and target[:1].isupper()


def _rules(chosen: list[tuple[str, Any]], path: Path, origin: str, draft: Draft) -> None:
    """Adds a rule for every run of targets of one kind with equal use."""
    index = 0
    while index < len(chosen):
        target, use = chosen[index]
        kind, run = _is_class(target), []
        while index < len(chosen) and (_is_class(chosen[index][0]), chosen[index][1]) == (kind, use):
            run.append(chosen[index][0])
            index += 1
        if not kind:
            names = [starting(t.removeprefix("re:")) if t.startswith("re:") else literal(t) for t in run]
            draft.rule({"name": names}, use, path, origin)
            continue
        if "Embedding" in run:
            draft.note(path, "Embedding: a table lookup is not a GEMM")
        classes = [name for name in run if name != "Embedding"]
        if classes:
            draft.rule({"module": classes}, use, path, origin)
            draft.note(
                path, f"{', '.join(classes)}: classes derived from it are not matched, add their names"
            )


def _groups(settings: dict[str, Any], path: Path, draft: Draft) -> Iterable[tuple[list[str], Any]]:
    """Yields the targets of every group and their `use`."""
    scheme, groups = settings.get("scheme"), settings.get("config_groups")
    targets = _texts(settings.get("targets", ["Linear"]), (*path, "targets"), draft)
    if isinstance(scheme, str):
        yield targets, _preset(scheme, (*path, "scheme"), draft)
    elif isinstance(scheme, dict) and ("weights" in scheme or "input_activations" in scheme):
        yield targets, _scheme(scheme, (*path, "scheme"), draft)
    elif isinstance(scheme, dict):
        for name, group_targets in scheme.items():
            at = (*path, "scheme", name)
            yield _texts(group_targets, at, draft), _preset(str(name), at, draft)
    elif isinstance(groups, dict):
        for name, group in groups.items():
            at = (*path, "config_groups", name)
            if isinstance(group, dict):
                yield _texts(group.get("targets", ["Linear"]), at, draft), _scheme(group, at, draft)
            else:
                yield _texts(group, at, draft), _preset(str(name), at, draft)
    elif not settings.get("kv_cache_scheme"):
        draft.note(path, "gives no scheme, so it quantizes nothing")


def _texts(value: Any, path: Path, draft: Draft) -> list[str]:
    items = value if isinstance(value, list) else [value]
    if not all(isinstance(item, str) and item for item in items):
        raise draft.source.error(path, f"expected names or a list of names, found {shown(value)}")
    return items


def _preset(name: str, path: Path, draft: Draft) -> Any:
    """Returns the `use` of the named scheme."""
    upper = name.upper()
    if upper == "UNQUANTIZED":
        return _BF16
    if upper in _FLOAT8:
        if upper == "FP8":
            draft.note(path, f"{name} {_STATIC}")
        return _fp8(_FLOAT8[upper])
    if upper in _EXACT:
        draft.note(path, f"{name} {_ROUNDING}")
        if upper in _SCHEMES_WEIGHT_ONLY:
            draft.note(path, f"{name} {_WEIGHT_ONLY}")
        return _SEND
    draft.note(path, f"{shown(name)} is not an 8-bit float: its layers stay in BF16")
    return _BF16


def _scheme(scheme: dict[str, Any], path: Path, draft: Draft) -> Any:
    """Returns the `use` of an explicit scheme: FP8 with its scales, or MXFP8."""
    weights, activations = scheme.get("weights"), scheme.get("input_activations")
    if scheme.get("output_activations"):
        draft.note((*path, "output_activations"), "outputs of a layer are not quantized")
    if not isinstance(weights, dict):
        draft.note(path, "quantizes no weights: its layers stay in BF16")
        return _BF16
    for tensor in (weights, activations or weights):
        if (
            not isinstance(tensor, dict)
            or tensor.get("num_bits", 8) != 8
            or tensor.get("type", "int") != "float"
        ):
            draft.note(path, "is not an 8-bit float: its layers stay in BF16")
            return _BF16
    both = (weights, activations or weights)
    if activations is None:
        draft.note(path, _WEIGHT_ONLY)
    if (scaling := _scaling(*both)) is not None:
        if activations is not None and not activations.get("dynamic"):
            draft.note(path, _STATIC)
        return _fp8(scaling)
    mx = all(tensor.get("strategy") == "group" and tensor.get("group_size") == 32 for tensor in both)
    draft.note(path, _ROUNDING if mx else _SCALES)
    return _SEND


def _fp8(scaling: str) -> dict[str, str]:
    return {"fprop": "fp8", "scaling": scaling}


def _scaling(weights: dict[str, Any], activations: dict[str, Any]) -> str | None:
    """Returns the `scaling` key of fp8 for these settings, None if fp8 does not support them."""
    strategies = weights.get("strategy"), activations.get("strategy")
    block = weights.get("block_structure") == [128, 128] and activations.get("group_size") == 128
    if strategies == ("block", "group") and block:
        return "block"
    scalings = {
        ("tensor", "tensor"): "tensor",
        ("channel", "token"): "channel",
        ("channel", "channel"): "channel",
    }
    return scalings.get(strategies)  # type: ignore[arg-type]
