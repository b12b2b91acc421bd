"""Checkpoints: bit-exact round trips in layouts that their owners' code reads and writes."""

from __future__ import annotations

import copy
import json

import pytest
import torch
from helpers.spread import spread
from safetensors.torch import load_file, save_file
from small_models import (
    assert_refused,
    assert_same_logits,
    change_json,
    head_rule,
    llama,
    mixtral,
    same_bytes,
    store_blocks,
)
from torch import nn

import mxcompile
from mxcompile import MXTensor
from mxcompile.checkpoint.files import Checkpoint
from mxcompile.errors import CheckpointError
from mxcompile.formats import stored_form
from mxcompile.formats.elements import E2M1
from mxcompile.formats.encoding import pack, unpack
from mxcompile.models.named import load_model

BF16, TOKENS = torch.bfloat16, torch.arange(10)[None]
FP8, FP4, INT8 = torch.float8_e4m3fn, torch.float4_e2m1fn_x2, torch.int8
ELEMS = pytest.mark.parametrize("elem", [FP8, FP4], ids=["mxfp8", "mxfp4"])
LAYOUTS = ["compressed-tensors", "torchao"]
OF_MXFP8 = [*LAYOUTS, "mxfp8", "modelopt"]
MXFP8, MXFP4 = {"elem_dtype": FP8}, {"elem_dtype": FP4}
NVFP4 = {"elem_dtype": FP4, "rounding": "two-level"}
STORED = {
    "mxfp8": (MXFP8, MXFP8), "mxfp4": (MXFP4, MXFP4), "mxfp8, mxfp4": (MXFP8, MXFP4),
    "nvfp4": (NVFP4, NVFP4), "mxfp4, nvfp4": (MXFP4, NVFP4),
}  # fmt: skip
"""What `quantize` is told of the attention and of the other layers."""


def small(device: str = "cpu") -> nn.Module:
    with torch.device(device):
        model = nn.Sequential(nn.Linear(64, 96, dtype=BF16), nn.LayerNorm(96), nn.Linear(96, 64, dtype=BF16))
        model.register_module("tied", nn.Linear(96, 64, bias=False, dtype=BF16))
        model.tied.weight = model[2].weight
    return model


def stored(elem: torch.dtype = FP8) -> nn.Module:
    model = small()
    for layer in (model[0], model[2]):
        weight = mxcompile.quantize(spread(*layer.weight.shape, binades=9).to(BF16), elem_dtype=elem)
        layer.weight = nn.Parameter(weight, requires_grad=False)
    model.tied.weight = model[2].weight
    return model


def same(a: nn.Module, b: nn.Module) -> bool:
    """Whether two models have the same tensors, bit for bit."""
    first, second = a.state_dict(), b.state_dict()
    return first.keys() == second.keys() and all(_same(first[name], second[name]) for name in first)


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if isinstance(a, MXTensor) != isinstance(b, MXTensor) or a.dtype is not b.dtype:
        return False
    if not isinstance(a, MXTensor):
        return torch.equal(a, b)
    alike = a.block_dim % a.ndim == b.block_dim % b.ndim
    return alike and same_bytes(a.qdata, b.qdata) and torch.equal(a.scale_bytes, b.scale_bytes)


@pytest.mark.parametrize(
    ("layout", "elem"),
    [("compressed-tensors", INT8), *((name, elem) for name in LAYOUTS for elem in (FP8, FP4))],
)
@pytest.mark.parametrize("shard", [10**9, 4000])
def test_round_trip_into_a_model_on_the_meta_device(tmp_path, layout, shard, elem):
    model = stored(elem)
    mxcompile.save_quantized(model, tmp_path / "out", layout=layout, max_shard_bytes=shard)
    files = list((tmp_path / "out").glob("*.safetensors"))
    assert (len(files) > 1) == (shard == 4000)
    loaded = mxcompile.load_quantized(tmp_path / "out", small("meta"))
    assert same(model, loaded)
    assert loaded.tied.weight is loaded[2].weight
    assert [*tmp_path.iterdir()] == [tmp_path / "out"]


def test_safetensors_reads_codes_and_scales_without_mxcompile(tmp_path):
    model = stored()
    mxcompile.save_quantized(model, tmp_path / "out")
    tensors = load_file(tmp_path / "out/model.safetensors")
    assert same_bytes(tensors["0.weight"], model[0].weight.qdata)
    assert tensors["0.weight_scale"].dtype is torch.uint8
    assert torch.equal(tensors["0.weight_scale"], model[0].weight.scale_bytes)
    assert "tied.weight" not in tensors


