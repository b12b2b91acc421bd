"""Transformer Engine's debug files, against what nvdlfw_inspect selects and the features do."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from import_checks import imported, in_mxfp8, layer, sent

from mxcompile.errors import PolicyError
from mxcompile.formats import E4M3, E5M2

ALL = {"fprop", "dgrad", "wgrad"}

LAYERS = [
    f"transformer_layer.{i}.{part}"
    for i in (1, 2, 3, 11, 23)
    for part in (
        "self_attn.layernorm_linear_qkv", "self_attn.linear_qkv", "self_attn.proj", "inter_attn.layernorm_q",
        "layernorm_mlp.fc1", "layernorm_mlp.fc2",
    )
] + ["head", "FC1"]  # fmt: skip

DEBUG = """
# FP8 training, with what diverged kept in higher precision
wgrad_of_the_mlp:
  enabled: True
  layers:
    layer_types: [fc1, fc2]
  transformer_engine:
    DisableFP8GEMM:
      enabled: True
      gemms: [wgrad]
    LogFp8TensorStats:
      enabled: True
      tensors_struct:
      - tensor: activation
        stats: [underflows%]
        freq: 10
first_layers:
  enabled: True
  layers:
    layer_name_regex_pattern: transformer_layer\\.[12]\\.self_attn
  transformer_engine:
    DisableQuantizationLayer:
      enabled: True
emulated:
  enabled: True
  layers:
    layer_name_regex_pattern: .*\\.3\\.inter_attn
  transformer_engine:
    FakeQuant:
      enabled: True
      gemms_struct:
      - gemm: fprop
        tensors: [activation, weight]
        quant_format: MXFP8E4M3
      - gemm: dgrad
        tensors_struct:
        - tensor: gradient
          quant_format: MXFP8E5M2
        - tensor: weight
          quant_format: MXFP8E4M3
      - gemm: wgrad
        tensors: [gradient, output]
        quant_format: FP8E5M2
per_tensor:
  enabled: True
  layers: {layer_types: [proj]}
  transformer_engine:
    PerTensorScaling: {enabled: True, gemms: [fprop, dgrad], tensors: [weight, activation]}
    DisableFP8GEMM: {enabled: False, gemms: [fprop]}
    MyOwnFeature: {enabled: True}
unused:
  enabled: False
  layers: {layer_types: [all]}
  transformer_engine:
    DisableFP8Layer: {enabled: True}
