"""llm-compressor recipes, against what compressed-tensors matches and in which order."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from import_checks import imported, in_mxfp8, layer, sent

from mxcompile.errors import PolicyError

MODULES = [
    (f"model.layers.{i}.{part}", "Linear")
    for i in (0, 1, 10)
    for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate", "mlp.gate_proj", "mlp.down_proj")
] + [("lm_head", "Linear"), ("vision_tower.fc", "Linear"), ("model.extra", "Conv1D")]

RECIPE = """
quant_stage:
  quant_modifiers:
    SmoothQuantModifier:
      smoothing_strength: 0.8
    QuantizationModifier:
      ignore: ["lm_head", "re:.*gate$", "re:vision_tower.*", "Conv1D"]
      config_groups:
        attention:
          weights: {num_bits: 8, type: float, strategy: group, group_size: 32, symmetric: true}
          input_activations: {num_bits: 8, type: float, strategy: group, group_size: 32, dynamic: true}
          targets: ["re:.*self_attn\\\\.(q|k|v|o)_proj$"]
        gates:
          weights: {num_bits: 4, type: int, strategy: group, group_size: 128}
          targets: ["re:.*gate_proj$"]
        rest:
          weights: {num_bits: 8, type: float, strategy: channel}
          targets: [Linear]
