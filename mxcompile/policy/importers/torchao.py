"""Imports torchao's FqnToConfig, as torchao or transformers write it: configurations by module or parameter.

torchao tries parameter names first, then module names, then ``re:`` expressions over whole parameter names,
then expressions over module names, each in order, then ``_default`` for every other nn.Linear. null means
BF16. The configurations are for inference, so only forward GEMMs are quantized.
Source: torchao/quantization/quant_api.py, transformers/quantizers/quantizers_utils.py.
"""

from __future__ import annotations

from typing import Any

from mxcompile.formats import Rounding
from mxcompile.policy.importers.draft import Setting
from mxcompile.policy.patterns import literal, splits, starting

NAME = "torchao"
TOOL = "a torchao FqnToConfig: forward GEMMs only, all others stay in BF16"
PRESET = "bf16"

_MAPS = ("FqnToConfig", "ModuleFqnToConfig")
_FIELDS = ("fqn_to_config", "module_fqn_to_config")
_DEFAULT = "_default"
_MX = frozenset({"MXDynamicActivationMXWeightConfig", "MXFPInferenceConfig"})
_FLOAT8 = {
    "Float8DynamicActivationFloat8WeightConfig": ("PerTensor", ""),
    "Float8StaticActivationFloat8WeightConfig": ("PerTensor", "static scales are not used"),
    "Float8WeightOnlyConfig": ("PerRow", "the activations are quantized too"),
}
"""FP8 configurations: their default granularity, and how the policy differs."""
_NVFP4 = {
    "NVFP4DynamicActivationNVFP4WeightConfig": "",
    "NVFP4InferenceConfig": "",
    "NVFP4WeightOnlyConfig": "the activations are quantized too",
}
"""NVFP4 configurations, and how the policy differs."""
_SCALINGS = {"PerTensor": "tensor", "PerRow": "channel"}
_BLOCKS = ([1, 128], [128, 128])
_ELEMS = {"float8_e4m3fn": "e4m3", "float8_e5m2": "e5m2"}
_UNQUANTIZED = "bf16"
_TAILS = {
    r"\.weight": ("",), ".weight": ("",), r"\.weight$": ("",), ".weight$": ("",), r"\..*": (r"\..*", ""),
    r"\..+": (r"\..+", ""), r"\.[^.]+": ("",), r"\.\w+": ("",), ".*": (".*",), ".+": (".*",),
}  # fmt: skip
"""Ends of expressions over weights, the first that fits counts, and the ends of patterns for the layers."""

_Named = tuple[str, dict[str, Any]]
"""A key of the map, and the condition of its rule."""


def recognises(data: dict[Any, Any]) -> bool:
    """Whether `data` looks like an FqnToConfig, or like a configuration that contains it."""
    inner = data.get("quantization_config", data)
    if not isinstance(inner, dict):
        return False
    is_map = inner.get("_type") in _MAPS or any(field in inner for field in _FIELDS)
    if is_map or inner.get("quant_method") == "torchao":
        return True
    configs = [value for value in inner.values() if value is not None]
    return bool(configs) and all(isinstance(value, dict) and "_type" in value for value in configs)


def convert(data: Any, setting: Setting) -> None:
    """Adds a rule for every name, in the order in which torchao tries them."""
    configs, mapping = _unwrapped(data, setting)
    if not isinstance(configs, dict) or not all(isinstance(value, dict | None) for value in configs.values()):
        raise mapping.error("expected a mapping of names to configurations or null")
    names = [str(name) for name in configs]
    rules = [*_exact(names, mapping), *_expressions(names)]
    if _DEFAULT in names:
        at = mapping.at(_DEFAULT)
        at.note("is for nn.Linear and classes derived from it: here Linear, add their names")
        rules.append((_DEFAULT, {"module": "Linear"}))
    for name, match in rules:
        entry = mapping.at(name)
        entry.rule(match, _use(configs[name], entry), name)


def _unwrapped(data: Any, setting: Setting) -> tuple[Any, Setting]:
    """Returns the map in `data`, without the wrappers of torchao and transformers, and its location."""
    step = None
    while isinstance(data, dict):
        skipped, at = data.get("modules_to_not_convert"), setting.at("modules_to_not_convert")
        skipped = [] if skipped is None else skipped
        if not isinstance(skipped, list) or not all(isinstance(name, str) and name for name in skipped):
            raise at.expected("a list of names", skipped)
        for name in skipped:  # transformers skips matches up to a dot or the end, and suffixes
            patterns = [starting(rf"(?:{name})(?:(?<=\.)|(?=\.|$))"), f"*{literal(name)}"]
            at.rule({"name": patterns}, _UNQUANTIZED, f"modules_to_not_convert: {name}")
        keys, outer = ("quantization_config", "quant_type", *_FIELDS), step
        step = next((key for key in keys if isinstance(data.get(key), dict) and data[key]), None)
        if step is None and outer == "quant_type" and "default" in data:
            step = "default"
        if step is None and data.get("_type") in _MAPS:
            step = "_data"
        elif step is None and isinstance(data.get("_type"), str):
            return {_DEFAULT: data}, setting  # one configuration for all
        if step is None:
            break
        data, setting = data.get(step), setting.at(step)
    return data, setting


