"""Checkpoints in compressed-tensors' ``nvfp4-pack-quantized``, held to the values of its own code."""

from __future__ import annotations

import json
import logging
from pathlib import Path

import pytest
import torch
from helpers.policies import rule
from safetensors.torch import load_file, save_file
from small_models import assert_refused, assert_same_logits, llama, mixtral, same_bytes, store_blocks
from torch import nn

import mxcompile
from mxcompile import MXTensor
from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.layouts import weights_in
from mxcompile.cli import main
from mxcompile.report.forms.words import byte_count

BF16 = torch.bfloat16
FP4 = torch.float4_e2m1fn_x2
TOKENS = torch.arange(10)[None]
TWO_LEVEL = {"elem_dtype": FP4, "rounding": "two-level"}


def quantize(x: torch.Tensor) -> MXTensor:
    return mxcompile.quantize(x, **TWO_LEVEL)


def scheme(activations: bool = False):
    from compressed_tensors.quantization import QuantizationScheme, quant_scheme

    kind = quant_scheme.NVFP4 if activations else quant_scheme.NVFP4A16
    return QuantizationScheme(targets=["Linear"], **kind)


def theirs(weight: torch.Tensor, factor: float = 1.0) -> dict[str, torch.Tensor]:
    """The tensors that compressed-tensors makes of `weight`."""
    from compressed_tensors.compressors import NVFP4PackedCompressor
    from compressed_tensors.quantization.utils import generate_gparam

    whole = generate_gparam(weight.min(), weight.max()) * factor
    largest = weight.float().unflatten(-1, (-1, 16)).abs().amax(-1)
    scale = (largest / 6 * whole).to(torch.float8_e4m3fn)
    parts = {"weight": weight, "weight_scale": scale.to(weight.dtype), "weight_global_scale": whole}
    return NVFP4PackedCompressor.compress(parts, scheme())


def decompressed(parts: dict[str, torch.Tensor]) -> torch.Tensor:
    from compressed_tensors.compressors import NVFP4PackedCompressor

    return NVFP4PackedCompressor.decompress(parts, scheme())["weight"]


def layer(n: int = 96, k: int = 64) -> nn.ModuleDict:
    return nn.ModuleDict({"m": nn.Linear(k, n, bias=False, dtype=BF16)})


