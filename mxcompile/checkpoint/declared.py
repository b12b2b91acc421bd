"""Reads, checks and writes the formats of stored weights in the configuration of a checkpoint.

    quantization_config of config.json      without it: hf_quant_config.json of ModelOpt

`METHODS` has one function for each ``quant_method``. Values must match exactly.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from mxcompile.checkpoint.files import Checkpoint, read_json
from mxcompile.checkpoint.weight_entries import FP8_BLOCKS, FP8_CHANNELS, MXFP4, MXFP8, MXINT8, NVFP4
from mxcompile.errors import CheckpointError, FormatError, not_allowed
from mxcompile.formats import Format, ScaleType, Tile, stored_precision
from mxcompile.storage.weights import StoredWeight

HF_QUANT_CONFIG = "hf_quant_config.json"

_FP8 = frozenset({FP8_BLOCKS, FP8_CHANNELS})
_SINGLE = {form: frozenset({form}) for form in (MXFP8, MXINT8, MXFP4, NVFP4)}

_OF_INPUTS = ("transform_config", "rotation_config", "hadamard_config", "pre_quant_scale")
"""Keys of compressed-tensors, AutoRound and ModelOpt for methods that rotate or scale inputs."""

_OF_ATTENTION = ("kv_cache_scheme", "kv_cache_quant_algo", "static_kv_dtype", "static_attention_dtype")
"""Keys of compressed-tensors, ModelOpt and AutoRound for quantized keys, values and queries."""

_T = TypeVar("_T")
Forms = frozenset[Format]

_FORMATS = {
    MXFP8: "mxfp8-quantized",
    MXINT8: "mxint8-quantized",
    MXFP4: "mxfp4-pack-quantized",
    NVFP4: "nvfp4-pack-quantized",
}
"""Names of formats in compressed-tensors, and a name for MXINT8, which compressed-tensors lacks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Declared:
    """The formats of stored weights according to a configuration.

    source: file and key, for messages. forms: formats that weights may have; empty for any. by_module:
    formats of single modules. kept: names of modules whose weights are not quantized, or patterns with ``*``.
    tile: tile of the scales of 8-bit weights, or None. scale_type: type of the scales, if it can differ from
    their dtype.
    """

    source: str = ""
    forms: Forms = frozenset()
    by_module: Mapping[str, Forms] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    tile: Tile | None = None
    scale_type: ScaleType | None = None

    def check(self, weight: StoredWeight) -> None:
        """Raises `CheckpointError` if `weight` contradicts the configuration."""
        module = weight.name.removesuffix(".weight")
        listed = self.by_module.get(module)
        if weight.form is None:
            if listed and weight.tensors == (f"{module}.weight",):
                raise CheckpointError(
                    f"{self.source}: {module!r} is {_labels(listed)}, but {weight.name!r} is {weight.dtype}"
                )
            return
        form, message = weight.form, f"{weight.name!r} is {_labels(frozenset({weight.form}))}"
        if any(module == name or ("*" in name and fnmatch.fnmatchcase(module, name)) for name in self.kept):
            raise CheckpointError(f"{self.source}: {module!r} is not quantized, but {message}")
        allowed = self.by_module.get(module, self.forms)
        if allowed and form not in allowed:
            raise CheckpointError(f"{self.source}: weights are {_labels(allowed)}, but {message}")
        if self.by_module and listed is None:
            raise CheckpointError(f"{self.source}: its list of layers lacks {module!r}, but {message}")


def _labels(forms: Forms) -> str:
    return " or ".join(sorted({stored_precision(form).label for form in forms}))


def quantization_config(checkpoint: Checkpoint) -> tuple[str, dict[str, Any]]:
    """Returns (place of the configuration, quantization_config) of a checkpoint, or ("", {}) without any.

    The key expert_dtype is in config.json itself (DeepSeek-V4) or in the quantization_config (V4.1).
    """
    file = checkpoint.path / "config.json"
    raw = read_json(file) if file.is_file() else {}
    about = raw.get("quantization_config")
    if isinstance(about, dict):
        beside = {key: raw[key] for key in ("expert_dtype",) if key in raw}
        return f"{file}: quantization_config", beside | about
    file = checkpoint.path / HF_QUANT_CONFIG
    if not file.is_file():
        return "", {}
    inner = read_json(file).get("quantization")
    inner = inner if isinstance(inner, dict) else {}
    return str(file), {"quant_method": "modelopt", "ignore": inner.get("exclude_modules"), **inner}


