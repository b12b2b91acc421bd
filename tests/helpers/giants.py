"""Models no machine here could hold, from their published configurations, on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import transformers as hf
from torch import nn


def _tokens(length: int = 512) -> dict[str, Any]:
    ids = torch.zeros(1, length, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def llama_405b(layers: int = 126) -> nn.Module:
    config = hf.LlamaConfig(
        vocab_size=128256, hidden_size=16384, intermediate_size=53248, num_hidden_layers=layers,
        num_attention_heads=128, num_key_value_heads=8, use_cache=False,
    )  # fmt: skip
    return hf.LlamaForCausalLM(config)


def mixtral_8x22b(layers: int = 56) -> nn.Module:
    config = hf.MixtralConfig(
        vocab_size=32768, hidden_size=6144, intermediate_size=16384, num_hidden_layers=layers,
        num_attention_heads=48, num_key_value_heads=8, num_local_experts=8, use_cache=False,
    )  # fmt: skip
    return hf.MixtralForCausalLM(config)


def deepseek_v3(layers: int = 61) -> nn.Module:
    config = hf.DeepseekV3Config(
        num_hidden_layers=layers, first_k_dense_replace=min(3, layers - 1), use_cache=False
    )
    return hf.DeepseekV3ForCausalLM(config)


def qwen3_moe(layers: int) -> nn.Module:
    """Of Qwen3-30B-A3B's width, with 16 of its 128 experts."""
    config = hf.Qwen3MoeConfig(
        vocab_size=32768, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768,
        num_hidden_layers=layers, num_attention_heads=32, num_key_value_heads=4, head_dim=128,
        num_experts=16, num_experts_per_tok=4, use_cache=False,
    )  # fmt: skip
    return hf.Qwen3MoeForCausalLM(config)


def t5_large(layers: int = 24) -> nn.Module:
    config = hf.T5Config(
        d_model=1024, d_ff=4096, num_layers=layers, num_heads=16, decoder_start_token_id=0, use_cache=False
    )
    return hf.T5ForConditionalGeneration(config)


def vit_huge(layers: int = 32) -> nn.Module:
    config = hf.ViTConfig(
        hidden_size=1280, num_hidden_layers=layers, num_attention_heads=16, intermediate_size=5120,
        patch_size=14,
    )  # fmt: skip
    return hf.ViTForImageClassification(config)


def whisper_large(layers: int = 32) -> nn.Module:
    config = hf.WhisperConfig(
        d_model=1280, encoder_layers=layers, decoder_layers=layers, encoder_attention_heads=20,
        decoder_attention_heads=20, encoder_ffn_dim=5120, decoder_ffn_dim=5120, use_cache=False,
    )  # fmt: skip
    return hf.WhisperForConditionalGeneration(config)


_OUT = dict.fromkeys(("o_proj", "out_proj"), "attn_out")
_ATTENTION = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv") | _OUT
_LATENT = dict.fromkeys(("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"), "qkv")
_GATED = {"gate_proj": "ffn_in", "up_proj": "ffn_in", "down_proj": "ffn_out"}
_MLP = {"fc1": "ffn_in", "fc2": "ffn_out"}
_EXPERTS = {"mlp.gate": "router", "experts.gate_up_proj": "expert_in", "experts.down_proj": "expert_out"}
_T5 = {
    f"{part}.{name}": "attn_out" if name == "o" else "qkv"
    for part in ("SelfAttention", "EncDecAttention")
    for name in "qkvo"
}
_PIXELS = {"pixel_values": torch.zeros(1, 3, 224, 224, dtype=torch.bfloat16)}
_SOUND = {"input_features": torch.zeros(1, 80, 3000, dtype=torch.bfloat16)}

GIANTS: dict[str, tuple[Callable[..., nn.Module], dict[str, Any], int, dict[str, str]]] = {
    "llama": (llama_405b, _tokens(8192), 126, {**_ATTENTION, **_GATED, "lm_head": "head"}),
    "mixtral": (mixtral_8x22b, _tokens(), 56, {**_ATTENTION, **_EXPERTS, "lm_head": "head"}),
    "deepseek": (
        deepseek_v3, _tokens(), 61,
        {**_LATENT, "o_proj": "attn_out", **_GATED, **_EXPERTS, "lm_head": "head"},
    ),
    "t5": (
        t5_large, _tokens(), 48,
        {**_T5, "DenseReluDense.wi": "ffn_in", "DenseReluDense.wo": "ffn_out", "lm_head": "head"},
    ),
    "vit": (
        vit_huge, {**_PIXELS, "labels": torch.zeros(1, dtype=torch.int64)}, 32,
        {**_ATTENTION, **_MLP, "classifier": "head", "projection": "other"},
    ),
    "whisper": (
        whisper_large, {**_SOUND, "labels": torch.zeros(1, 448, dtype=torch.int64)}, 64,
        {**_ATTENTION, **_MLP, "proj_out": "head", "conv1": "other", "conv2": "other"},
    ),
}  # fmt: skip
"""By name: factory, inputs, number of transformer layers, and the role a layer's name ends in."""


def build(name: str, layers: int | None = None) -> nn.Module:
    """The model in BF16 on the meta device."""
    factory = GIANTS[name][0]
    with torch.device("meta"):
        return (factory() if layers is None else factory(layers)).bfloat16()