def write(folder: Path, tensors: dict[str, torch.Tensor]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({f"m.{name}": value for name, value in tensors.items()}, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("seed", range(4))
def test_values_are_those_that_compressed_tensors_decompresses(tmp_path, seed):
    """Bit for bit in BF16, of what either has written, whatever the global scale."""
    torch.manual_seed(seed)
    dense = torch.randn(256, 512) * torch.logspace(-3, 2, 512)
    parts = theirs(dense.to(BF16), factor=1 - seed / 7)
    model = mxcompile.load_quantized(write(tmp_path / "theirs", parts), layer(256, 512))
    weight = model["m"].weight
    assert isinstance(weight, MXTensor)
    assert torch.equal(weight.dequantize(), decompressed(parts))
    assert torch.equal(weight.global_scale.reshape(1), parts["weight_global_scale"])

    model["m"].weight = nn.Parameter(quantize(dense), requires_grad=False)
    mxcompile.save_quantized(model, tmp_path / "ours")
    tensors = load_file(tmp_path / "ours/model.safetensors")
    ours = {name.removeprefix("m."): value for name, value in tensors.items()}
    layouts = [{name: (v.dtype, v.shape) for name, v in layout.items()} for layout in (ours, parts)]
    assert layouts[0] == layouts[1]
    assert torch.equal(decompressed(ours), model["m"].weight.dequantize())


def test_loaded_nvfp4_checkpoint_is_saved_byte_for_byte(tmp_path):
    folder = write(tmp_path / "in", theirs(torch.randn(96, 64, dtype=BF16), factor=0.7))
    model = mxcompile.load_quantized(folder, layer())
    mxcompile.save_quantized(model, tmp_path / "out")
    before, after = (load_file(directory / "model.safetensors") for directory in (folder, tmp_path / "out"))
    assert before.keys() == after.keys()
    assert all(same_bytes(before[name], after[name]) for name in before)


@pytest.mark.filterwarnings("ignore")
def test_saved_stack_of_experts_loads_with_equal_values(tmp_path):
    """A stack has one global scale for all experts when it is stored here; each its own when it is read."""
    model = store_blocks(mixtral(layers=1), TWO_LEVEL, TWO_LEVEL)
    mxcompile.save_quantized(model, tmp_path / "out")
    loaded = mxcompile.load_quantized(tmp_path / "out")
    for name, value in model.named_parameters():
        restored = loaded.get_parameter(name)
        assert isinstance(restored, MXTensor) == isinstance(value, MXTensor)
        assert torch.equal(restored + 0, value + 0)
    assert_same_logits(TOKENS, loaded, model)
    files = load_file(tmp_path / "out/model.safetensors")
    for name, value in files.items():
        if name.endswith("0.block_sparse_moe.experts.2.w3.weight_global_scale"):
            files[name] = value * 2
    save_file(files, tmp_path / "out/model.safetensors", metadata={"format": "pt"})
    resaved = mxcompile.load_quantized(tmp_path / "out")
    experts = resaved.model.layers[0].mlp.experts.gate_up_proj
    before = loaded.model.layers[0].mlp.experts.gate_up_proj
    assert torch.equal(experts[2, 96:].dequantize() * 2, before[2, 96:].dequantize())
    assert torch.equal(experts[2, :96].dequantize(), before[2, :96].dequantize())
    mxcompile.save_quantized(resaved, tmp_path / "again")
    last = load_file(tmp_path / "again/model.safetensors")
    assert files.keys() == last.keys()
    assert all(same_bytes(files[name], last[name]) for name in files)


def test_scales_of_activations_are_not_read_with_a_warning(tmp_path, caplog, capsys):
    parts = theirs(torch.randn(96, 64, dtype=BF16)) | {"input_global_scale": torch.ones(1)}
    folder = write(tmp_path / "in", parts)
    with caplog.at_level(logging.WARNING, logger="mxcompile"):
        model = mxcompile.load_quantized(folder, layer())
    assert "1 scales of activations are not read" in caplog.text
    assert torch.equal(model["m"].weight.dequantize(), decompressed(parts))
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "layout: compressed-tensors" in printed
    assert "nvfp4 e2m1" in printed
    assert "float32, not read" in printed


def test_inspect_counts_the_scales_too(tmp_path, capsys):
    mxcompile.save_quantized(store_blocks(llama(), TWO_LEVEL, TWO_LEVEL), tmp_path / "out")
    assert main(["inspect", str(tmp_path / "out")]) == 0
    tensors = load_file(tmp_path / "out/model.safetensors").values()
    head, *_ = capsys.readouterr().out.splitlines()
    assert f"1 file, {byte_count(sum(tensor.nbytes for tensor in tensors))}, " in head
    _, weights = weights_in(Checkpoint.open(tmp_path / "out"))
    assert {weight.shape for weight in weights if weight.precision == "nvfp4"} == {
        (64, 64),
        (32, 64),
        (96, 64),
        (64, 96),
    }


def damaged(**changes: torch.Tensor | None) -> dict[str, torch.Tensor]:
    parts = theirs(torch.randn(96, 64, dtype=BF16)) | changes
    return {name: value for name, value in parts.items() if value is not None}


DAMAGE = {
    "no global scale": ({"weight_global_scale": None}, "E4M3 scales but no global scale"),
    "no scale": ({"weight_scale": None}, "'m.weight_scale' is missing: not an MXFP4 or NVFP4 weight"),
    "zero": ({"weight_global_scale": torch.zeros(1)}, "m.weight_global_scale' is 0.0, not a positive number"),
    "negative": ({"weight_global_scale": -torch.ones(1)}, r"is -1\.0, not a positive number"),
    "NaN": ({"weight_global_scale": torch.full([1], torch.nan)}, "is nan, not a positive number"),
    "infinity": ({"weight_global_scale": torch.full([1], torch.inf)}, "is inf, not a positive number"),
    "two global scales": ({"weight_global_scale": torch.ones(2)}, r"of shape \(2,\), not one FP32 number"),
    "BF16 global scale": ({"weight_global_scale": torch.ones(1, dtype=BF16)}, "not one FP32 number"),
    "E8M0 scales": ({"weight_scale": torch.ones(96, 4, dtype=torch.uint8)}, "of torch.uint8, not E4M3"),
    "scales of blocks of 32": (
        {"weight_scale": torch.ones(96, 2).to(torch.float8_e4m3fn)}, "which scales of .* do not fit",
    ),
    "zero points": ({"weight_zero_point": torch.zeros(96, 4)}, "zero points, which are not read"),
}  # fmt: skip


@pytest.mark.parametrize("how", DAMAGE)
def test_damage_is_refused_in_one_line(tmp_path, how):
    changes, message = DAMAGE[how]
    assert_refused(message, write(tmp_path / "in", damaged(**changes)), layer())


def test_groups_in_other_formats_are_refused(tmp_path):
    folder = write(tmp_path / "in", damaged())
    group = {"targets": ["Linear"], "weights": {"num_bits": 4}, "format": "pack-quantized"}
    about = {"quant_method": "compressed-tensors", "format": "mixed-precision", "config_groups": {"a": group}}
    (folder / "config.json").write_text(json.dumps({"quantization_config": about}))
    assert_refused(r"config\.json: a: .*'pack-quantized'.*nvfp4-pack-quantized", folder, layer())


def test_torchaos_own_tensors_are_refused(tmp_path):
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor
    from torchao.prototype.safetensors.safetensors_support import flatten_tensor_state_dict

    nvfp4 = NVFP4Tensor.to_nvfp4(torch.randn(64, 64, dtype=BF16))
    tensors, metadata = flatten_tensor_state_dict({"m.weight": nvfp4})
    save_file(tensors, tmp_path / "theirs.safetensors", metadata=metadata)
    assert_refused(r"'m\.weight' is a torchao NVFP4Tensor", tmp_path / "theirs.safetensors", layer(64, 64))


@pytest.mark.parametrize("tile", ["1x16", "16x16"])
def test_weights_in_training_are_exported_as_its_forward_casts_them(tile):
    """Of tiles that are square every row of one has its scale."""
    model = nn.Sequential(nn.Linear(64, 40, dtype=BF16), nn.ReLU(), nn.Linear(40, 64, dtype=BF16))
    with torch.no_grad():
        model[0].weight.mul_(torch.logspace(-1, 1, 40)[:, None])
    rules = [rule({"precision": "nvfp4", "weight_block": tile}, name="0"), rule("bf16", name="2")]
    policy = {"version": 1, "rules": rules}
    exported = mxcompile.export_weights(model, policy=policy, args=(torch.randn(16, 64, dtype=BF16),))
    exported_weight = {export.name: export for export in exported}["0.weight"]
    weight = model[0].weight.detach()
    assert torch.equal(exported_weight.global_scale, 2688 / weight.float().abs().max().reshape(1))
    if tile == "1x16":
        expected = quantize(weight)
        assert torch.equal(exported_weight.codes, expected.qdata)
        assert torch.equal(exported_weight.scales.view(torch.uint8), expected.scale_bytes)
    else:
        scales = exported_weight.scales.float()
        assert torch.equal(scales[:16], scales[:1].expand(16, -1))
        assert not torch.equal(scales[15], scales[16])
        largest = weight[32:].float().abs().unflatten(1, (4, 16)).amax((0, 2))
        wanted = (largest * (exported_weight.global_scale * (1 / 6))).clamp(max=448).to(torch.float8_e4m3fn)
        assert torch.equal(scales[32], wanted.float())
    names = ("weight_packed", "weight_scale", "weight_global_scale")
    parts = dict(zip(names, exported_weight[1:], strict=True))
    error = (decompressed(parts) - weight).float().norm() / weight.float().norm()
    assert error < 0.15
    (row,) = (row for row in exported.weights.weights if row.name == "0.weight")
    assert row.precision == "nvfp4"
    assert row.num_bytes == sum(part.nbytes for part in parts.values())
    groups = exported.quantization_config()["config_groups"].values()
    assert [group["format"] for group in groups] == ["nvfp4-pack-quantized"]
