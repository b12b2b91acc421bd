"""Imports FP8 training recipes of Transformer Engine and torchao, by name, with their fields.

    recipe: DelayedScaling          the class (Transformer Engine) or the name (torchao's Float8LinearConfig)
    amax_history_len: 16            its fields, as in Python; an enumeration by its member's name

Fields that are off (false, null) have no effect. A field that no recipe has is an error. In newer versions of
Transformer Engine `backward_override` replaces `override_linear_precision` for dgrad and wgrad.
Source: transformer_engine/common/recipe/__init__.py, torchao/float8/config.py.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mxcompile.errors import not_allowed, shown
from mxcompile.formats.four_over_six import BOUNDS, BlockError
from mxcompile.policy.importers.draft import Setting
from mxcompile.policy.model import Backward, Gemm

NAME = "recipe"
TOOL = "an FP8 training recipe; the preset selects the layers"
PRESET = "nvidia"

_KEY = "recipe"
_EVERY = {"name": "*"}
_GRADIENTS = {"HYBRID": "e5m2", "E4M3": "e4m3"}
_COMMON = frozenset({_KEY, "fp8_format", "override_linear_precision", "backward_override"})
_BACKWARD = (None, "high_precision", "dequantized")


def recognises(data: dict[Any, Any]) -> bool:
    """Whether `data` names a recipe."""
    return isinstance(data.get(_KEY), str)


def convert(data: Any, setting: Setting) -> None:
    """Sets the preset of the draft and adds a rule for the fields that differ from it."""
    if not isinstance(data, dict) or _KEY not in data:
        raise setting.error(f"a recipe must be a mapping with the key {_KEY!r} and the recipe's fields")
    name = data[_KEY]
    if not isinstance(name, str) or name not in _RECIPES:
        raise setting.at(_KEY).error(not_allowed("recipe", name, _RECIPES))
    preset, usual, fields, read = _RECIPES[name]
    setting.draft.preset = preset
    use = read(data, setting)
    value = data.get("fp8_format", usual)
    elem = value.rpartition(".")[2] if isinstance(value, str) else value
    if usual and (not isinstance(elem, str) or elem not in _GRADIENTS):
        raise setting.at("fp8_format").error(not_allowed("format", value, _GRADIENTS))
    if usual and elem != usual:  # inputs and weights are E4M3
        use["grad_dtype"] = _GRADIENTS[elem]
    for key, value in data.items():
        if key in fields or key in _COMMON:
            continue
        if key not in _WITHOUT:
            allowed = [*sorted(fields | _COMMON), *sorted(_WITHOUT)]
            raise setting.at(key).error(not_allowed(f"field of {name}", key, allowed))
        if value not in (False, None):
            setting.at(key).note("has no counterpart here")
    use |= _overridden(data, setting)
    if use:
        setting.at(_KEY).rule(_EVERY, use, f"recipe {name}")


def _delayed(data: dict[str, Any], setting: Setting) -> dict[str, Any]:
    algorithm = data.get("amax_compute_algo", "max")
    if algorithm not in ("max", "most_recent"):
        setting.at("amax_compute_algo").note(
            f"{shown(algorithm)} is not in the policy language: the largest of the history is used"
        )
    history = 1 if algorithm == "most_recent" else data.get("amax_history_len", 1024)
    if data.get("reduce_amax", True) is not False:
        setting.at(_KEY).note("amax is reduced over ranks there; here every rank has a separate history")
    return {"scaling": "delayed", "history": history, "margin": data.get("margin", 0)}


def _tensorwise(data: dict[str, Any], setting: Setting) -> dict[str, Any]:
    return {"scale": "pow2"} if data.get("use_power_2_scales") or data.get(_POW2) else {}


def _block(data: dict[str, Any], setting: Setting) -> dict[str, Any]:
    for key, usual in _BLOCK_DIMS.items():
        if data.get(key, usual) != usual:
            setting.at(key).note(f"{shown(data[key])} is not supported: it is {usual} here")
    return {} if data.get("use_f32_scales") is True else {"scale": "pow2"}


def _nvfp4(data: dict[str, Any], setting: Setting) -> dict[str, Any]:
    for key, usual in (("fp4_format", "E2M1"), ("fp8_format", "E4M3")):
        field_value = data.get(key, usual)
        if not isinstance(field_value, str) or field_value.rpartition(".")[2] != usual:
            raise setting.at(key).error(not_allowed("format", field_value, [usual]))
    use = {key: value for flag, (key, value) in _NVFP4_PARTS.items() if data.get(flag)}
    if data.get("row_scaled_activation"):
        use["row_scaled"] = "x"
    return use | _four_over_six(data, setting)


def _four_over_six(data: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Returns the operands in a recipe's scope with their choice between two scales; gradients have none."""
    scopes = []
    for key, usual in (("nvfp4_4over6", "none"), ("nvfp4_4over6_e4m3_use_256", "all")):
        scope = data.get(key, usual)
        if scope not in _SCOPES:
            raise setting.at(key).error(not_allowed("scope", scope, _SCOPES))
        scopes.append(_SCOPES[scope])
    chosen, narrow = scopes
    value = data.get("nvfp4_4over6_err_mode", "MAE")
    error = str(value).lower()
    if error not in list(BlockError):
        allowed = [str(kind).upper() for kind in BlockError]
        raise setting.at("nvfp4_4over6_err_mode").error(not_allowed("error", value, allowed))
    if not chosen:
        return {}
    least, most = min(BOUNDS), max(BOUNDS)
    bounds: dict[str, Any] = {operand: least if operand in narrow else most for operand in chosen}
    return {"four_over_six": bounds if error == BlockError.MAE else {**bounds, "error": error}}


