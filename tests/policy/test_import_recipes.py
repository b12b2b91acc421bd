"""FP8 recipes of Transformer Engine and torchao: what becomes of each layer, and what is said of the rest."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from import_checks import imported, layer

from mxcompile.errors import PolicyError
from mxcompile.policy import Gemm


def formats(policy, gemm: Gemm = Gemm.DGRAD) -> dict[str, str]:
    chosen = policy.decide(layer("model.layers.0.self_attn.q_proj")).choice(gemm).formats
    return {name: str(chosen.operand_format(name)) for name in ("x", "w", "dy")} if chosen else {}


@pytest.mark.parametrize(
    ("text", "x", "w", "dy"),
    [
        (
            "recipe: DelayedScaling\n",
            *["e4m3 tensor nearest delayed:1024:0"] * 2,
            "e5m2 tensor nearest delayed:1024:0",
        ),
        (
            "recipe: DelayedScaling\namax_history_len: 16\nmargin: 1\nfp8_format: E4M3\nreduce_amax: false\n",
            *["e4m3 tensor nearest delayed:16:1"] * 3,
        ),
        (
            "recipe: DelayedScaling\namax_compute_algo: most_recent\n",
            *["e4m3 tensor nearest delayed:1:0"] * 2,
            "e5m2 tensor nearest delayed:1:0",
        ),
        ("recipe: Float8CurrentScaling\n", *["e4m3 tensor nearest"] * 2, "e5m2 tensor nearest"),
        ("recipe: Float8CurrentScaling\nfp8_format: Format.E4M3\n", *["e4m3 tensor nearest"] * 3),
        (
            "recipe: Float8CurrentScaling\nuse_power_2_scales: true\n",
            *["e4m3 tensor pow2"] * 2,
            "e5m2 tensor pow2",
        ),
        ("recipe: Float8BlockScaling\n", "e4m3 1x128 pow2", "e4m3 128x128 pow2", "e4m3 1x128 pow2"),
        (
            "recipe: Float8BlockScaling\nuse_f32_scales: true\n",
            "e4m3 1x128 nearest", "e4m3 128x128 nearest", "e4m3 1x128 nearest",
        ),
        ("recipe: MXFP8BlockScaling\n", *["e4m3 1x32 rceil"] * 3),
        ("recipe: MXFP8BlockScaling\nfp8_format: HYBRID\n", *["e4m3 1x32 rceil"] * 2, "e5m2 1x32 rceil"),
        (
            "recipe: NVFP4BlockScaling\n",
            "e2m1 1x16 two-level", "e2m1 16x16 two-level", "e2m1 1x16 two-level stochastic",
        ),
        (
            "recipe: NVFP4BlockScaling\nfp4_format: E2M1\ndisable_stochastic_rounding: true\n"
            "disable_2d_quantization: true\n",
            *["e2m1 1x16 two-level"] * 3,
        ),
        ("recipe: tensorwise\n", *["e4m3 tensor nearest"] * 2, "e5m2 tensor nearest"),
        ("recipe: rowwise\n", *["e4m3 channel pow2"] * 3),
        ("recipe: rowwise_with_gw_hp\n", *["e4m3 channel pow2"] * 3),
        ("recipe: rowwise\nround_scales_to_power_of_2: false\n", *["e4m3 channel nearest"] * 3),
        (
            "recipe: tensorwise\nround_scales_to_power_of_2: true\n",
            *["e4m3 tensor pow2"] * 2,
            "e5m2 tensor pow2",
        ),
    ],
)  # fmt: skip
def test_recipe_sets_formats_of_each_tensor(tmp_path: Path, text: str, x: str, w: str, dy: str):
    result = imported(text, tmp_path)
    assert formats(result.policy) == {"x": x, "w": w, "dy": dy}
    assert (formats(result.policy, Gemm.WGRAD) == {}) == ("gw_hp" in text)


@pytest.mark.parametrize(("flag", "signs"), [("", 0xD7E8), ("disable_rht: true\n", None)])
def test_nvfp4_recipe_sets_the_transform_of_wgrad(tmp_path: Path, flag: str, signs: int | None):
    result = imported(f"recipe: NVFP4BlockScaling\n{flag}", tmp_path)
    chosen = result.policy.decide(layer("model.layers.0.self_attn.q_proj")).wgrad.formats
    assert chosen is not None
    assert {chosen.operand_format(name, wgrad=True).hadamard for name in ("x", "dy")} == {signs}
    assert chosen.operand_format("x").hadamard is None


PLAIN, TILES = "e2m1 1x16 two-level", "e2m1 16x16 two-level"


@pytest.mark.parametrize(
    ("fields", "x", "w"),
    [
        ("row_scaled_activation: true\n", f"{PLAIN} row-scaled", TILES),
        ("nvfp4_4over6: weights\n", PLAIN, f"{TILES} 4over6:256:mae"),
        ("nvfp4_4over6: activations\n", f"{PLAIN} 4over6:256:mae", TILES),
        (
            "nvfp4_4over6: all\nnvfp4_4over6_e4m3_use_256: weights\nnvfp4_4over6_err_mode: MSE\n",
            f"{PLAIN} 4over6:448:mse",
            f"{TILES} 4over6:256:mse",
        ),
        (
            "nvfp4_4over6: all\nnvfp4_4over6_e4m3_use_256: none\nrow_scaled_activation: true\n",
            f"{PLAIN} 4over6:448:mae row-scaled",
            f"{TILES} 4over6:448:mae",
        ),
        ("nvfp4_4over6: none\nnvfp4_4over6_err_mode: MSE\n", PLAIN, TILES),
    ],
)
def test_choices_of_scales_of_nvfp4(tmp_path: Path, fields: str, x: str, w: str):
    result = imported(f"recipe: NVFP4BlockScaling\n{fields}", tmp_path)
    assert formats(result.policy) == {"x": x, "w": w, "dy": f"{PLAIN} stochastic"}
    assert not result.notes


@pytest.mark.parametrize(
    ("text", "quantized", "backward"),
    [
        ("Float8BlockScaling\noverride_linear_precision: [false, false, true]", "fprop dgrad", "quantized"),
        ("MXFP8BlockScaling\nbackward_override: high_precision", "fprop", "quantized"),
        ("Float8CurrentScaling\nbackward_override: dequantized", "fprop", "dequantized"),
    ],
)
def test_gemms_in_high_precision_stay(tmp_path: Path, text: str, quantized: str, backward: str):
    result = imported(f"recipe: {text}\n", tmp_path)
    assert [str(gemm) for gemm in Gemm if formats(result.policy, gemm)] == quantized.split()
    assert str(result.policy.decide(layer("model.layers.0.self_attn.q_proj")).backward) == backward
    assert not result.notes


def test_disabled_settings_of_a_recipe_add_no_notes(tmp_path: Path):
    off = "fp8_dpa: false\nfp8_mha: false\nbackward_override: null\nuse_power_2_scales: false\n"
    assert not imported(f"recipe: Float8CurrentScaling\n{off}", tmp_path).notes


@pytest.mark.parametrize("name", ["tensorwise", "rowwise", "rowwise_with_gw_hp"])
def test_imported_torchao_recipes_match_torchao_configurations(tmp_path: Path, name: str):
    """Elements, extents and products in high precision of the installed torchao's own configuration."""
    config = pytest.importorskip("torchao.float8.config")
    theirs = config.Float8LinearConfig.from_recipe_name(name)
    result = imported(f"recipe: {name}\n", tmp_path)
    operands = {
        (Gemm.FPROP, "x"): theirs.cast_config_input,
        (Gemm.FPROP, "w"): theirs.cast_config_weight,
        (Gemm.DGRAD, "dy"): theirs.cast_config_grad_output,
        (Gemm.DGRAD, "w"): theirs.cast_config_weight_for_grad_input,
        (Gemm.WGRAD, "x"): theirs.cast_config_input_for_grad_weight,
        (Gemm.WGRAD, "dy"): theirs.cast_config_grad_output_for_grad_weight,
    }
    tiles = {"TENSORWISE": "tensor", "AXISWISE": "channel"}
    elems = {torch.float8_e4m3fn: "e4m3", torch.float8_e5m2: "e5m2"}
    for (gemm, operand), cast in operands.items():
        operand_formats = formats(result.policy, gemm)
        if cast.scaling_type is config.ScalingType.DISABLED:
            assert not operand_formats
            continue
        elem, tile, derivation, *_ = operand_formats[operand].split()
        assert (derivation == "pow2") == theirs.round_scales_to_power_of_2
        assert elem == elems[cast.target_dtype]
        differs = name == "rowwise_with_gw_hp" and (gemm, operand) == (Gemm.DGRAD, "w")
        assert (tile == tiles[cast.scaling_granularity.name]) == (not differs)
    noted = "the weight has one scale in dgrad there" in " ".join(result.notes)
    assert noted == (name == "rowwise_with_gw_hp")


