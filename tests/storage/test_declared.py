"""What the configuration of a checkpoint declares is compared with its tensors, or refused."""

from __future__ import annotations

import pytest
import torch
from published_layers import BF16, FP8, K, N, e4m3, layer, loaded, write
from small_models import assert_refused
from torch import nn

import mxcompile
from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.layouts import weights_in

FUSED = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "weight_input"}]}
INPUTS = {"type": "hadamard", "apply": [{"targets": ["Linear"], "location": "input"}]}
ONLINE = {"config_groups": {"R1": FUSED, "R4": INPUTS}}
CONTRADICTIONS = {
    "tile": (FP8, {"weight_block_size": [64, 64]}, r"'m.weight' has shape .* blocks of 64x64 by config.json"),
    "kept": (FP8, {"modules_to_not_convert": ["m"]}, "'m' is not quantized, but 'm.weight' is FP8"),
    "method": (FP8, {"quant_method": "fp8_e4m3"}, "unknown quant_method 'fp8_e4m3'"),
    "format": (FP8, {"quant_method": "mxfp8"}, "weights are MXFP8, but 'm.weight' is FP8"),
    "no weight": (
        {"m.weight_scale_inv": torch.ones(2, 3)}, {}, "'m.weight_scale_inv' is a scale, but 'm.weight' is",
    ),
    "BF16 weight": (
        FP8 | {"m.weight": torch.zeros(N, K, dtype=BF16)}, {}, "'m.weight_scale_inv' is a scale, but",
    ),
    "two scales": (FP8 | {"m.weight_scale": torch.ones(2, 3)}, {}, "'m.weight' has several scales"),
    "rotation": (FP8, {"transform_config": ONLINE}, "by its transform_config, layers also change"),
    "Hadamard": (FP8, {"hadamard_config": {"block_size": 32}}, "by its hadamard_config, layers also change"),
    "smoothed": (FP8, {"pre_quant_scale": True}, "by its pre_quant_scale, layers also change their inputs"),
    "input factor": (FP8 | {"m.pre_quant_scale": torch.ones(K)}, {}, "'m.pre_quant_scale' scales inputs of"),
    "unread": (FP8 | {"m.rotation": torch.ones(2)}, {}, "'m.rotation', which the model lacks"),
    "global scale": (FP8 | {"m.weight_scale_2": torch.ones(())}, {}, "'m.weight_scale_2' is a scale of FP4"),
}  # fmt: skip


@pytest.mark.parametrize("how", CONTRADICTIONS)
def test_contradictions_are_refused_in_one_line(tmp_path, how):
    tensors, change, message = CONTRADICTIONS[how]
    assert_refused(message, write(tmp_path / "in", tensors, {"quant_method": "fp8"} | change), layer())


def test_rotations_that_weights_include_are_read(tmp_path):
    about = {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"R1": FUSED}}}
    assert loaded(write(tmp_path / "in", FP8, about)).dequantize().eq(0).all()


SCHEME = {"num_bits": 8, "type": "float", "strategy": "tensor"}
ATTENTION = {"targets": ["LlamaAttention"], "weights": None, "input_activations": SCHEME}
CACHES = {
    "compressed-tensors": ({"kv_cache_scheme": SCHEME}, "self_attn.{}_scale", "kv"),
    "per head": ({"kv_cache_scheme": SCHEME | {"strategy": "attn_head"}}, "self_attn.{}_scale", "kv"),
    "attention": ({"config_groups": {"group_0": ATTENTION}}, "self_attn.{}_scale", "qkv"),
    "NVFP4": ({"kv_cache_scheme": SCHEME}, "self_attn.{}_global_scale", "kv"),
    "of both": ({"kv_cache_scheme": "static"}, "self_attn.{}_scale", ("kv",)),
    "of outputs": ({"kv_cache_scheme": SCHEME}, "self_attn.{}_proj.output_scale", "kv"),
    "modelopt": ({}, "self_attn.{0}_proj.{0}_scale", "kv"),
}  # fmt: skip


@pytest.mark.parametrize("name", CACHES)
def test_scales_of_attention_are_not_read(tmp_path, caplog, name):
    """Also where the projections of the attention are not quantized."""
    about, pattern, operands = CACHES[name]
    tensors = {"mlp.weight": e4m3(N, K), "mlp.weight_scale": torch.ones(1)}
    model = nn.ModuleDict({"mlp": layer()["m"], "self_attn": nn.Module()})
    for projection in (f"self_attn.{x}_proj" for x in "kv"):
        model.set_submodule(projection, layer()["m"])
        stored = {f"{projection}.weight": e4m3(N, K), f"{projection}.weight_scale": torch.ones(1)}
        kept = {f"{projection}.weight": torch.ones(N, K, dtype=BF16)}
        tensors |= stored if "_proj" in pattern else kept
    shape = (4, 1, 1) if name == "per head" else (1,)
    tensors |= {pattern.format(x): torch.ones(shape) for x in operands}
    folder = write(tmp_path / "in", tensors, {"quant_method": "compressed-tensors"} | about)
    mxcompile.load_quantized(folder, model)
    assert f"{len(operands)} scales of activations are not read" in caplog.text
    assert any(not weight.is_read for weight in weights_in(Checkpoint.open(folder))[1])


def test_a_parameter_named_like_a_scale_of_attention_is_read(tmp_path):
    model = nn.Module()
    model.proj, model.q_scale = layer()["m"], nn.Parameter(torch.ones(1, device="meta"))
    tensors = {
        "proj.weight": e4m3(N, K),
        "proj.weight_scale": torch.ones(1),
        "q_scale": torch.full((1,), 3.0),
    }
    folder = write(tmp_path / "in", tensors, {"quant_method": "compressed-tensors"})
    assert mxcompile.load_quantized(folder, model).q_scale.item() == 3