"""


def test_a_recipe_as_people_have_them(tmp_path: Path):
    result = imported(RECIPE, tmp_path)
    assert result.policy.base.name == "bf16"
    for name, module in MODULES:
        kept = name == "lm_head" or "gate" in name or "vision" in name or module == "Conv1D"
        scales = "1x32 rceil" if "_proj" in name and "attn" in name else "channel nearest"
        assert sent(result.policy, layer(name, module)) == ({} if kept else {"fprop": f"e4m3 {scales}"}), name
    modifier_path = "quant_stage.quant_modifiers.QuantizationModifier"
    assert list(result.notes) == [
        "line 4: quant_stage.quant_modifiers.SmoothQuantModifier: changes weights, not formats",
        f"line 7: {modifier_path}.ignore: Conv1D: classes derived from it are not matched, add their names",
        f"line 9: {modifier_path}.config_groups.attention: rounds MXFP8 scales in another way: here RCEIL",
        f"line 13: {modifier_path}.config_groups.gates: is not an 8-bit float: its layers stay in BF16",
        f"line 16: {modifier_path}.config_groups.rest: quantizes weights only: here the activations are"
        " quantized too",
        f"line 6: {modifier_path}: Linear: classes derived from it are not matched, add their names",
    ]


def scheme_of(name: str, module: str, groups: dict[str, list[str]], ignore: list[str]) -> str | None:
    """What compressed-tensors gives a module: `groups` are its schemes and their targets."""

    def by_name(target: str) -> bool:
        if target.startswith("re:"):
            return re.match(target.removeprefix("re:"), name) is not None
        return target == name

    if any(by_name(target) or target == module for target in ignore):
        return None
    owner = {target: scheme for scheme, targets in groups.items() for target in targets}
    ordered = sorted(owner, key=lambda target: ("re:" in target, target))
    matched = [t for t in ordered if by_name(t)] + [t for t in ordered if t == module]
    return owner[matched[0]] if matched else None


TARGETS = st.sampled_from(
    [
        "Linear", "Conv1D", "lm_head", "model.layers.1.mlp.down_proj", "model.layers.1", "re:.*q_proj",
        "re:.*q_proj$", "re:model.layers.1", "re:.*layers\\.(0|10)\\.mlp.*", "re:self_attn", "re:.*gate$",
        "re:lm_head|vision", "re:.*", "re:(?i)MODEL", "re:^model\\.layers\\.\\d+\\.mlp\\.down",
    ]
)  # fmt: skip
LISTS = st.lists(TARGETS, max_size=4, unique=True)


@settings(max_examples=150, deadline=None)
@given(scheme=LISTS, other=LISTS, ignore=LISTS)
def test_targets_match_in_the_order_of_compressed_tensors(scheme, other, ignore, tmp_path_factory):
    schemes = {"MXFP8": scheme, "W4A16": other}
    recipe = {"s_stage": {"s_modifiers": {"QuantizationModifier": {"ignore": ignore, "scheme": schemes}}}}
    result = imported(recipe, tmp_path_factory.getbasetemp())
    for name, module in MODULES:
        sent = in_mxfp8(result.policy, layer(name, module)) == {"fprop"}
        assert sent == (scheme_of(name, module, schemes, ignore) == "MXFP8"), name


@pytest.mark.parametrize(
    ("scheme", "x", "notes"),
    [
        ("MXFP8", "e4m3 1x32 rceil", ["MXFP8 rounds MXFP8 scales in another way: here RCEIL"]),
        ("mxfp8", "e4m3 1x32 rceil", ["mxfp8 rounds MXFP8 scales in another way: here RCEIL"]),
        ("MXFP8A16", "e4m3 1x32 rceil", ["MXFP8A16 rounds", "MXFP8A16 quantizes weights only"]),
        ("FP8", "e4m3 tensor nearest", ["static scales"]),
        ("FP8_DYNAMIC", "e4m3 channel nearest", []),
        ("FP8_BLOCK", "e4m3 1x128 nearest", []),
        ("W8A8", "", ["'W8A8' is not an 8-bit float: its layers stay in BF16"]),
        ("NVFP4", "", ["'NVFP4' is not an 8-bit float"]),
        ("UNQUANTIZED", "", []),
    ],
)
def test_every_imported_scheme_becomes_a_rule_or_a_note(
    scheme: str, x: str, notes: list[str], tmp_path: Path
):
    settings = {"targets": ["re:.*q_proj"], "scheme": scheme}
    result = imported({"q_stage": {"q_modifiers": {"GPTQModifier": settings}}}, tmp_path)
    assert sent(result.policy, layer("q_proj")) == ({"fprop": x} if x else {})
    assert len(result.notes) == len(notes)
    for note, piece in zip(result.notes, notes, strict=True):
        assert piece in note


def test_scales_that_fp8_does_not_have_become_those_of_mxfp8(tmp_path: Path):
    scales = {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 64}
    group = {"weights": scales, "input_activations": scales, "targets": ["Linear"]}
    result = imported(json.dumps({"config_groups": {"group_0": group}}), tmp_path, name="config.json")
    assert sent(result.policy, layer("q_proj")) == {"fprop": "e4m3 1x32 rceil"}
    assert any("has scales of another shape: here one per 32 elements" in note for note in result.notes)


def test_the_config_of_a_compressed_model(tmp_path: Path):
    group = {
        "weights": {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [128, 128]},
        "input_activations": {"num_bits": 8, "type": "float", "strategy": "group", "group_size": 128},
        "output_activations": {"num_bits": 8, "type": "float"},
        "targets": ["Linear"],
    }
    config = {
        "model_type": "llama",
        "quantization_config": {
            "quant_method": "compressed-tensors",
            "config_groups": {"group_0": group},
            "ignore": ["lm_head", "model.layers.0.mlp.gate"],
            "kv_cache_scheme": {"num_bits": 8, "type": "float"},
        },
    }
    result = imported(json.dumps(config, indent="\t"), tmp_path, name="config.json")
    taken = {name for name, module in MODULES if sent(result.policy, layer(name, module))}
    assert taken == {name for name, _ in MODULES} - {"lm_head", "model.layers.0.mlp.gate", "model.extra"}
    formats = result.policy.decide(layer("model.extra.up")).fprop.formats
    assert (str(formats.x), str(formats.w)) == ("e4m3 1x128 nearest", "e4m3 128x128 nearest")
    assert [note.partition(": ")[2] for note in result.notes] == [
        "a policy does not set the format of the KV cache",
        "outputs of a layer are not quantized",
        "has static scales: here they are computed from the current tensor",
        "Linear: classes derived from it are not matched, add their names",
    ]


def test_last_modifier_wins_and_different_ignores_are_noted(tmp_path: Path):
    ignore = ["lm_head", "a.o_proj"]
    modifiers = {
        "QuantizationModifier": {"targets": ["re:.*proj"], "scheme": "MXFP8", "ignore": ignore},
        "GPTQModifier": {"targets": ["re:.*q_proj"], "scheme": "W4A16", "ignore": ["lm_head"]},
        "AWQModifier": {"duo_scaling": True},
    }
    result = imported({"q_stage": {"q_modifiers": modifiers}}, tmp_path)
    assert in_mxfp8(result.policy, layer("a.v_proj")) == {"fprop"}
    for name in ("a.q_proj", "a.o_proj", "lm_head"):
        assert in_mxfp8(result.policy, layer(name)) == set()
    assert any("AWQModifier: changes weights, not formats" in note for note in result.notes)
    assert any("a.o_proj: ignored by this modifier alone" in note for note in result.notes)


def test_imported_embedding_targets_are_noted_as_not_gemms(tmp_path: Path):
    settings = {"targets": ["Linear", "Embedding"], "scheme": "MXFP8"}
    result = imported({"q_stage": {"q_modifiers": {"QuantizationModifier": settings}}}, tmp_path)
    assert any("Embedding: a table lookup is not a GEMM" in note for note in result.notes)
    assert result.policy.rules[0].match.module == ("Linear",)


BROKEN: dict[str, tuple[Any, str]] = {
    "no stage": ({"modifiers": 1}, "no modifiers: expected stages"),
    "a modifier that is none": (
        {"q_stage": {"q_modifiers": {"X": 1}}},
        "q_stage.q_modifiers.X: expected a mapping",
    ),
    "numbers to ignore": (
        {"q_stage": {"q_modifiers": {"GPTQModifier": {"ignore": [1], "scheme": "FP8"}}}},
        "GPTQModifier.ignore: expected names or a list of names, found [1]",
    ),
    "a broken expression": (
        {"q_stage": {"q_modifiers": {"GPTQModifier": {"targets": "re:(", "scheme": "FP8"}}}},
        "GPTQModifier: 're:(.*' is not a regular expression",
    ),
    "a list": ([1], "a recipe must be a mapping of stages"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_recipe_is_an_error_with_its_place(name: str, tmp_path: Path):
    data, piece = BROKEN[name]
    with pytest.raises(PolicyError) as caught:
        imported(data, tmp_path, "llm-compressor")
    assert piece in str(caught.value)
