"""Checkpoints in the layouts of other projects have the values of their code.

Transformers and compressed-tensors make and decode their own files. ModelOpt and AutoRound are no dependency
of the tests: their files are written by hand, with the names and shapes that ModelOpt 0.47 and AutoRound 0.16
export, and decoded by the formulas of these projects.
"""

from __future__ import annotations

import json
import pickle
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.written import Written
from published_layers import BF16, E4M3, FP8, K, N, e4m3, layer, loaded, write
from safetensors.torch import save_file
from small_models import llama, mixtral, same_bytes
from torch import Tensor, nn

import mxcompile
from mxcompile import MXTensor
from mxcompile.checkpoint.convert import convert
from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.layouts import weights_in
from mxcompile.cli.main import main
from mxcompile.errors import CheckpointError, FormatError
from mxcompile.formats import stored_form
from mxcompile.lowering.cpu.features import features
from mxcompile.models.named import LoadedModel
from mxcompile.storage.weights import StoredWeight


def wide() -> nn.Module:
    return llama(hidden_size=256, intermediate_size=384, num_hidden_layers=1)


def packed(*shape: int) -> tuple[Tensor, Tensor]:
    """Bytes of two E2M1 elements, and their values."""
    numbers = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.randint(16, shape)
    values = numbers[codes & 7] * torch.where(codes > 7, -1.0, 1.0)
    return (codes[..., ::2] | codes[..., 1::2] << 4).to(torch.uint8), values


def tiled(scale: Tensor, across: int, along: int, n: int = N, k: int = K) -> Tensor:
    return scale.float().repeat_interleave(across, 0)[:n].repeat_interleave(along, 1)[:, :k]