def _exact(names: list[str], setting: Setting) -> list[_Named]:
    """Returns the rules of exact names, parameters before modules. A layer is the owner of its weight."""
    parameters: list[_Named] = []
    modules: list[_Named] = []
    for name in names:
        owner, _, last = name.rpartition(".")
        if name == _DEFAULT or name.startswith("re:"):
            continue
        if last == "bias":
            setting.at(name).note("a bias is not quantized")
        elif last == "weight" and owner:
            parameters.append((name, {"name": literal(owner)}))
        else:
            modules.append((name, {"name": literal(name)}))
    return parameters + modules


def _expressions(names: list[str]) -> list[_Named]:
    """Returns the rules of expressions as patterns over weights, then as new patterns over modules."""
    expressions = [(name, name.removeprefix("re:")) for name in names if name.startswith("re:")]
    weights: list[_Named] = []
    for name, text in expressions:  # patterns for the layers whose weights (name + ``.weight``) match
        tail = next((tail for tail in _TAILS if text.endswith(tail)), None)
        if tail is not None and not splits(text):
            weights.append((name, {"name": [f"re:{text.removesuffix(tail)}{end}" for end in _TAILS[tail]]}))
    seen = {pattern for _, match in weights for pattern in match["name"]}
    modules = [(name, {"name": [f"re:{text}"]}) for name, text in expressions if f"re:{text}" not in seen]
    return [*weights, *modules]


def _use(config: Any, setting: Setting) -> dict[str, str] | str:
    if config is None:
        return _UNQUANTIZED
    kind, data = config.get("_type"), config.get("_data")
    if not isinstance(kind, str) or not isinstance(data, dict | None):
        raise setting.expected("null or a configuration with '_type'", config)
    if kind in _MX:
        return _mx(kind, data or {}, setting)
    if kind in _FLOAT8:
        return _float8(kind, data or {}, setting)
    if kind in _NVFP4:
        if _NVFP4[kind]:
            setting.note(f"{kind}: {_NVFP4[kind]}")
        if (data or {}).get("use_dynamic_per_tensor_scale", True) is False:
            at = setting.at("_data", "use_dynamic_per_tensor_scale")
            at.note("a tensor always has an FP32 scale here")
        return {"fprop": "nvfp4"}
    setting.note(f"{kind} is not an 8-bit float: the layer stays in BF16")
    return _UNQUANTIZED


def _float8(kind: str, data: dict[str, Any], setting: Setting) -> dict[str, str] | str:
    """Returns the `use` of an FP8 configuration with FP32 scales."""
    usual, differs = _FLOAT8[kind]
    if differs:
        setting.note(f"{kind}: {differs}")
    for key in ("activation_value_lb", "activation_value_ub"):
        if data.get(key) is not None:
            setting.at("_data", key).note("bounds of a scale are not supported")
    elems = _elems(data)
    scaling = _scaling(data.get("granularity") or {"_type": usual})
    if scaling is None or None in elems or len(elems) > 1:
        setting.note(f"{kind} with scales or elements that fp8 lacks: here MXFP8")
        return {"fprop": "mxfp8"}
    return {"fprop": "fp8", "scaling": scaling, "elem_dtype": str(elems.pop())}


def _scaling(granularity: Any) -> str | None:
    """Returns the `scaling` key for a granularity or an (activation, weight) pair; None if unsupported."""
    both = granularity if isinstance(granularity, list) else [granularity, granularity]
    kinds = [entry.get("_type") if isinstance(entry, dict) else None for entry in both]
    if kinds == ["PerBlock", "PerBlock"]:
        blocks = tuple((entry.get("_data") or {}).get("block_size") for entry in both)
        return "block" if blocks == _BLOCKS else None
    return _SCALINGS.get(str(kinds[0])) if len(kinds) == 2 and kinds[0] == kinds[1] else None


def _mx(kind: str, data: dict[str, Any], setting: Setting) -> dict[str, str] | str:
    """Returns the `use` of an MX configuration: MXFP8 for FP8 elements in blocks of 32."""
    elems = _elems(data)
    block = data.get("block_size", 32)
    if None in elems or len(elems) > 1 or block != 32:
        setting.note(f"{kind} with elements that are not FP8, or blocks of {block}: the layer stays in BF16")
        return _UNQUANTIZED
    use = {"fprop": "mxfp8", "elem_dtype": str(elems.pop())}
    usual = "RCEIL" if kind == "MXDynamicActivationMXWeightConfig" else "FLOOR"
    scaling = _word(data.get("scaling_mode"), usual)
    if scaling.lower() in tuple(Rounding):
        return {**use, "rounding": scaling.lower()}
    setting.note(f"unknown scaling mode {scaling}: here RCEIL")
    return use


def _elems(data: dict[str, Any]) -> set[str | None]:
    """Returns the element types of the activation and of the weight; None stands for others than FP8."""
    keys = ("activation_dtype", "weight_dtype")
    return {_ELEMS.get(_word(data.get(key), "float8_e4m3fn")) for key in keys}


def _word(value: Any, default: str) -> str:
    """Returns torchao's word for a dtype or an enumeration: ``{"_type": …, "_data": word}``."""
    if value is None:
        return default
    word = value.get("_data") if isinstance(value, dict) else value
    return str(word).removeprefix("torch.")