@ELEMS
def test_torchao_reads_and_writes_its_layout(tmp_path, elem):
    from safetensors import safe_open
    from torchao.prototype.mx_formats.mx_tensor import MXTensor as TheirTensor
    from torchao.prototype.safetensors.safetensors_support import (
        flatten_tensor_state_dict,
        unflatten_tensor_state_dict,
    )

    model = stored(elem)
    mxcompile.save_quantized(model, tmp_path / "ours", layout="torchao")
    file = tmp_path / "ours/model.safetensors"
    with safe_open(str(file), framework="pt") as handle:
        theirs, remainder = unflatten_tensor_state_dict(load_file(file), handle.metadata())
    assert not remainder
    assert torch.equal(theirs["0.weight"].dequantize(), model[0].weight.dequantize())
    assert torch.equal(theirs["1.bias"], model[1].bias)

    dense = {"m.weight": spread(64, 96, binades=9).to(BF16), "m.bias": spread(1, 64, binades=9)[0].to(BF16)}
    theirs_mx = TheirTensor.to_mx(dense["m.weight"], elem, 32)
    tensors, metadata = flatten_tensor_state_dict({"m.weight": theirs_mx, "m.bias": dense["m.bias"]})
    save_file(tensors, tmp_path / "theirs.safetensors", metadata=metadata)
    target = nn.ModuleDict({"m": nn.Linear(96, 64, dtype=BF16)})
    mxcompile.load_quantized(tmp_path / "theirs.safetensors", target)
    assert isinstance(target["m"].weight, MXTensor)
    assert torch.equal(target["m"].weight.dequantize(), theirs_mx.dequantize())


def their_scheme(precision: str):
    from compressed_tensors.quantization import QuantizationScheme, quant_scheme

    return QuantizationScheme(targets=["Linear"], **getattr(quant_scheme, f"{precision.upper()}A16"))


@ELEMS
def test_compressed_tensors_reads_and_writes_its_layout(tmp_path, elem):
    from compressed_tensors.compressors import MXFP4PackedCompressor, MXFP8QuantizationCompressor

    theirs = MXFP8QuantizationCompressor if elem is FP8 else MXFP4PackedCompressor
    scheme = their_scheme("mxfp8" if elem is FP8 else "mxfp4")
    model = stored(elem)
    mxcompile.save_quantized(model, tmp_path / "ours")
    stored_tensors = load_file(tmp_path / "ours/model.safetensors")
    parts = {name: stored_tensors[f"0.{name}"] for name in theirs.compression_param_names(scheme)}
    dense = theirs.decompress(parts, scheme)["weight"]
    assert torch.equal(dense.to(BF16), model[0].weight.dequantize())

    weight = model[2].weight
    scale = torch.exp2(weight.scale_bytes.float() - 127)
    compressed = theirs.compress({"weight": weight.dequantize(), "weight_scale": scale}, scheme)
    assert {name: value.dtype for name, value in compressed.items()} == {n: v.dtype for n, v in parts.items()}
    if elem is FP4:
        codes = unpack(stored_tensors["2.weight_packed"], -1, E2M1)
        unsigned = pack(torch.where(codes == 8, 0, codes), -1, E2M1)  # their cast has no negative zeros
        assert torch.equal(compressed["weight_packed"], unsigned)
        assert torch.equal(compressed["weight_scale"], stored_tensors["2.weight_scale"])
    tensors = {f"m.{name}": value for name, value in compressed.items()}
    save_file(tensors, tmp_path / "theirs.safetensors")
    target = nn.ModuleDict({"m": nn.Linear(96, 64, bias=False, dtype=BF16)})
    mxcompile.load_quantized(tmp_path / "theirs.safetensors", target)
    assert target["m"].weight.elem_dtype is elem
    assert torch.equal(target["m"].weight.dequantize(), weight.dequantize())


def config_of(raw: dict):
    from compressed_tensors.quantization import QuantizationConfig

    return QuantizationConfig.model_validate({k: v for k, v in raw.items() if k != "quant_method"})


@pytest.mark.parametrize(
    ("precision", "how", "name"),
    [
        ("mxfp8", MXFP8, "mxfp8-quantized"),
        ("mxfp4", MXFP4, "mxfp4-pack-quantized"),
        ("nvfp4", NVFP4, "nvfp4-pack-quantized"),
    ],
)
def test_the_config_entry_is_one_that_compressed_tensors_knows(precision, how, name):
    from mxcompile.checkpoint.declared import compressed_tensors_config

    form = mxcompile.quantize(torch.ones(2, 32), **how).form
    config = config_of(compressed_tensors_config(["lm_head"], {"a": form, "b": form}))
    group = config.config_groups["group_0"]
    assert group.targets == ["Linear"]
    assert group.weights.model_dump() == their_scheme(precision).weights.model_dump()
    assert group.input_activations is None
    assert config.ignore == ["lm_head"]
    assert config.format == group.format == name