@pytest.mark.filterwarnings("ignore")  # Transformers comments on itself
@pytest.mark.parametrize("scale_fmt", ["float", "ue8m0"])
@pytest.mark.parametrize("make", [wide, mixtral], ids=["llama", "mixtral"])
def test_fine_grained_fp8_has_the_values_of_transformers(tmp_path, make, scale_fmt):
    """Quantized and read by Transformers; E8M0 scales of 128×128 tiles become MXFP8."""
    from transformers import FineGrainedFP8Config
    from transformers.core_model_loading import revert_weight_conversion
    from transformers.integrations.finegrained_fp8 import Fp8Quantize

    model = make()
    block = [128, 128] if make is wide else [32, 32] if scale_fmt == "ue8m0" else None
    about = FineGrainedFP8Config(weight_block_size=block, scale_fmt=scale_fmt)
    quantize = Fp8Quantize(SimpleNamespace(quantization_config=about))
    state: dict[str, Tensor] = {}
    for name, value in revert_weight_conversion(model, {**model.state_dict()}).items():
        stays = value.ndim != 2 or any(word in name for word in ("embed", "lm_head", "gate.weight"))
        state |= {name: value} if stays else quantize.convert({name: value})
    folder = write(tmp_path / "in", state, None)
    raw = json.loads(model.config.to_json_string()) | {"architectures": [type(model).__name__]}
    entry = {"quant_method": "fp8", "weight_block_size": block, "scale_fmt": scale_fmt}
    raw["quantization_config"] = entry | {"modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps(raw))
    ours = mxcompile.load_quantized(folder)
    theirs = type(model).from_pretrained(folder, dtype=BF16)
    stored = 0
    for name, value in ours.named_parameters():
        dense = value.dequantize() if isinstance(value, MXTensor) else value
        assert torch.equal(dense, theirs.get_parameter(name)), name
        stored += isinstance(value, MXTensor)
    assert stored == (7 if make is wide else 12)
    layout, weights = weights_in(Checkpoint.open(folder))
    assert layout == "fp8"
    assert {weight.precision for weight in weights} == {"", "fp8" if scale_fmt == "float" else "mxfp8"}


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_fp8_of_compressed_tensors_has_its_values(tmp_path, strategy):
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    shape = {"channel": (N, 1), "tensor": (1,), "block": (2, 3)}[strategy]
    codes, scale = e4m3(N, K), torch.rand(shape).to(BF16) + 0.01
    block = [128, 128] if strategy == "block" else None
    args = QuantizationArgs(num_bits=8, type="float", strategy=strategy, block_structure=block)
    group = {"targets": ["Linear"], "weights": {"strategy": strategy}, "format": "float-quantized"}
    about = {"quant_method": "compressed-tensors", "config_groups": {"group_0": group}}
    folder = write(tmp_path / "in", {"m.weight": codes, "m.weight_scale": scale}, about)
    assert torch.equal(loaded(folder).dequantize(), dequantize(codes, scale, args=args, dtype=BF16))


MODELOPT = {
    "MXFP8": (torch.randint(110, 130, (N, K // 32), dtype=torch.uint8), 1, 32),
    "FP8": (torch.tensor(0.013), N, K),
    "FP8_PER_CHANNEL_PER_TOKEN": (torch.rand(N) + 0.01, 1, K),
    "fp8_pb_wo": (torch.rand(2, 1, 3, 1) + 0.01, 128, 128),
}


@pytest.mark.parametrize("algorithm", MODELOPT)
@pytest.mark.parametrize("file", ["config.json", "hf_quant_config.json"])
def test_fp8_of_modelopt_has_its_values(tmp_path, algorithm, file):
    codes, (scale, across, along) = e4m3(N, K), MODELOPT[algorithm]
    about = {"quant_method": "modelopt", "quant_algo": algorithm, "ignore": ["lm_head"]}
    tensors = {"m.weight": codes, "m.weight_scale": scale, "m.input_scale": torch.tensor(1.0)}
    folder = write(tmp_path / "in", tensors, about if file == "config.json" else None)
    if file != "config.json":
        inner = {"quant_algo": algorithm, "exclude_modules": ["lm_head"]}
        (folder / file).write_text(json.dumps({"quantization": inner}))
    factors = torch.exp2(scale.float() - 127) if algorithm == "MXFP8" else scale
    spread = tiled(factors.reshape(-(-N // across), -1), across, along)
    assert torch.equal(loaded(folder).dequantize(), (codes.float() * spread).to(BF16))


@pytest.mark.parametrize("dtype", [BF16, torch.float16])
def test_nvfp4_of_modelopt_has_its_values(tmp_path, dtype):
    """Its global scale multiplies; the divisor that is stored gives the same values."""
    for _ in range(3):
        codes, values = packed(N, K)
        scale, whole = (torch.rand(N, K // 16) * 400 + 1).to(E4M3), (torch.rand(()) + 0.1) / 2688
        about = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
        tensors = {"m.weight": codes, "m.weight_scale": scale, "m.weight_scale_2": whole}
        folder = write(tmp_path / f"in {_}", tensors, about)
        model = mxcompile.load_quantized(folder, layer(), dtype=dtype)
        wanted = (values * tiled(scale.float() * whole, 1, 16)).to(dtype)
        assert torch.equal(model["m"].weight.dequantize(dtype), wanted)


def test_mixed_precision_of_modelopt_is_checked_layer_by_layer(tmp_path):
    codes, _ = packed(N, K)
    tensors = {
        "a.weight": e4m3(N, K), "a.weight_scale": torch.full((N, K // 32), 120, dtype=torch.uint8),
        "b.weight": codes, "b.weight_scale": torch.ones(N, K // 16).to(E4M3),
        "b.weight_scale_2": torch.tensor(0.01), "c.weight": torch.randn(N, K, dtype=BF16),
    }  # fmt: skip
    layers = {"a": {"quant_algo": "MXFP8"}, "b": {"quant_algo": "NVFP4", "group_size": 16}}
    about = {"quant_method": "modelopt", "quant_algo": "MIXED_PRECISION", "quantized_layers": layers}
    _, weights = weights_in(Checkpoint.open(write(tmp_path / "in", tensors, about)))
    assert {weight.precision for weight in weights} == {"mxfp8", "nvfp4", ""}
    for number, (change, message) in enumerate((
        ({"a": {"quant_algo": "NVFP4"}}, "weights are NVFP4, but 'a.weight' is MXFP8"),
        ({"c": {"quant_algo": "MXFP8"}}, "'c' is MXFP8, but 'c.weight' is torch.bfloat16"),
        ({"a": {"quant_algo": "NVFP4_AWQ"}}, "unknown quant_algo of a 'NVFP4_AWQ'"),
    )):  # fmt: skip
        folder = write(tmp_path / str(number), tensors, about | {"quantized_layers": layers | change})
        with pytest.raises(CheckpointError, match=message):
            weights_in(Checkpoint.open(folder))
    del layers["b"]
    with pytest.raises(CheckpointError, match="its list of layers lacks 'b'"):
        weights_in(Checkpoint.open(write(tmp_path / "less", tensors, about)))


@pytest.mark.parametrize(("bits", "data_type"), [(8, "mx_fp"), (4, "mx_fp"), (4, "nv_fp")])
def test_auto_round_has_its_values(tmp_path, bits, data_type):
    codes, values = (e4m3(N, K), None) if bits == 8 else packed(N, K)
    tensors = {"m.weight" if bits == 8 else "m.weight_packed": codes}
    if data_type == "nv_fp":
        scale, whole = (torch.rand(N, K // 16) * 400 + 1).to(E4M3), torch.rand(1) * 1000 + 1
        tensors |= {"m.weight_global_scale": whole, "m.input_global_scale": torch.ones(1)}
        factors = tiled(scale.float() / whole, 1, 16)
    else:
        scale = torch.randint(110, 130, (N, K // 32), dtype=torch.uint8)
        factors = tiled(torch.exp2(scale.float() - 127), 1, 32)
    about = {"quant_method": "auto-round", "bits": bits, "data_type": data_type, "group_size": 32}
    folder = write(tmp_path / "in", tensors | {"m.weight_scale": scale}, about)
    wanted = (codes.float() if values is None else values) * factors
    assert torch.equal(loaded(folder).dequantize(), wanted.to(BF16))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_mxfp8_of_sglang_is_not_read_as_fp8(tmp_path, dtype):
    """``mxfp8`` contains the word ``fp8``; uint8 scales are exponents, not factors."""
    scale = torch.randint(110, 130, (N, K // 32), dtype=torch.uint8)
    about = {"quant_method": "mxfp8", "weight_block_size": [1, 32], "ignored_layers": ["lm_head"]}
    codes = e4m3(N, K)
    tensors = {"m.weight": codes, "m.weight_scale_inv": scale.view(dtype)}
    weight = loaded(write(tmp_path / "in", tensors, about))
    assert str(weight.form) == "e4m3 1x32 rceil"
    wanted = codes.float() * tiled(torch.exp2(scale.float() - 127), 1, 32)
    assert torch.equal(weight.dequantize(), wanted.to(BF16))


def test_tiles_that_the_weight_cuts_are_read(tmp_path):
    """The last tile of 200×300 has 72 rows and 44 columns."""
    codes, scale = e4m3(200, 300), torch.rand(2, 3) + 0.01
    for name, scales, along in (("fp32", scale, 128), ("e8m0", torch.randint(110, 130, (2, 3)).byte(), 128)):
        about = {"quant_method": "fp8", "weight_block_size": [128, 128]}
        if name == "e8m0":
            scales = scales.view(torch.float8_e8m0fnu)
        tensors = {"m.weight": codes, "m.weight_scale_inv": scales}
        weight = loaded(write(tmp_path / name, tensors, about), 200, 300)
        wanted = codes.float() * tiled(scales, 128, along, 200, 300)
        assert torch.equal(weight.dequantize(), wanted.to(BF16))


def test_fp32_powers_of_two_load_as_mxfp8_under_ue8m0_config(tmp_path):
    codes, scale = e4m3(N, K), torch.exp2(torch.randint(-9, 2, (2, 3)).float())
    about = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0"}
    weight = loaded(write(tmp_path / "in", {"m.weight": codes, "m.weight_scale_inv": scale}, about))
    assert str(weight.form) == "e4m3 1x32 rceil"
    assert torch.equal(weight.dequantize(), (codes.float() * tiled(scale, 128, 128)).to(BF16))
    bad = {"m.weight": codes, "m.weight_scale_inv": scale * 1.5}
    with pytest.raises(CheckpointError, match=r"m\.weight_scale_inv' has scales other than powers of two"):
        loaded(write(tmp_path / "bad", bad, about))


def feed_forward() -> Any:
    """A model with a layer that presets store, and one that they do not."""
    layers = {"up": nn.Linear(K, N, bias=False, dtype=BF16), "down": nn.Linear(N, K, bias=False, dtype=BF16)}
    return Written(lambda model, x: x + model.down(torch.relu(model.up(x))), **layers)


def published(about: str) -> tuple[dict[str, Tensor], Tensor]:
    """Tensors of `up` in a layout, and its values in FP32, by the arithmetic of the layout."""
    codes = e4m3(N, K)
    bytes_ = torch.randint(110, 130, (N, K // 32), dtype=torch.uint8)
    match about:
        case "fp8":
            scale = torch.rand(2, 3) + 0.01
            return {"up.weight": codes, "up.weight_scale_inv": scale}, codes.float() * tiled(scale, 128, 128)
        case "modelopt MXFP8":
            factors = tiled(torch.exp2(bytes_.float() - 127), 1, 32)
            return {"up.weight": codes, "up.weight_scale": bytes_}, codes.float() * factors
        case "modelopt NVFP4":
            elements, values = packed(N, K)
            scale, whole = (torch.rand(N, K // 16) * 400 + 1).to(E4M3), torch.tensor(2.0**-11)
            tensors = {"up.weight": elements, "up.weight_scale": scale, "up.weight_scale_2": whole}
            return tensors, values * tiled(scale.float() * whole, 1, 16)
        case _:
            elements, values = packed(N, K)
            factors = tiled(torch.exp2(bytes_.float() - 127), 1, 32)
            return {"up.weight_packed": elements, "up.weight_scale": bytes_}, values * factors


ENTRIES: dict[str, dict[str, Any]] = {
    "fp8": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    "modelopt MXFP8": {"quant_method": "modelopt", "quant_algo": "MXFP8"},
    "modelopt NVFP4": {"quant_method": "modelopt", "quant_algo": "NVFP4"},
    "compressed-tensors MXFP4": {
        "quant_method": "compressed-tensors", "format": "mxfp4-pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": {}}},
    },
}  # fmt: skip
KEPT = {"modelopt MXFP8": "mxfp8", "modelopt NVFP4": "nvfp4", "compressed-tensors MXFP4": "mxfp4"}


@pytest.mark.parametrize("to", ["mxfp8", "mxint8", "mxfp4", "nvfp4"])
@pytest.mark.parametrize("name", ENTRIES)
def test_published_checkpoints_are_converted_from_their_values(tmp_path, monkeypatch, name, to):
    """Codes stay as they are if the format stays; else the result is the cast of the values in FP32."""
    tensors, values = published(name)
    down = torch.randn(K, N, dtype=BF16)
    source = write(tmp_path / "in", tensors | {"down.weight": down}, ENTRIES[name])
    (source / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "NVFP4"}}))
    elem = {"mxint8": torch.int8, "mxfp8": E4M3}.get(to, torch.float4_e2m1fn_x2)
    rounding = "two-level" if to == "nvfp4" else "rceil"
    model = feed_forward()
    decided = {
        path: StoredWeight(name=path, shape=tuple(tensor.shape), dtype=BF16, form=stored_form(elem, rounding))
        for path, tensor in model.named_parameters()
    }
    monkeypatch.setattr("mxcompile.checkpoint.convert.planned_weights", lambda *_: decided)  # needs a trace
    whole_model = LoadedModel(name="model", model=model)
    table = convert(source, tmp_path / "out", model=whole_model, progress=False)
    assert {row.name: row.precision for row in table.weights} == {"up.weight": to, "down.weight": to}
    assert not (tmp_path / "out/hf_quant_config.json").exists()
    after = mxcompile.load_quantized(tmp_path / "out", feed_forward())
    before = mxcompile.load_quantized(source, feed_forward())
    up, cast_down = after.up.weight, after.down.weight
    if KEPT.get(name) == to:
        for part, other in zip(up.parts, before.up.weight.parts, strict=True):
            assert same_bytes(part, other)
    else:
        expected = mxcompile.quantize(values, elem_dtype=elem, rounding=rounding)
        assert same_bytes(up.qdata, expected.qdata)
        assert torch.equal(up.scale_bytes, expected.scale_bytes)
    assert str(cast_down.form) == str(up.form)


def test_a_quantized_weight_that_the_policy_keeps_is_refused_by_name(tmp_path, capsys):
    """It would take twice the bytes, and BF16 does not hold products with FP32 scales."""
    tensors, _ = published("fp8")
    source = write(tmp_path / "in", tensors | {"down.weight": torch.randn(K, N, dtype=BF16)}, ENTRIES["fp8"])
    policy = {"version": 1, "rules": [{"match": {"name": "up"}, "use": "bf16"}]}
    whole_model = LoadedModel(name="model", model=feed_forward(), args=(torch.randn(4, K, dtype=BF16),))
    message = (
        r"'up\.weight' is in FP8, and the result would not have it quantized \(policy: rule 1\): add a rule"
    )
    with pytest.raises(CheckpointError, match=message):
        convert(source, tmp_path / "out", policy=policy, model=whole_model, progress=False)
    assert not (tmp_path / "out").exists()


@pytest.mark.filterwarnings("ignore")  # Transformers comments on itself
@pytest.mark.parametrize("beside", [True, False], ids=["V4", "V4.1"])
def test_deepseek_v4_has_the_values_of_transformers(tmp_path, beside):
    """Experts are two FP4 in a byte of int8; other matrices are FP8 under E8M0 scales of 128×128."""
    from transformers import DeepseekV4Config, DeepseekV4ForCausalLM
    from transformers.core_model_loading import revert_weight_conversion

    config = DeepseekV4Config(
        vocab_size=64, hidden_size=128, moe_intermediate_size=128, num_hidden_layers=1, num_attention_heads=4,
        head_dim=64, q_lora_rank=128, n_routed_experts=4, num_experts_per_tok=2, o_groups=2, o_lora_rank=128,
        max_position_embeddings=64, layer_types=["sliding_attention"], mlp_layer_types=["moe"],
        hc_mult=2, dtype="bfloat16",
    )  # fmt: skip
    model = DeepseekV4ForCausalLM._from_config(config, dtype=BF16).eval()
    state: dict[str, Tensor] = {}
    for name, value in revert_weight_conversion(model, {**model.state_dict()}).items():
        base = name.removesuffix(".weight")
        if ".experts." in name:
            codes, _ = packed(*value.shape)
            scale = torch.randint(110, 130, (value.shape[0], value.shape[1] // 32), dtype=torch.uint8)
            state |= {name: codes.view(torch.int8), f"{base}.scale": scale.view(torch.float8_e8m0fnu)}
        elif ".attn.w" in name or "shared_experts" in name:
            tiles = -(-value.shape[0] // 128), value.shape[1] // 128
            scale = torch.randint(110, 130, tiles, dtype=torch.uint8)
            state |= {name: e4m3(*value.shape), f"{base}.scale": scale.view(torch.float8_e8m0fnu)}
        else:
            state[name] = value
    folder = write(tmp_path / "in", state, None)
    raw = json.loads(model.config.to_json_string()) | {"architectures": ["DeepseekV4ForCausalLM"]}
    experts = {"expert_dtype": "fp4"}
    entry = {"quant_method": "fp8", "weight_block_size": [128, 128], "scale_fmt": "ue8m0", "fmt": "e4m3"}
    raw |= {"quantization_config": entry} | experts if beside else {"quantization_config": entry | experts}
    (folder / "config.json").write_text(json.dumps(raw))
    ours = mxcompile.load_quantized(folder)
    theirs = type(model).from_pretrained(folder, dtype=BF16)
    seen = set()
    for name, value in ours.named_parameters():
        dense = value.dequantize() if isinstance(value, MXTensor) else value
        assert torch.equal(dense, theirs.get_parameter(name)), name
        seen |= {f"{value.form.elem}"} if isinstance(value, MXTensor) else set()
    assert seen == {"e2m1", "e4m3"}


@pytest.mark.parametrize("shape", [(2, 3), (N, 1)], ids=["block", "channel"])
def test_compiled_products_read_dequantized_values_and_the_report_names_fp8(tmp_path, shape):
    tensors = {"m.weight": e4m3(N, K), "m.weight_scale_inv": torch.rand(shape) + 0.01}
    model = mxcompile.load_quantized(write(tmp_path / "in", tensors, None), layer())["m"]
    x = torch.randn(4, K, dtype=BF16)
    working = torch.float32 if BF16 in features().slow_dtypes else BF16
    dense = nn.Linear(K, N, bias=False, dtype=working)
    dense.weight = nn.Parameter(model.weight.dequantize(working))
    mxcompile.clear_reports()
    with torch.no_grad():
        compiled = torch.compile(model, backend="mxfp8", options={"policy": "bf16"})(x)
        expected = torch.compile(dense, backend="inductor")(x.to(working)).to(BF16)
    report = str(mxcompile.reports()[-1])
    assert torch.equal(compiled, expected)
    assert "weights stored in FP8: 1 of 1 layer" in report
    assert "dequantized values of 1" in " ".join(report.split())


def test_stored_fp8_moves_slices_and_pickles(tmp_path):
    tensors = {"m.weight": e4m3(N, K), "m.weight_scale_inv": torch.rand(2, 3) + 0.01}
    weight = loaded(write(tmp_path / "in", tensors, None))
    values = weight.dequantize()
    torch.save(weight, tmp_path / "weight.pt")
    restored = torch.load(tmp_path / "weight.pt")
    for ours, wanted in (
        (weight[3:70], values[3:70]), (weight.t(), values.t()), (weight[:, 128:], values[:, 128:]),
        (torch.stack([weight, weight]), torch.stack([values, values])), (restored, values),
        (torch.cat([weight, weight]), torch.cat([values, values])), (weight.clone(), values),
        (pickle.loads(pickle.dumps(weight[:, 128:128])), values[:, 128:128]),
    ):  # fmt: skip
        assert isinstance(ours, MXTensor)
        assert torch.equal(ours.dequantize(), wanted)


def test_fp8_with_blocks_along_a_dimension_that_it_lacks_is_refused():
    with pytest.raises(FormatError, match="block_dim 2 is outside qdata of 2 dimensions"):
        MXTensor(e4m3(2, K), torch.ones(2, 1), 2)


def test_inspect_names_the_layout(tmp_path, capsys):
    folder = write(tmp_path / "in", FP8, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    assert main(["inspect", str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "layout: fp8" in printed
    assert "fp8 e4m3" in printed


class WithExtraState(nn.Linear):
    """As modules of Transformer Engine have it."""

    def get_extra_state(self) -> Any:
        return {"scales": None}

    def set_extra_state(self, state: Any) -> None:
        self.taken = state


def test_extra_state_of_a_module_is_not_a_weight(tmp_path, caplog):
    from mxcompile.checkpoint.load import load_weights

    model = nn.Sequential(WithExtraState(64, 32))
    plain = {name: value for name, value in model.state_dict().items() if isinstance(value, Tensor)}
    save_file(plain, tmp_path / "plain.safetensors")
    other = nn.Sequential(WithExtraState(64, 32))
    load_weights(other, Checkpoint.open(tmp_path / "plain.safetensors"))
    assert torch.equal(other[0].weight, model[0].weight)
    save_file({**plain, "0._extra_state": torch.ones(2)}, tmp_path / "more.safetensors")
    load_weights(other, Checkpoint.open(tmp_path / "more.safetensors"))
    assert torch.equal(other[0].taken, torch.ones(2))
    model[0].weight = nn.Parameter(mxcompile.quantize(model[0].weight), requires_grad=False)
    mxcompile.save_quantized(model, tmp_path / "out")
    assert "0._extra_state is a dict, which no checkpoint contains" in caplog.text
    mxcompile.load_quantized(tmp_path / "out", other)
    assert torch.equal(other[0].weight.dequantize(), model[0].weight.dequantize())
