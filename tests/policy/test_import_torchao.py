"""torchao's FqnToConfig, against torchao: its own files, and what its quantize_ does to a model."""

from __future__ import annotations

import importlib
import json
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from import_checks import imported, in_mxfp8, layer, sent
from torch import nn

from mxcompile.errors import PolicyError
from mxcompile.formats import E4M3, E5M2, Rounding


def ao(module: str = "quantization") -> Any:
    """A module of torchao, whose import warns."""
    with warnings.catch_warnings(action="ignore"):
        return importlib.import_module(f"torchao.{module}")


def mx(**settings: Any) -> Any:
    return ao("prototype.mx_formats").MXDynamicActivationMXWeightConfig(**settings)


def written(configs: dict[str, Any]) -> str:
    """What torchao writes for `configs`."""
    with warnings.catch_warnings(action="ignore"):
        config = ao().FqnToConfig(OrderedDict(configs))
        return json.dumps(ao("core.config").config_to_dict(config), indent=1)


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        parts = ("q_proj", "k_proj", "up")
        self.layers = nn.ModuleList(nn.ModuleDict({p: nn.Linear(32, 32) for p in parts}) for _ in range(3))
        self.head, self.norm = nn.Linear(32, 32), nn.LayerNorm(32)


NAMES = [name for name, module in Model().named_modules() if isinstance(module, nn.Linear)]


def quantized(configs: dict[str, bool]) -> set[str]:
    """The layers of `Model` that torchao quantizes; `configs` are FP8 or, if False, null."""
    ours = OrderedDict((name, ao().Float8WeightOnlyConfig() if on else None) for name, on in configs.items())
    model = Model().to(torch.bfloat16)
    with warnings.catch_warnings(action="ignore"):
        ao().quantize_(model, ao().FqnToConfig(ours), filter_fn=None)
    return {name for name in NAMES if type(model.get_submodule(name).weight) is not nn.Parameter}


MAPS: list[dict[str, bool]] = [
    {"head": True},
    {"layers.0.q_proj": True, "layers.1.up": True},
    {"re:.*q_proj": True},
    {"re:q_proj": True},
    {"re:(layers.*_proj|head).*": True, "head": False},
    {"re:(layers.*_proj|head)": True, "head": False},
    {"head.weight": True, "head": False},
    {"re:layers\\..+\\.(q|k)_proj\\.weight": True},
    {"re:.*up.weight": True},
    {"re:layers\\.1\\..*": True},
    {"re:.*\\.q_proj\\..+": True},
    {"re:.*k_proj\\.[^.]+": True},
    {"re:layers\\.[02]\\..*": True, "re:layers\\.2.*_proj": False},
    {"re:layers\\.2.*_proj": False, "re:layers\\.[02]\\..*": True},
    {"re:.*q_proj": False, "_default": True},
    {"re:layers\\.\\d\\.up": False, "layers.1.up": True, "_default": True},
    {"re:head|.*up": True},
    {"re:[|].*": True},
    {"_default": True},
]


@pytest.mark.parametrize("configs", MAPS, ids=str)
def test_the_layers_are_those_that_torchao_quantizes(configs: dict[str, bool], tmp_path: Path):
    text = written({name: mx() if on else None for name, on in configs.items()})
    result = imported(text, tmp_path, name="config.json")
    assert {name for name in NAMES if in_mxfp8(result.policy, layer(name)) == {"fprop"}} == quantized(configs)


@pytest.mark.parametrize(
    ("settings", "elem", "rounding"),
    [
        ({}, E4M3, Rounding.RCEIL),
        ({"activation_dtype": torch.float8_e5m2, "weight_dtype": torch.float8_e5m2}, E5M2, Rounding.RCEIL),
        *(({"mode": mode}, E4M3, Rounding(mode.lower())) for mode in ("FLOOR", "RCEIL", "CEIL", "EVEN")),
    ],
    ids=str,
)
def test_formats_are_those_of_the_mx_configuration(settings: dict[str, Any], elem, rounding, tmp_path: Path):
    if "mode" in settings:
        modes = ao("prototype.mx_formats.mx_tensor").ScaleCalculationMode
        settings = {"scaling_mode": modes[settings["mode"]]}
    result = imported(written({"head": mx(**settings)}), tmp_path, name="config.json")
    decision = result.policy.decide(layer("head")).fprop.formats
    assert (decision.x.elem, decision.w.elem) == (elem, elem)
    assert decision.x.rounding is decision.w.rounding is rounding
    assert result.notes == ()


@pytest.mark.parametrize(
    ("granularity", "x", "w"),
    [
        (None, "tensor", "tensor"),
        ("PerTensor", "tensor", "tensor"),
        ("PerRow", "channel", "channel"),
        ("PerBlock", "1x128", "128x128"),
    ],
)
def test_fp8_keeps_its_granularity(granularity: str | None, x: str, w: str, tmp_path: Path):
    kind: Any = None if granularity is None else getattr(ao("quantization.granularity"), granularity)
    if kind is not None:
        kind = [kind([1, 128]), kind([128, 128])] if granularity == "PerBlock" else kind()
    config = ao().Float8DynamicActivationFloat8WeightConfig(granularity=kind)
    result = imported(written({"head": config}), tmp_path, name="config.json")
    formats = result.policy.decide(layer("head")).fprop.formats
    assert (str(formats.x), str(formats.w)) == (f"e4m3 {x} nearest", f"e4m3 {w} nearest")
    assert sent(result.policy, layer("head")).keys() == {"fprop"}
    assert result.notes == ()