def test_of_two_formats_each_has_its_group():
    from mxcompile.checkpoint.declared import compressed_tensors_config

    mxfp8, mxfp4 = stored_form(FP8), stored_form(FP4)
    config = config_of(compressed_tensors_config([], {"a": mxfp4, "b": mxfp8, "c": mxfp4}))
    groups = config.config_groups
    assert config.format == "mixed-precision"
    assert {name: group.targets for name, group in groups.items()} == {
        "group_0": ["b"], "group_1": ["a", "c"],
    }  # fmt: skip
    assert [group.weights.num_bits for group in groups.values()] == [8, 4]


def test_a_tied_head_whose_embedding_keeps_its_table_is_a_weight_of_its_own(tmp_path):
    """What is saved and loaded again has both."""
    model = llama(tied=True)
    table = model.model.embed_tokens.weight
    stored = mxcompile.quantize_weights_(model, head_rule("mxfp8", embedding="bf16"))
    (row,) = (row for row in stored.weights if row.shape == (64, 64) and "embed" in row.reason)
    reason = "policy: rule 1; the embedding keeps its table (policy: rule 2)"
    assert (row.stored, row.reason, row.num_bytes) == (True, reason, 64 * 64 * 2 + 64 * 66)
    assert model.model.embed_tokens.weight is table
    assert torch.equal(model.lm_head.weight.dequantize(), mxcompile.quantize(table).dequantize())
    mxcompile.save_quantized(model, tmp_path / "out")
    loaded = mxcompile.load_quantized(tmp_path / "out")
    assert isinstance(loaded.lm_head.weight, MXTensor)
    assert_same_logits(TOKENS, loaded, model)


def llava():
    """Text and images: its modules are called otherwise than in its files, and its head's weight is tied."""
    from transformers import CLIPVisionConfig, LlavaConfig, LlavaForConditionalGeneration

    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = CLIPVisionConfig(image_size=32, patch_size=8, **sizes)
    text = llama().config.to_dict() | {"num_hidden_layers": 1}
    config = LlavaConfig(
        vision_config=vision, text_config=text, image_token_index=60, tie_word_embeddings=True
    )
    return LlavaForConditionalGeneration._from_config(config, dtype=BF16).eval()


@pytest.mark.parametrize("layout", OF_MXFP8)
@pytest.mark.parametrize("make", [llama, lambda: llama(tied=True), mixtral], ids=["llama", "tied", "mixtral"])
@pytest.mark.parametrize("elems", [(FP8, FP8), (FP8, FP4)], ids=["mxfp8", "both"])
def test_hugging_face_models_round_trip(tmp_path, make, layout, elems):
    if layout not in LAYOUTS and FP4 in elems:
        pytest.skip(f"{layout} is written with MXFP8 alone")
    model = store_blocks(make(), *({"elem_dtype": elem} for elem in elems))
    mxcompile.save_quantized(model, tmp_path / "out", layout=layout)
    loaded = mxcompile.load_quantized(tmp_path / "out")
    assert same(model, loaded)
    assert type(loaded) is type(model)
    assert_same_logits(TOKENS, loaded, model)


def test_a_config_with_an_infinite_number_is_read(tmp_path):
    """Transformers writes infinity into a config.json as an object."""
    from transformers import Mamba2Config, Mamba2ForCausalLM

    sizes = {"hidden_size": 64, "num_heads": 4, "head_dim": 32, "n_groups": 1, "state_size": 16}
    config = Mamba2Config(vocab_size=64, num_hidden_layers=1, **sizes)
    assert config.time_step_limit[1] == float("inf")
    model = Mamba2ForCausalLM._from_config(config, dtype=BF16).eval()
    mxcompile.quantize_weights_(model, progress=False)
    mxcompile.save_quantized(model, tmp_path / "out")
    assert same(model, mxcompile.load_quantized(tmp_path / "out"))
    assert load_model(str(tmp_path / "out")).model.config.time_step_limit[1] == float("inf")