def declared(source: str, about: Mapping[str, Any]) -> Declared:
    """Returns the content of the quantization_config `about`, empty if `METHODS` lacks its quant_method.

    source: place of the configuration, for messages. Raises `CheckpointError` for an unsupported format.
    """
    for key in _OF_INPUTS:
        if about.get(key) and not _is_fused(about[key]):
            raise CheckpointError(
                f"{source}: by its {key}, layers also change their inputs, which mxcompile does not do"
            )
    method = METHODS.get(str(about.get("quant_method")))
    return Declared() if method is None else method(source, about)


def quantizes_attention(about: Mapping[str, Any]) -> bool:
    """Whether a quantization_config quantizes keys, values or queries, with scales in their modules."""
    groups = about.get("config_groups")
    groups = groups.values() if isinstance(groups, dict) else ()
    alone = any(isinstance(group, dict) and group.get("weights") is None for group in groups)
    return alone or any(about.get(key) for key in _OF_ATTENTION)


def _is_fused(transforms: Any) -> bool:
    """Whether the transforms of compressed-tensors change weights alone, whose values include them."""
    try:
        schemes = transforms["config_groups"].values()
        return all(step["location"].startswith("weight_") for scheme in schemes for step in scheme["apply"])
    except (AttributeError, KeyError, TypeError):
        return False


def _allowed(source: str, key: str, word: Any, words: Mapping[Any, _T]) -> _T:
    """Returns the entry for `word`, the value of `key`. Raises `CheckpointError` if `words` lacks it."""
    if word not in words:
        raise CheckpointError(f"{source}: {not_allowed(key, str(word), map(str, words))}")
    return words[word]


def _names(value: Any) -> tuple[str, ...]:
    return tuple(map(str, value)) if isinstance(value, list) else ()


def _tile(source: str, value: Any) -> Tile | None:
    if value is None:
        return None
    try:
        across, along = value
        return Tile.parse(f"{across}x{along}")
    except (TypeError, ValueError, FormatError):
        raise CheckpointError(f"{source}: weight_block_size is {value!r}, not two sizes") from None


def _skipped(about: Mapping[str, Any]) -> tuple[str, ...]:
    return _names(about.get("modules_to_not_convert")) or _names(about.get("ignored_layers"))


def _fp8(source: str, about: Mapping[str, Any]) -> Declared:
    """Reads fine-grained FP8, as DeepSeek has published it and Transformers reads it."""
    tile = _tile(source, about.get("weight_block_size"))
    scales = {None: None, "float": None, "ue8m0": ScaleType.E8M0}
    scale = _allowed(source, "scale_fmt", about.get("scale_fmt"), scales)
    experts = _allowed(source, "expert_dtype", about.get("expert_dtype"), _EXPERTS)
    forms = (_FP8 | _SINGLE[MXFP8] if scale is None else _SINGLE[MXFP8]) | experts
    return Declared(source=source, forms=forms, kept=_skipped(about), tile=tile, scale_type=scale)


def compressed_tensors_config(ignored: Iterable[str], stored_modules: Mapping[str, Format]) -> dict[str, Any]:
    """Returns the quantization_config of compressed-tensors. ignored: modules not quantized.

    stored_modules: format of the weights of each other module. Formats of activations are not written,
    because the policy decides how activations are cast. Source: compressed_tensors.compressors (0.20).
    """
    forms = [form for form in _FORMATS if form in stored_modules.values()] or [MXFP8]
    groups: dict[str, Any] = {}
    for number, form in enumerate(forms):
        of_form = sorted(name for name, stored in stored_modules.items() if stored == form)
        scale_dtype = str(form.scale.dtype)
        groups[f"group_{number}"] = {
            "targets": ["Linear"] if len(forms) == 1 else of_form,
            "weights": {
                "num_bits": form.elem.bits, "type": "int" if form.elem.is_integer else "float",
                "strategy": "tensor_group" if form.two_level else "group", "group_size": form.tile.along,
                "symmetric": True, "dynamic": False, "scale_dtype": scale_dtype, "zp_dtype": scale_dtype,
            },
            "input_activations": None, "output_activations": None, "format": _FORMATS[form],
        }  # fmt: skip
    return {
        "quant_method": "compressed-tensors",
        "format": _FORMATS[forms[0]] if len(forms) == 1 else "mixed-precision",
        "quantization_status": "compressed",
        "config_groups": groups,
        "ignore": sorted(set(ignored)),
    }