def test_nvfp4_configs_of_torchao_become_nvfp4(tmp_path: Path):
    with warnings.catch_warnings(action="ignore"):
        configs = {
            "a": ao("prototype.mx_formats").NVFP4DynamicActivationNVFP4WeightConfig(),
            "b": ao("prototype.mx_formats").NVFP4WeightOnlyConfig(use_dynamic_per_tensor_scale=False),
        }
    result = imported(written(configs), tmp_path, name="config.json")
    for name in configs:
        assert sent(result.policy, layer(name)) == {"fprop": "e2m1 1x16 two-level"}
    config_path = "_data.fqn_to_config.b"
    assert list(result.notes) == [
        f"{config_path}: NVFP4WeightOnlyConfig: the activations are quantized too",
        f"{config_path}._data.use_dynamic_per_tensor_scale: a tensor always has an FP32 scale here",
    ]


def test_configurations_other_than_mxfp8_are_noted(tmp_path: Path):
    with warnings.catch_warnings(action="ignore"):
        configs = {
            "a": ao().Float8DynamicActivationFloat8WeightConfig(),
            "b": ao().Float8WeightOnlyConfig(),
            "c": ao().Int8WeightOnlyConfig(),
            "d": mx(activation_dtype=torch.float4_e2m1fn_x2, weight_dtype=torch.float4_e2m1fn_x2),
            "e.bias": mx(),
        }
    result = imported(written(configs), tmp_path, name="config.json")
    assert {name: formats for name in "abcde" if (formats := sent(result.policy, layer(name)))} == {
        "a": {"fprop": "e4m3 tensor nearest"},
        "b": {"fprop": "e4m3 channel nearest"},
    }
    config_path = "_data.fqn_to_config"
    assert list(result.notes) == [
        f"{config_path}['e.bias']: a bias is not quantized",
        f"{config_path}.b: Float8WeightOnlyConfig: the activations are quantized too",
        f"{config_path}.c: Int8WeightOnlyConfig is not an 8-bit float: the layer stays in BF16",
        f"{config_path}.d: MXDynamicActivationMXWeightConfig with elements that are not FP8, or blocks of 32:"
        " the layer stays in BF16",
    ]


def test_the_config_of_a_model_that_transformers_wrote(tmp_path: Path):
    with warnings.catch_warnings(action="ignore"):
        from transformers import TorchAoConfig

        config = ao().FqnToConfig(OrderedDict({"re:.*": mx()}))
        config = TorchAoConfig(config, modules_to_not_convert=["layers.1", "head"])
        data = {"model_type": "x", "quantization_config": json.loads(config.to_json_string(use_diff=False))}
    result = imported(json.dumps(data), tmp_path, name="config.json")
    sent = {name for name in [*NAMES, "layers.11.up", "lm_head"] if in_mxfp8(result.policy, layer(name))}
    kept = {"layers.1.q_proj", "layers.1.k_proj", "layers.1.up", "head", "lm_head"}
    assert sent == {*NAMES, "layers.11.up"} - kept


def test_one_configuration_for_all_linear_layers(tmp_path: Path):
    text = json.dumps(ao("core.config").config_to_dict(mx()))
    result = imported(text, tmp_path, "torchao", name="config.json")
    assert in_mxfp8(result.policy, layer("anything")) == {"fprop"}
    assert in_mxfp8(result.policy, layer("anything", "Conv1D")) == set()


def test_yaml_map_of_configurations_is_imported(tmp_path: Path):
    data = {"head": None, "_default": {"_type": "MXFPInferenceConfig", "_data": {"block_size": 32}}}
    result = imported(data, tmp_path)
    assert in_mxfp8(result.policy, layer("head")) == set()
    assert in_mxfp8(result.policy, layer("up")) == {"fprop"}


BROKEN: dict[str, tuple[Any, str]] = {
    "a word for a configuration": (
        {"_type": "FqnToConfig", "_data": {"fqn_to_config": {"a": "mx"}}}, "a mapping of",
    ),
    "a configuration of no type": (
        {"a": {"x": 1}}, "a: expected null or a configuration with '_type', found {'x': 1}",
    ),
    "a broken expression": (
        {"re:(": {"_type": "Int8WeightOnlyConfig"}}, "'re:(' is not a regular expression",
    ),
    "a list": ([1], "expected a mapping of names"),
    "words to leave out": (
        {"quant_method": "torchao", "modules_to_not_convert": "head"},
        "modules_to_not_convert: expected a list of names, found 'head'",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_map_is_an_error_with_its_place(name: str, tmp_path: Path):
    data, piece = BROKEN[name]
    with pytest.raises(PolicyError) as caught:
        imported(data, tmp_path, "torchao")
    assert piece in str(caught.value)
