"""Imports Transformer Engine's debug files (nvdlfw_inspect): sections of layers and features.

A section selects layers by the first selector it contains: exact names, a regular expression to search for,
or texts and numbers in the name. A layer may be in one section only. Features exclude GEMMs of Transformer
Engine modules from the quantization of a recipe (here the preset nvidia), or change their formats.
Source: nvdlfw_inspect/config_manager.py and transformer_engine/debug/features.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mxcompile.errors import not_allowed, shown
from mxcompile.policy.importers.draft import Setting
from mxcompile.policy.model import Gemm
from mxcompile.policy.patterns import literal, searching

NAME = "te"
TOOL = "a Transformer Engine debug file; names are of its layers, and the preset stands for MXFP8BlockScaling"
PRESET = "nvidia"

_SELECTORS = ("exact_layer_names", "layer_name_regex_pattern", "layer_types", "layer_numbers")
_NAMESPACE = "transformer_engine"
_GEMMS = tuple(str(gemm) for gemm in Gemm)
_OPERANDS = {
    "fprop": ("activation", "weight"),
    "dgrad": ("gradient", "weight"),
    "wgrad": ("activation", "gradient"),
}
_ELEMS = {"MXFP8E4M3": "e4m3", "MXFP8E5M2": "e5m2"}

_Uses = dict[str, str]


def recognises(data: dict[Any, Any]) -> bool:
    """Whether `data` looks like a debug file: sections with the key ``enabled``, and some with ``layers``."""
    are_sections = all(isinstance(section, dict) and "enabled" in section for section in data.values())
    return are_sections and any("layers" in section for section in data.values())


def convert(data: Any, setting: Setting) -> None:
    """Adds the rules of every enabled section."""
    if not isinstance(data, dict):
        raise setting.error("a debug file must be a mapping of sections")
    for name, section in data.items():
        inner = setting.at(name)
        if not isinstance(section, dict):
            raise inner.error("a section must be a mapping with the keys enabled, layers and features")
        if "enabled" not in section:
            raise inner.error("the key 'enabled' is missing: add 'enabled: True'")
        if not section["enabled"]:
            inner.note("is disabled there")
            continue
        names = _names(section.get("layers"), inner.at("layers"))
        if use := _features(section, inner):
            words = set(use.values())
            shortest = words.pop() if len(words) == 1 and set(use) == set(_GEMMS) else use
            inner.at("layers").rule({"name": names}, shortest, f"section {name}")


def _names(layers: Any, setting: Setting) -> list[str]:
    """Returns patterns for the layers of a section. As in the tool, the first selector decides."""
    if not isinstance(layers, dict) or not any(key in layers for key in _SELECTORS):
        raise setting.expected(f"one of {', '.join(_SELECTORS)}", layers)
    selectors = [key for key in _SELECTORS if key in layers]
    together = {"layer_types", "layer_numbers"}
    for key in layers:
        if key not in _SELECTORS:
            setting.at(key).note("is an unknown selector, and selects nothing")
        elif key != selectors[0] and not {key, selectors[0]} <= together:
            setting.at(key).note(f"selects nothing beside {selectors[0]}")
    match selectors[0]:
        case "exact_layer_names":
            return [literal(name) for name in _words(layers, "exact_layer_names", setting)]
        case "layer_name_regex_pattern":
            (expression,) = _words(layers, "layer_name_regex_pattern", setting)
            return [searching(expression)]
    # names with a text of `layer_types` whose only number is in `layer_numbers`
    types = _words(layers, "layer_types", setting) if "layer_types" in layers else ["all"]
    numbers = _numbers(layers.get("layer_numbers", "all"), setting.at("layer_numbers"))
    everything = "all" in types
    if numbers is None:
        return ["*"] if everything else [f"*{literal(text)}*" for text in types]
    lookahead = "" if everything else f"(?=.*(?:{'|'.join(map(re.escape, types))}))"
    apart = r"(?:\D|(?<=fc)\d)*"  # the digit of 'fc1' is not a layer number
    return [f"re:{lookahead}{apart}(?:{'|'.join(map(str, numbers))}){apart}"]


def _numbers(value: Any, setting: Setting) -> list[int] | None:
    """Returns the sorted numbers in `value`; None for all."""
    items = value if isinstance(value, list) else [value]
    if any(isinstance(item, str) and item.lower() == "all" for item in items):
        return None
    numbers: set[int] = set()
    for item in items:
        span = re.fullmatch(r"(\d{1,4})-(\d{1,4})", item) if isinstance(item, str) else None
        if span:
            numbers.update(range(int(span[1]), int(span[2]) + 1))
        elif isinstance(item, int) and not isinstance(item, bool):
            numbers.add(item)
        else:
            raise setting.expected("numbers and ranges such as '3-7'", item)
    return sorted(numbers)


def _words(layers: dict[str, Any], key: str, setting: Setting) -> list[str]:
    """Returns the text or the list of texts under `key` as a list."""
    value = layers[key]
    items = value if isinstance(value, list) else [value]
    if not items or not all(isinstance(item, str) and item for item in items):
        raise setting.at(key).expected("a text or a list of texts", value)
    if key == "layer_name_regex_pattern" and len(items) != 1:
        raise setting.at(key).expected("one regular expression", value)
    return items


def _features(section: dict[str, Any], setting: Setting) -> _Uses:
    """Returns the `use` of a section's features. Features that quantize follow those that exclude."""
    features: list[tuple[str, dict[str, Any], Setting]] = []
    for key, value in section.items():
        if key == _NAMESPACE and isinstance(value, dict):
            features += [(name, config, setting.at(key, name)) for name, config in value.items()]
        elif key not in ("enabled", "layers"):
            features.append((key, value, setting.at(key)))
    use: _Uses = {}
    later: list[tuple[dict[str, Any], Setting]] = []
    for name, config, at in features:
        if not isinstance(config, dict):
            raise at.error(f"a feature must be a mapping, found {shown(config)}")
        if not config.get("enabled", True):
            at.note("is disabled there")
        elif name.lower() in _FAKE_QUANT:
            later.append((config, at))
        elif name.lower() in _DISABLE:
            use.update(dict.fromkeys(_GEMMS, "bf16"))
        elif name.lower() in _OBSERVE:
            at.note("only collects statistics: see 'mxcompile audit'")
        elif name.lower() in _FEATURES:
            _FEATURES[name.lower()](config, at, use)
        else:
            at.note("is an unknown feature, and is left out")
    for config, at in later:
        _fake_quant(config, at, use)
    return use


