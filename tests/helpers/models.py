"""Small models of real architectures, from configs, with a batch each.

Widths, head sizes and token counts are no multiples of 32: every cast has a short last block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import transformers as hf
from torch import nn
from torch.nn import functional as F

WIDTH, FFN = 48, 80


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, its keyword arguments, and how to get a scalar loss and logits from what it returns.

    roles: layer → role, as a transformer engineer would say.
    """

    model: nn.Module
    kwargs: dict[str, Any]
    roles: dict[str, str]

    def loss(self, output: Any) -> torch.Tensor:
        loss = getattr(output, "loss", None)
        if loss is not None:
            return loss  # type: ignore[no-any-return]
        logits = self.logits(output).float()
        direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(2))
        return (logits * direction).mean()

    def logits(self, output: Any) -> torch.Tensor:
        if isinstance(output, torch.Tensor):
            return output
        return output.logits


def _text(**extra: Any) -> dict[str, Any]:
    ids = torch.randint(0, 128, (2, 19), generator=torch.Generator().manual_seed(1))
    return {"input_ids": ids, "labels": ids, **extra}


def _per_layer(prefix: str, layers: int, roles: dict[str, str]) -> dict[str, str]:
    return {f"{prefix.format(i=i)}.{name}": role for i in range(layers) for name, role in roles.items()}


def _layer(qkv: str, attn_out: str, ffn_in: str, ffn_out: str) -> dict[str, str]:
    """The roles of the layers of a block, whose names are words."""
    words = {"qkv": qkv, "attn_out": attn_out, "ffn_in": ffn_in, "ffn_out": ffn_out}
    return {name: role for role, names in words.items() for name in names.split()}


SIZES = {"hidden_size": WIDTH, "intermediate_size": FFN, "num_attention_heads": 4}
LLAMA_SIZES = {**SIZES, "vocab_size": 128, "num_key_value_heads": 2, "head_dim": 16}
LLAMA_LAYER = _layer(
    "self_attn.q_proj self_attn.k_proj self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj mlp.up_proj",
    "mlp.down_proj",
)  # fmt: skip


def _decoder(model: nn.Module, layers: int, layer: dict[str, str], blocks: str = "model.layers.{i}") -> Case:
    """A causal language model with its head."""
    roles = {**_per_layer(blocks, layers, layer), "lm_head": "head"}
    return Case(model=model, kwargs=_text(use_cache=False), roles=roles)


def llama(layers: int = 2, **changes: Any) -> Case:
    sizes = {**LLAMA_SIZES, "num_hidden_layers": layers, "tie_word_embeddings": False, **changes}
    return _decoder(hf.LlamaForCausalLM(hf.LlamaConfig(**sizes)), layers, LLAMA_LAYER)


def llama_tied(layers: int = 2) -> Case:
    return llama(layers, tie_word_embeddings=True)


def llama_eager(layers: int = 2) -> Case:
    return llama(layers, attn_implementation="eager")


def qwen3(layers: int = 2) -> Case:
    how = {"num_hidden_layers": layers, "attention_bias": True, "tie_word_embeddings": False}
    return _decoder(hf.Qwen3ForCausalLM(hf.Qwen3Config(**LLAMA_SIZES, **how)), layers, LLAMA_LAYER)