def _rowwise(data: dict[str, Any], setting: Setting) -> dict[str, Any]:
    return {} if data.get(_POW2) is False else {"scale": "pow2"}


def _rowwise_hp(data: dict[str, Any], setting: Setting) -> dict[str, Any]:
    setting.at(_KEY).note("the weight has one scale in dgrad there; here it has one per channel")
    return _rowwise(data, setting)


def _overridden(data: dict[str, Any], setting: Setting) -> dict[str, Any]:
    """Returns the GEMMs that a recipe leaves in high precision, or the key for a dequantized backward."""
    value = data.get("override_linear_precision", [False, False, False])
    if not isinstance(value, list) or len(value) != 3 or not all(isinstance(flag, bool) for flag in value):
        raise setting.at("override_linear_precision").expected("three of true and false", value)
    backward = data.get("backward_override")
    if backward not in _BACKWARD:
        raise setting.at("backward_override").error(not_allowed("override", backward, map(str, _BACKWARD)))
    if backward == Backward.DEQUANTIZED:
        return {"backward": str(backward)} | ({"fprop": "bf16"} if value[0] else {})
    high = [False, backward is not None, backward is not None]
    return {str(g): "bf16" for g, *kept in zip(Gemm, value, high, strict=True) if any(kept)}


_POW2 = "round_scales_to_power_of_2"
_WITHOUT = frozenset(
    {
        "scaling_factor_compute_algo", "amax_epsilon", "fp8_dpa", "fp8_mha",
        "fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad",
        "fp8_gemm_fprop", "fp8_gemm_dgrad", "fp8_gemm_wgrad",
        "enable_fsdp_float8_all_gather", "pad_inner_dim", "emulate",
        "force_recompute_fp8_weight_in_bwd",
        "gemm_config_output", "gemm_config_grad_input", "gemm_config_grad_weight",
    }
)  # fmt: skip
"""Fields that do not concern formats, or that a policy cannot express."""
_BLOCK_DIMS = {"x_block_scaling_dim": 1, "w_block_scaling_dim": 2, "grad_block_scaling_dim": 1}
_HISTORY = frozenset({"margin", "amax_history_len", "amax_compute_algo", "reduce_amax"})
_NVFP4_PARTS: dict[str, tuple[str, Any]] = {
    "disable_rht": ("hadamard", False),
    "disable_stochastic_rounding": ("grad_rounding", "nearest"),
    "disable_2d_quantization": ("weight_block", "1x16"),
}
"""Flags of NVFP4BlockScaling, and the key and value that turn off the same part of the preset."""
_SCOPES = {"none": "", "weights": "w", "activations": "x", "all": "xw"}
"""The operands of each scope of NVFP4BlockScaling, a letter each."""
_NVFP4_FIELDS = frozenset(
    {
        *_NVFP4_PARTS, "fp4_format", "row_scaled_activation", "nvfp4_4over6", "nvfp4_4over6_e4m3_use_256",
        "nvfp4_4over6_err_mode",
    }
)  # fmt: skip
_Read = Callable[[dict[str, Any], Setting], dict[str, Any]]
_RECIPES: dict[str, tuple[str, str, frozenset[str], _Read]] = {
    "DelayedScaling": ("fp8_delayed", "HYBRID", _HISTORY, _delayed),
    "Float8CurrentScaling": ("fp8_tensor", "HYBRID", frozenset({"use_power_2_scales"}), _tensorwise),
    "Float8BlockScaling": ("fp8_block", "E4M3", frozenset({"use_f32_scales", *_BLOCK_DIMS}), _block),
    "MXFP8BlockScaling": ("nvidia", "E4M3", frozenset({"margin"}), lambda *_: {}),
    "NVFP4BlockScaling": ("nvfp4", "", _NVFP4_FIELDS, _nvfp4),
    "tensorwise": ("fp8_tensor", "", frozenset({_POW2}), _tensorwise),
    "rowwise": ("fp8_rowwise", "", frozenset({_POW2}), _rowwise),
    "rowwise_with_gw_hp": ("fp8_rowwise_wgrad_bf16", "", frozenset({_POW2}), _rowwise_hp),
}
"""By recipe: its preset, its `fp8_format` by default ("" if it reads none), its fields, and the function that
returns other differences from the preset."""