def gpt_oss(folder) -> nn.Module:
    """A small GPT-OSS, written to `folder` as its publishers do: experts in blocks and scales of MXFP4."""
    from transformers import GptOssConfig, GptOssForCausalLM
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    config = GptOssConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, num_local_experts=4, num_experts_per_tok=2,
        max_position_embeddings=64, dtype="bfloat16", bos_token_id=0, eos_token_id=1, pad_token_id=2,
    )  # fmt: skip
    model = GptOssForCausalLM._from_config(config, dtype=BF16).eval().requires_grad_(False)
    state: dict[str, torch.Tensor] = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 3:
            experts, k, n = parameter.shape
            blocks = torch.randint(256, (experts, n, k // 32, 16), dtype=torch.uint8)
            scales = torch.randint(118, 124, (experts, n, k // 32), dtype=torch.uint8)
            state |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            parameter.copy_(convert_moe_packed_tensors(blocks, scales, dtype=BF16))
        else:
            state[name] = parameter
    folder.mkdir()
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    raw = json.loads(config.to_json_string()) | {"architectures": ["GptOssForCausalLM"]}
    raw["quantization_config"] = {"quant_method": "mxfp4"}
    (folder / "config.json").write_text(json.dumps(raw))
    return model


@pytest.mark.filterwarnings("ignore")  # Transformers comments on itself
def test_experts_of_gpt_oss_stay_in_their_mxfp4(tmp_path):
    """Their values are those that Transformers decodes, and the model computes with them."""
    from mxcompile.checkpoint.layouts import weights_in

    model = gpt_oss(tmp_path / "out")
    loaded = mxcompile.load_quantized(tmp_path / "out")
    experts = model.model.layers[0].mlp.experts
    for name in ("gate_up_proj", "down_proj"):
        weight = getattr(loaded.model.layers[0].mlp.experts, name)
        assert weight.elem_dtype is FP4
        assert weight.stored_bytes * 32 == 17 * weight.numel()
        assert torch.equal(weight.dequantize(), getattr(experts, name))
    assert_same_logits(TOKENS, loaded, model)
    layout, weights = weights_in(Checkpoint.open(tmp_path / "out"))
    assert layout == "gpt-oss"
    shapes = {weight.shape for weight in weights if weight.precision == "mxfp4"}
    assert shapes == {(4, 64, 192), (4, 96, 64)}
    with pytest.raises(CheckpointError, match="down_proj: compressed-tensors has blocks along the last"):
        mxcompile.save_quantized(loaded, tmp_path / "again")


def test_experts_of_gpt_oss_without_their_scales_are_refused(tmp_path):
    blocks = torch.zeros(2, 8, 1, 16, dtype=torch.uint8)
    for scales in ({}, {"m.w_scales": torch.zeros(2, 4, 1, dtype=torch.uint8)}):
        save_file({"m.w_blocks": blocks, **scales}, tmp_path / "model.safetensors")
        assert_refused("has no scales of its blocks", tmp_path / "model.safetensors", nn.Linear(2, 2))


@pytest.mark.filterwarnings("ignore")  # Transformers and compressed-tensors comment on themselves
@pytest.mark.parametrize("make", [llama, lambda: llama(tied=True), llava], ids=["llama", "tied", "llava"])
@pytest.mark.parametrize("how", STORED.values(), ids=STORED)
def test_transformers_loads_saved_quantized_checkpoints(tmp_path, make, how):
    """Every layer that is not stored is named in `ignore`, or Transformers makes up scales for it."""
    model = store_blocks(make(), *how)
    mxcompile.save_quantized(model, tmp_path / "out")
    loaded, info = type(model).from_pretrained(tmp_path / "out", dtype=BF16, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_logits(TOKENS, model, loaded, mxcompile.load_quantized(tmp_path / "out"))
    for name, value in model.named_parameters() if make is llama else ():  # decompressed by the call
        dense = value.dequantize() if isinstance(value, MXTensor) else value
        assert torch.equal(loaded.get_parameter(name), dense), name


OF_TORCHAO = "torchao has MXFP8 e4m3, MXFP8 e5m2 and MXFP4 e2m1 only"


@pytest.mark.parametrize(
    ("layout", "how", "shape", "message"),
    [
        *((layout, {}, (32, 70), r"0.weight: .* whole blocks of 32 only \(k=70\)") for layout in LAYOUTS),
        *((layout, {"block_dim": 0}, (64, 64), "last dimension only") for layout in LAYOUTS),
        ("compressed-tensors", NVFP4, (96, 40), r"whole blocks of 16 only \(k=40\)"),
        ("torchao", NVFP4, (96, 64), OF_TORCHAO),
        ("torchao", {"elem_dtype": INT8}, (96, 64), OF_TORCHAO),
        ("mxfp8", {"elem_dtype": INT8}, (96, 64), "mxfp8 has MXFP8 e4m3 only"),
    ],
)
def test_weight_unsupported_by_the_layout_is_refused(tmp_path, layout, how, shape, message):
    model = nn.Sequential(nn.Linear(2, 2))
    model[0].weight = nn.Parameter(mxcompile.quantize(torch.randn(shape), **how), requires_grad=False)
    with pytest.raises(CheckpointError, match=message):
        mxcompile.save_quantized(model, tmp_path / "out", layout=layout)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("dtype", [torch.complex64, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz])
def test_a_buffer_of_any_dtype_of_safetensors_round_trips(tmp_path, dtype):
    model = stored()
    model.register_buffer("table", torch.arange(8, dtype=torch.uint8).view(dtype))
    mxcompile.save_quantized(model, tmp_path / "out")
    loaded = small()
    loaded.register_buffer("table", torch.zeros_like(model.table))
    mxcompile.load_quantized(tmp_path / "out", loaded)
    assert loaded.table.dtype is dtype
    assert torch.equal(loaded.table.view(torch.uint8), torch.arange(8, dtype=torch.uint8))


def test_a_recurrent_layer_runs_with_its_loaded_weights(tmp_path):
    model, fresh = (nn.Sequential(nn.LSTM(32, 32), nn.Linear(32, 32)) for _ in range(2))
    model[1].weight = nn.Parameter(mxcompile.quantize(model[1].weight), requires_grad=False)
    mxcompile.save_quantized(model, tmp_path / "out")
    mxcompile.load_quantized(tmp_path / "out", fresh)
    x = torch.randn(4, 32)
    assert torch.equal(fresh[0](x)[0], model[0](x)[0])


def test_a_compiled_model_is_saved_and_loaded_as_itself(tmp_path):
    model = stored()
    mxcompile.save_quantized(torch.compile(model, backend="eager"), tmp_path / "out")
    mxcompile.load_quantized(tmp_path / "out", torch.compile(fresh := small("meta"), backend="eager"))
    assert same(fresh, model)


def test_a_model_of_compiled_blocks_has_the_names_of_the_plain_model_in_files(tmp_path):
    plain, fresh = stored(), small("meta")
    model = copy.deepcopy(plain)
    for target in (model, fresh):
        target[0] = torch.compile(target[0], backend="eager")
    mxcompile.save_quantized(model, tmp_path / "out")
    assert same(mxcompile.load_quantized(tmp_path / "out", small("meta")), plain)
    assert same(mxcompile.load_quantized(tmp_path / "out", fresh), model)


@pytest.mark.parametrize("whole", [True, False])
def test_model_or_folder_without_quantized_weights_is_refused(tmp_path, whole):
    """Both ways, for a model of Hugging Face and any other: neither is silently something else."""
    model = llama() if whole else small()
    unstored = "no weight of the model is stored in MXFP8, MXINT8, MXFP4 or NVFP4: quantize"
    with pytest.raises(CheckpointError, match=unstored):
        mxcompile.save_quantized(model, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    if whole:
        model.save_pretrained(tmp_path / "plain")
    else:
        (tmp_path / "plain").mkdir()
        save_file({"0.weight": model[0].weight.detach()}, tmp_path / "plain/model.safetensors")
    plain = "plain: no weight is stored in FP8, MXFP8, MXINT8, MXFP4 or NVFP4: `mxcompile convert`"
    assert_refused(plain, tmp_path / "plain", *([] if whole else [model]))


@pytest.mark.parametrize("make", [llama, llava])
def test_model_cast_after_it_was_made_is_loaded_in_its_new_dtype(tmp_path, make):
    """The config still has the dtype from before the cast, and `save_pretrained` corrects it too."""
    model = store_blocks(make().to(torch.float32))
    mxcompile.save_quantized(model, tmp_path / "out")
    loaded = mxcompile.load_quantized(tmp_path / "out")
    assert same(model, loaded)
    assert {parameter.dtype for parameter in loaded.parameters()} == {torch.float32}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_values_are_of_the_dtype_that_the_rest_of_the_checkpoint_has(tmp_path, dtype):
    """Where config.json does not say."""
    from mxcompile.checkpoint.convert import convert

    model = llama().to(dtype)
    model.save_pretrained(tmp_path / "in")
    change_json(tmp_path / "in/config.json", "dtype")
    convert(tmp_path / "in", tmp_path / "out")
    loaded = mxcompile.load_quantized(tmp_path / "out")
    assert {parameter.dtype for parameter in loaded.parameters()} == {dtype}