def gpt2(layers: int = 2) -> Case:
    config = hf.GPT2Config(
        vocab_size=128, n_embd=WIDTH, n_layer=layers, n_head=4, n_positions=64, bos_token_id=0,
        eos_token_id=0, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = hf.GPT2LMHeadModel(config)
    model.loss_type = "ForCausalLM"  # or transformers warns, which breaks the graph
    layer = _layer("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
    return _decoder(model, layers, layer, "transformer.h.{i}")


def bert(layers: int = 2) -> Case:
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    config = hf.BertConfig(**SIZES, vocab_size=128, num_hidden_layers=layers, **dropout)
    layer = _layer(
        "attention.self.query attention.self.key attention.self.value", "attention.output.dense",
        "intermediate.dense", "output.dense",
    )  # fmt: skip
    return Case(
        model=hf.BertForMaskedLM(config),
        kwargs=_text(),
        roles={
            **_per_layer("bert.encoder.layer.{i}", layers, layer),
            "cls.predictions.transform.dense": "head",
            "cls.predictions.decoder": "head",
        },
    )


def vit(layers: int = 2) -> Case:
    config = hf.ViTConfig(**SIZES, num_hidden_layers=layers, image_size=32, patch_size=8)
    qkv = "attention.q_proj attention.k_proj attention.v_proj"
    layer = _layer(qkv, "attention.o_proj", "mlp.fc1", "mlp.fc2")
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(1))
    return Case(
        model=hf.ViTForImageClassification(config),
        kwargs={"pixel_values": pixels},
        roles={**_per_layer("vit.layers.{i}", layers, layer), "classifier": "head"},
    )


def t5(layers: int = 2) -> Case:
    config = hf.T5Config(
        vocab_size=128, d_model=WIDTH, d_kv=12, d_ff=FFN, num_layers=layers, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip
    attention = {"q": "qkv", "k": "qkv", "v": "qkv", "o": "attn_out"}
    roles = {"lm_head": "head"}
    for stack, blocks in (
        ("encoder", ("SelfAttention",)),
        ("decoder", ("SelfAttention", "EncDecAttention")),
    ):
        for i in range(layers):
            for at, kind in enumerate(blocks):
                roles |= {
                    f"{stack}.block.{i}.layer.{at}.{kind}.{name}": role for name, role in attention.items()
                }
            ffn = f"{stack}.block.{i}.layer.{len(blocks)}.DenseReluDense"
            roles |= {f"{ffn}.wi": "ffn_in", f"{ffn}.wo": "ffn_out"}
    return Case(model=hf.T5ForConditionalGeneration(config), kwargs=_text(use_cache=False), roles=roles)


def mixtral(layers: int = 2) -> Case:
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2}
    config = hf.MixtralConfig(**LLAMA_SIZES, num_hidden_layers=layers, **experts)
    layer = {k: v for k, v in LLAMA_LAYER.items() if k.startswith("self_attn")} | {
        "mlp.gate": "router", "mlp.experts.gate_up_proj": "expert_in", "mlp.experts.down_proj": "expert_out",
    }  # fmt: skip
    return _decoder(hf.MixtralForCausalLM(config).bfloat16(), layers, layer)  # in FP32 it hides its experts


def _features(*shape: int) -> dict[str, Any]:
    return {"input": torch.randn(*shape, generator=torch.Generator().manual_seed(1))}


def torch_encoder(layers: int = 2) -> Case:
    layer = nn.TransformerEncoderLayer(WIDTH, 4, FFN, dropout=0.0, batch_first=True)
    roles = _layer("self_attn.in_proj", "self_attn.out_proj", "linear1", "linear2")
    return Case(
        model=nn.Sequential(nn.TransformerEncoder(layer, layers)),
        kwargs=_features(2, 19, WIDTH),
        roles=_per_layer("0.layers.{i}", layers, roles),
    )


class _SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.attn(x, x, x, need_weights=False)[0]


def torch_attention(layers: int = 2) -> Case:
    return Case(
        model=nn.Sequential(*(_SelfAttention() for _ in range(layers))),
        kwargs=_features(2, 19, WIDTH),
        roles=_per_layer("{i}", layers, {"attn.in_proj": "qkv", "attn.out_proj": "attn_out"}),
    )


class Fused(nn.Module):
    """Fused QKV and fused gate-up, pre-norm, with the names of neither."""

    def __init__(self, width: int = WIDTH, ffn: int = FFN) -> None:
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(width), nn.RMSNorm(width)
        self.a, self.b = nn.Linear(width, 3 * width), nn.Linear(width, width, bias=False)
        self.c, self.d = nn.Linear(width, 2 * ffn, bias=False), nn.Linear(ffn, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = self.a(self.n1(x)).view(batch, length, 3, 4, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.b(y.transpose(1, 2).reshape(batch, length, -1))
        gate, up = self.c(self.n2(x)).chunk(2, dim=-1)
        return x + self.d(F.silu(gate) * up)


def fused(layers: int = 2) -> Case:
    return Case(
        model=nn.Sequential(*(Fused() for _ in range(layers))),
        kwargs=_features(2, 19, WIDTH),
        roles=_per_layer("{i}", layers, _layer("a", "b", "c", "d")),
    )


CASES: dict[str, Callable[..., Case]] = {
    build.__name__: build
    for build in (
        llama, llama_tied, llama_eager, qwen3, gpt2, bert, vit, t5, mixtral, torch_encoder,
        torch_attention, fused,
    )
}  # fmt: skip