def test_recipe_settings_without_counterpart_are_noted(tmp_path: Path):
    result = imported("recipe: DelayedScaling\nfp8_dpa: true\namax_compute_algo: mine\n", tmp_path)
    notes = " ".join(result.notes)
    assert "fp8_dpa: has no counterpart here" in notes
    assert "'mine' is not in the policy language" in notes
    assert "every rank has a separate history" in notes
    assert not imported("recipe: Float8BlockScaling\n", tmp_path).notes
    assert not imported("recipe: Float8BlockScaling\nuse_f32_scales: true\n", tmp_path).notes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("recipe: DelayedScalin\n", "DelayedScaling"),
        ("recipe: DelayedScaling\nfp8_format: E5M2\n", "unknown format 'E5M2'"),
        ("recipe: DelayedScaling\nfp8_format: [E4M3]\n", "unknown format"),
        ("recipe: DelayedScaling\namax_history_len: 0\n", "positive integer"),
        (
            "recipe: DelayedScaling\namax_history_length: 16\n",
            "amax_history_length.*did you mean 'amax_history_len'",
        ),
        ("recipe: Float8CurrentScaling\namax_history_len: 16\n", "unknown field of Float8CurrentScaling"),
        ("recipe: rowwise\noverride_linear_precision: yes\n", "three of true and false"),
        ("recipe: MXFP8BlockScaling\nbackward_override: high\n", "unknown override 'high'"),
        ("recipe: NVFP4BlockScaling\nfp4_format: E3M0\n", "unknown format 'E3M0'"),
        ("recipe: NVFP4BlockScaling\nnvfp4_4over6: weight\n", "unknown scope 'weight'.*mean 'weights'"),
        ("recipe: NVFP4BlockScaling\nnvfp4_4over6: all\nnvfp4_4over6_err_mode: MAX\n", "unknown error 'MAX'"),
    ],
)
def test_recipe_with_wrong_value_raises_policy_error(tmp_path: Path, text: str, message: str):
    with pytest.raises(PolicyError, match=message):
        imported(text, tmp_path)