def _disable_gemms(config: dict[str, Any], setting: Setting, use: _Uses) -> None:
    use.update(dict.fromkeys((gemm for gemm, _, _ in _gemms(config, setting)), "bf16"))


def _per_tensor(config: dict[str, Any], setting: Setting, use: _Uses) -> None:
    """Adds FP8 with one scale per tensor for both operands of a GEMM. The feature implies E4M3."""
    for gemm, settings, at in _gemms(config, setting):
        tensors = settings.get("tensors") or ([settings["tensor"]] if "tensor" in settings else [])
        if set(_OPERANDS[gemm]) <= {str(tensor) for tensor in tensors}:
            use.update({gemm: "fp8", "scaling": "tensor"})
        else:
            at.note(f"one scale per tensor for one operand of {gemm}: it stays as in the preset")


def _fake_quant(config: dict[str, Any], setting: Setting, use: _Uses) -> None:
    """Adds a GEMM in high precision on quantized operands: MXFP8 if both operands have MXFP8 formats."""
    for gemm, settings, at in _gemms(config, setting):
        shared = settings.get("quant_format")
        if "tensors_struct" in settings:
            items = _mappings(settings["tensors_struct"], "tensor", at.at("tensors_struct"))
            formats = {str(item["tensor"]): str(item.get("quant_format", shared)) for item, _ in items}
        else:
            formats = {str(tensor): str(shared) for tensor in settings.get("tensors") or ()}
        for tensor in formats:
            if not any(tensor in pair for pair in _OPERANDS.values()):
                at.note(f"quantizes {tensor}, which is not an operand of a GEMM")
        operands = {tensor: formats.get(tensor, "BF16") for tensor in _OPERANDS[gemm]}
        elems: _Uses = {}
        fits = True
        for tensor, form in operands.items():
            key, elem = "grad_dtype" if tensor == "gradient" else "elem_dtype", _ELEMS.get(form)
            fits &= elem is not None and elems.setdefault(key, elem) == use.get(key, elem) == elem
        if fits:
            use.update({gemm: "mxfp8", **elems})
            continue
        use[gemm] = "bf16"
        listed = ", ".join(f"{tensor} in {form}" for tensor, form in operands.items())
        at.note(f"{gemm} of {listed} is not an MXFP8 GEMM: it stays in BF16")


def _gemms(config: dict[str, Any], setting: Setting) -> list[tuple[str, dict[str, Any], Setting]]:
    """Returns (GEMM, settings, location) by GEMM of a feature; ``gemms_struct`` has settings by GEMM."""
    if "gemms_struct" in config:
        shared = {key: value for key, value in config.items() if key != "gemms_struct"}
        items = _mappings(config["gemms_struct"], "gemm", setting.at("gemms_struct"))
        gemms = [(item["gemm"], {**shared, **item}, at) for item, at in items]
    elif isinstance(config.get("gemms"), list):
        gemms = [(gemm, config, setting) for gemm in config["gemms"]]
    else:
        raise setting.error(f"expected 'gemms', a list of {', '.join(_GEMMS)}, or 'gemms_struct'")
    for gemm, _, at in gemms:
        if gemm not in _GEMMS:
            raise at.error(not_allowed("GEMM", gemm, _GEMMS))
    return gemms


def _mappings(value: Any, key: str, setting: Setting) -> list[tuple[dict[str, Any], Setting]]:
    """Returns the items of a list of mappings that all have `key`, with their paths."""
    if not isinstance(value, list) or not all(isinstance(item, dict) and key in item for item in value):
        raise setting.expected(f"a list of mappings with the key {key!r}", value)
    return [(item, setting.at(index)) for index, item in enumerate(value)]


_FAKE_QUANT = frozenset({"fakequant", "fakequantfp8"})
_DISABLE = frozenset({"disablefp8layer", "disablequantizationlayer"})
_OBSERVE = frozenset({"logtensorstats", "logfp8tensorstats", "lognvfp4tensorstats", "dumptensors"})
_FEATURES: dict[str, Callable[[dict[str, Any], Setting, _Uses], None]] = {
    "disablefp8gemm": _disable_gemms,
    "disablequantizationgemm": _disable_gemms,
    "pertensorscaling": _per_tensor,
}
"""Features by lower-case name, because older versions spell some in another case."""