def _mxfp8(source: str, about: Mapping[str, Any]) -> Declared:
    """Reads MXFP8 of MiniMax and SGLang; experts may be NVFP4."""
    tile = _tile(source, about.get("weight_block_size"))
    experts = _allowed(source, "moe_quant_algo", about.get("moe_quant_algo"), _ALGORITHMS | _NOTHING)
    return Declared(source=source, forms=_SINGLE[MXFP8] | experts, kept=_skipped(about), tile=tile)


def _modelopt(source: str, about: Mapping[str, Any]) -> Declared:
    kept, algorithm = _names(about.get("ignore")), about.get("quant_algo")
    layers = about.get("quantized_layers")
    if algorithm != _MIXED:
        forms = _allowed(source, "quant_algo", algorithm, _ALGORITHMS | {_MIXED: frozenset()})
        return Declared(source=source, forms=forms, kept=kept)
    if not isinstance(layers, dict) or not all(isinstance(settings, dict) for settings in layers.values()):
        raise CheckpointError(f"{source}: quant_algo is {_MIXED} without quantized_layers: add this list")
    by_module = {
        name: _allowed(source, f"quant_algo of {name}", settings.get("quant_algo"), _ALGORITHMS)
        for name, settings in layers.items()
    }
    return Declared(source=source, by_module=by_module, kept=kept)


def _auto_round(source: str, about: Mapping[str, Any]) -> Declared:
    _allowed(source, "packing_format", about.get("packing_format"), dict.fromkeys((None, _PACKING)))

    def forms(entry: Mapping[str, Any]) -> Forms:
        pair = entry.get("data_type", about.get("data_type")), entry.get("bits", about.get("bits"))
        return _allowed(source, "data_type and bits", pair, _DATA_TYPES)

    kept, all_forms = [], forms(about)
    for name, entry in (about.get("extra_config") or {}).items():
        if entry.get("bits", about.get("bits")) > _MOST_BITS:
            kept.append(name)
        else:
            all_forms |= forms(entry)
    return Declared(source=source, forms=all_forms, kept=tuple(kept))


def _compressed_tensors(source: str, about: Mapping[str, Any]) -> Declared:
    """Reads the formats of groups, without their targets, which only a model can resolve."""
    groups, forms = about.get("config_groups"), frozenset[Format]()
    for name, group in groups.items() if isinstance(groups, dict) else ():
        weights = group.get("weights") if isinstance(group, dict) else None
        word = (group.get("format") or about.get("format")) if weights is not None else None
        if word not in {None, "mixed-precision", "dense"}:
            file = source.partition(": quantization_config")[0]
            forms |= _allowed(f"{file}: {name}", "format", word, COMPRESSED_FORMATS)
    return Declared(source=source, forms=forms)


_MIXED, _PACKING, _MOST_BITS = "MIXED_PRECISION", "auto_round:llm_compressor", 8
_NOTHING: dict[Any, Forms] = {None: frozenset()}
_EXPERTS: dict[Any, Forms] = {**_NOTHING, "fp8": frozenset(), "fp4": _SINGLE[MXFP4]}

_ALGORITHMS: dict[Any, Forms] = {
    "MXFP8": _SINGLE[MXFP8],
    **dict.fromkeys(("NVFP4", "W4A16_NVFP4", "W4A8_NVFP4_FP8"), _SINGLE[NVFP4]),
    **dict.fromkeys(("W4A8_MXFP4_FP8", "MXFP4"), _SINGLE[MXFP4]),
    **dict.fromkeys(("FP8", "FP8_PER_CHANNEL_PER_TOKEN", "fp8_pb_wo", "FP8_PB_WO"), _FP8),
}
"""Formats by ModelOpt's quant_algo. NVFP4_AWQ and others, which change inputs, are unsupported."""

_DATA_TYPES: dict[Any, Forms] = {
    ("mx_fp", 8): _SINGLE[MXFP8],
    ("mx_fp", 4): _SINGLE[MXFP4],
    ("nv_fp", 4): _SINGLE[NVFP4],
}
"""Formats by AutoRound's data_type and bits."""

COMPRESSED_FORMATS: dict[Any, Forms] = {word: _SINGLE[form] for form, word in _FORMATS.items()}
COMPRESSED_FORMATS["float-quantized"] = _FP8
"""Formats by their names in compressed-tensors."""

METHODS: dict[str, Callable[[str, Mapping[str, Any]], Declared]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
    "mxfp8": _mxfp8,
    "fp8": _fp8,
    "auto-round": _auto_round,
}
"""The functions that read a quantization_config, by its quant_method."""