"""


def test_a_file_as_people_have_them(tmp_path: Path):
    result = imported(DEBUG, tmp_path)
    assert result.policy.base.name == "nvidia"
    for name in LAYERS:
        expected = ALL
        if "fc1" in name or "fc2" in name:
            expected = {"fprop", "dgrad"}
        elif re.match(r"transformer_layer\.[12]\.self_attn", name):
            expected = set()
        elif ".3.inter_attn" in name:
            expected = {"fprop", "dgrad"}
        elif "proj" in name:
            expected = {"dgrad", "wgrad"}
            assert sent(result.policy, layer(name))["fprop"] == "e4m3 tensor nearest"
        assert in_mxfp8(result.policy, layer(name)) == expected, name
    emulated = result.policy.decide(layer("transformer_layer.3.inter_attn.layernorm_q")).fprop.formats
    assert (emulated.x.elem, emulated.w.elem, emulated.dy.elem) == (E4M3, E4M3, E5M2)
    sections = ("wgrad_of_the_mlp", "first_layers", "emulated", "per_tensor")
    assert result.origins == tuple(f"section {name}" for name in sections)
    inner = "transformer_engine"
    assert list(result.notes) == [
        f"line 11: wgrad_of_the_mlp.{inner}.LogFp8TensorStats: only collects statistics:"
        " see 'mxcompile audit'",
        f"line 41: emulated.{inner}.FakeQuant.gemms_struct[2]: quantizes output, which is not an operand of"
        " a GEMM",
        f"line 41: emulated.{inner}.FakeQuant.gemms_struct[2]: wgrad of activation in BF16, gradient in"
        " FP8E5M2 is not an MXFP8 GEMM: it stays in BF16",
        f"line 48: per_tensor.{inner}.PerTensorScaling: one scale per tensor for one operand of dgrad: it"
        " stays as in the preset",
        "line 49: per_tensor.transformer_engine.DisableFP8GEMM: is disabled there",
        "line 50: per_tensor.transformer_engine.MyOwnFeature: is an unknown feature, and is left out",
        "line 51: unused: is disabled there",
    ]


def selects(layers: dict[str, Any], name: str) -> bool:
    """What nvdlfw_inspect does: exact names, else a search, else texts and the one number of a name."""
    if "exact_layer_names" in layers:
        return name in layers["exact_layer_names"]
    if "layer_name_regex_pattern" in layers:
        return re.search(layers["layer_name_regex_pattern"], name) is not None
    types, numbers = layers.get("layer_types"), layers.get("layer_numbers")
    type_matches = types is None or "all" in types or any(text in name for text in types)
    numbers_of_name = [int(number) for number in re.findall(r"(?<!fc)\d+", name)]
    return type_matches and (
        numbers is None or "all" in numbers or (len(numbers_of_name) == 1 and numbers_of_name[0] in numbers)
    )


SELECTORS: list[dict[str, Any]] = [
    {"layer_types": ["qkv", "fc2"]},
    {"layer_types": ["fc1"]},
    {"layer_types": ["."]},
    {"layer_types": ["all"]},
    {"layer_types": ["*", "[fc]", "re:proj"]},
    {"layer_numbers": [1, 11]},
    {"layer_numbers": [2, 3], "layer_types": ["fc1", "proj"]},
    {"layer_numbers": ["all"], "layer_types": ["proj"]},
    {"layer_name_regex_pattern": "fc"},
    {"layer_name_regex_pattern": ".*(fc1|proj)"},
    {"layer_name_regex_pattern": "fc1$|^head"},
    {"layer_name_regex_pattern": "(?i)FC1"},
    {"layer_name_regex_pattern": r"\.1\."},
    {"layer_name_regex_pattern": "self_attn.*"},
    {"layer_name_regex_pattern": "^transformer_layer"},
    {"exact_layer_names": ["head", "transformer_layer.1.self_attn.proj"]},
    {"exact_layer_names": ["head"], "layer_types": ["fc1"]},
    {"layer_name_regex_pattern": "proj", "layer_types": ["fc1"]},
]


@pytest.mark.parametrize("layers", SELECTORS, ids=str)
def test_a_section_is_of_the_layers_it_is_of_there(layers: dict[str, Any], tmp_path: Path):
    features = {"transformer_engine": {"DisableFP8Layer": {"enabled": True}}}
    result = imported({"s": {"enabled": True, "layers": layers, **features}}, tmp_path)
    for name in LAYERS:
        assert (in_mxfp8(result.policy, layer(name)) == set()) == selects(layers, name), name
    assert len(result.notes) == (0 if {*layers} <= {"layer_types", "layer_numbers"} else len(layers) - 1)


def test_layer_numbers_accept_ranges_and_single_numbers(tmp_path: Path):
    text = DEBUG.replace("layer_types: [fc1, fc2]", "layer_numbers: ['2-11', 23]")
    policy = imported(text, tmp_path).policy
    kept = [name for name in LAYERS if in_mxfp8(policy, layer(name)) == {"fprop", "dgrad"}]
    assert {name.split(".")[1] for name in kept} >= {"2", "3", "11", "23"}
    assert not any(name.startswith("transformer_layer.1.") for name in kept)


@pytest.mark.parametrize(
    ("tensors", "sent"),
    [
        ({"activation": "MXFP8E4M3", "weight": "MXFP8E4M3"}, {"fprop"}),
        ({"activation": "MXFP8E5M2", "weight": "MXFP8E5M2"}, {"fprop"}),
        ({"activation": "MXFP8E4M3", "weight": "MXFP8E5M2"}, set()),
        ({"activation": "MXFP8E4M3"}, set()),
        ({"activation": "FP8E4M3", "weight": "FP8E4M3"}, set()),
    ],
    ids=str,
)
def test_emulated_quantization_is_mxfp8_where_both_operands_are(
    tensors: dict[str, str], sent: set[str], tmp_path
):
    struct = [{"tensor": tensor, "quant_format": form} for tensor, form in tensors.items()]
    fake = {"enabled": True, "gemms": ["fprop"], "tensors_struct": struct}
    off = {"enabled": True, "gemms": ["fprop", "dgrad", "wgrad"]}
    for features in (
        {"FakeQuant": fake, "DisableFP8GEMM": off},
        {"DisableFP8GEMM": off, "FakeQuantFp8": fake},
    ):
        section = {"enabled": True, "layers": {"layer_types": ["fc1"]}, "transformer_engine": features}
        result = imported({"s": section}, tmp_path)
        assert in_mxfp8(result.policy, layer("fc1")) == sent
        assert len(result.notes) == (not sent)


def test_two_sections_that_disagree_on_a_format_are_kept_apart(tmp_path: Path):
    fake = {"enabled": True, "gemms_struct": [
        {"gemm": "fprop", "tensors": ["activation", "weight"], "quant_format": "MXFP8E4M3"},
        {"gemm": "dgrad", "tensors": ["gradient", "weight"], "quant_format": "MXFP8E5M2"},
    ]}  # fmt: skip
    section = {"enabled": True, "layers": {"layer_types": ["fc1"]}, "transformer_engine": {"FakeQuant": fake}}
    result = imported({"s": section}, tmp_path)
    assert in_mxfp8(result.policy, layer("fc1")) == {"fprop", "wgrad"}
    assert len(result.notes) == 1
    assert "dgrad of gradient in MXFP8E5M2, weight in MXFP8E5M2" in result.notes[0]


ON = "s:\n  enabled: True\n"

BROKEN = {
    "no enabled": ("s:\n  layers: {layer_types: [a]}\n", "1: s: the key 'enabled' is missing"),
    "a section that is none": ("s: {enabled: True, layers: {layer_types: [a]}}\nt: 5\n", "2: t: a section"),
    "no layers": (f"{ON}", "1: s.layers: expected one of exact_layer_names, layer_name"),
    "no selector": (f"{ON}  layers: {{types: [a]}}\n", "3: s.layers: expected one of exact"),
    "no pattern": (
        f"{ON}  layers: {{layer_name_regex_pattern: [a, b]}}\n", "expected one regular expression",
    ),
    "a number for a type": (f"{ON}  layers: {{layer_types: [1]}}\n", "expected a text or a list"),
    "a word for a number": (f"{ON}  layers: {{layer_numbers: [one]}}\n", "such as '3-7', found 'one'"),
    "a bool for a number": (f"{ON}  layers: {{layer_numbers: [true]}}\n", "such as '3-7', found True"),
    "a broken expression": (
        f"{ON}  layers:\n    layer_name_regex_pattern: 'fc(1'\n"
        "  transformer_engine: {DisableFP8Layer: {}}\n",
        "3: s.layers: 're:.*fc(1.*' is not a regular expression",
    ),
    "an unknown GEMM": (
        f"{ON}  layers: {{layer_types: [a]}}\n"
        "  transformer_engine:\n    DisableFP8GEMM: {gemms: [wgard]}\n",
        "5: s.transformer_engine.DisableFP8GEMM: unknown GEMM 'wgard' (did you mean 'wgrad'?)",
    ),
    "no GEMMs": (
        f"{ON}  layers: {{layer_types: [a]}}\n  transformer_engine:\n    DisableFP8GEMM: {{}}\n",
        "expected 'gemms', a list of fprop, dgrad, wgrad, or 'gemms_struct'",
    ),
    "a feature that is none": (
        f"{ON}  layers: {{layer_types: [a]}}\n  transformer_engine:\n    DisableFP8Layer: yes\n",
        "a feature must be a mapping, found True",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_file_is_an_error_with_its_place(name: str, tmp_path: Path):
    text, piece = BROKEN[name]
    with pytest.raises(PolicyError) as caught:
        imported(text, tmp_path, "te")
    assert piece in str(caught.value)
    assert str(caught.value).startswith(f"{tmp_path / 'config.yaml'}:")
