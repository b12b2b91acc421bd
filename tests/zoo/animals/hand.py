"""Written out by hand, as papers and training frameworks do it: no library's idioms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from animal import Animal, Build, Call
from torch import nn

from animals.build import ids, image
from animals.models import attention, experts, nets


def by_hand(
    name: str,
    model: Callable[[], nn.Module],
    inputs: Callable[[], tuple[Any, ...]],
    expect: dict[str, str],
    **more: Any,
) -> Animal:
    """A module of `animals.models`."""

    def make(build: Build) -> Call:
        return model(), inputs(), {}

    return Animal(name=f"hand_{name}", make=make, expect=expect, **more)


def _tokens() -> tuple[Any, ...]:
    return (ids(),)


def _features(width: int = 96, tokens: int = 19) -> Callable[[], tuple[Any, ...]]:
    return lambda: (image(2, tokens, width),)


HAND = (
    by_hand("nano_gpt", attention.nano_gpt, _tokens, {"c_attn": "qkv", r"attn\.c_proj": "attn_out", "c_fc": "ffn_in", r"mlp\.c_proj": "ffn_out", "lm_head": "head"}),
    by_hand("titan_llama", attention.titan_llama, _tokens, {"wq|wk|wv": "qkv", "wo": "attn_out", "w1|w3": "ffn_in", "w2": "ffn_out", "output": "head"}),
    by_hand("titan_moe", experts.titan_moe, _tokens, {"wq|wk|wv": "qkv", "wo": "attn_out", r"router\.gate": "router", r"?experts\.w[13]": "expert_in", r"?experts\.w2": "expert_out", "?experts": "expert_in+expert_out", r"shared_expert\.w[13]": "ffn_in|expert_in", r"shared_expert\.w2": "ffn_out|expert_out", "output": "head"}),
    by_hand("soft_moe", experts.SoftMoE, _features(), {"?phi": "bf16", "?w1": "expert_in|ffn_in", "?w2": "expert_out|ffn_out", "": "bf16", "out": "head"}),
    by_hand("einsum_attention", attention.einsum_transformer, _features(), {"query|key|value": "qkv", "merge": "attn_out", r"mlp\.0": "ffn_in", r"mlp\.2": "ffn_out", "out": "head"}),
    by_hand("one_head", lambda: attention.einsum_transformer(heads=1), _features(), {"query|key|value": "qkv", "merge": "attn_out", r"mlp\.0": "ffn_in", r"mlp\.2": "ffn_out", "out": "head"}),
    by_hand("torch_encoder", attention.torch_encoder, _features(), {r"self_attn\.in_proj": "qkv", r"self_attn\.out_proj": "attn_out", "linear1": "ffn_in", "linear2": "ffn_out", "out": "head"}),
    by_hand("torch_transformer", attention.torch_transformer, lambda: (image(2, 19, 96), image(2, 13, 96)), {r"(self_attn|multihead_attn)\.in_proj|multihead_attn": "qkv", r"(self_attn|multihead_attn)\.out_proj": "attn_out", "linear1": "ffn_in", "linear2": "ffn_out", "out": "head"}),
    by_hand("pooling_classifier", attention.Pooled, _features(), {"to_k|to_v": "qkv", "classifier": "head"}),
    by_hand("perceiver_latents", attention.Reader, _features(40), {"to_q": "qkv|other", "to_kv": "qkv", "to_out": "attn_out", r"mlp\.0": "ffn_in", r"mlp\.2": "ffn_out", "out": "head"}),
    by_hand("linear_attention", attention.linear_transformer, _features(), {"to_q|to_k|to_v": "mixer_in|qkv", "to_out": "mixer_out|attn_out", r"layers\.\d+\.attn|attn": "bf16", r"mlp\.0": "ffn_in", r"mlp\.2": "ffn_out", "out": "head"}),
    by_hand("retention", attention.retentive, _features(), {"to_q|to_k|to_v|gate": "mixer_in|qkv", "to_out": "mixer_out|attn_out", "attn": "bf16", r"mlp\.0": "ffn_in", r"mlp\.2": "ffn_out", "out": "head"}),
    by_hand("dit", nets.DiT, lambda: (image(2, 19, 96), image(2, 36)), {r"time\.[02]": "conditioning", r"modulation\.1": "conditioning", "qkv": "qkv", "proj": "attn_out", r"mlp\.0": "ffn_in", r"mlp\.2": "ffn_out", "out": "head"}),
    by_hand("film", nets.FiLM, lambda: (image(2, 19, 96), image(2, 36)), {r"condition(\.\d)?": "conditioning", "up": "ffn_in", "down": "ffn_out", "out": "head"}),
    by_hand("mlp_classifier", nets.classifier, lambda: (image(38, 40),), {"0": "other|ffn_in|embedding", "2": "mx|other", "4": "head"}),
    by_hand("residual_mlp", nets.ResidualMLP, lambda: (image(38, 40),), {"stem": "embedding|other", "up": "ffn_in", "down": "ffn_out", "head": "head"}),
    by_hand("recommender", nets.Recommender, lambda: (image(38, 13), torch.zeros(38, 3, dtype=torch.long)), {r"bottom\.\d": "bf16|mx", r"top\.[02]": "bf16|mx", r"top\.4": "head", "": "other"}),
    by_hand("graph_net", nets.GraphNet, lambda: (image(11, 40), (image(11, 11) > 0).float()), {r"layers\.\d\.self_map|layers\.\d\.neighbours": "bf16|mx", r"layers\.\d": "other", "stem": "embedding|other", "head": "head"}),
    by_hand("autoencoder", nets.Autoencoder, lambda: (image(38, 120),), {r"encoder\.\d": "bf16|mx", r"decoder\.0": "bf16|mx", r"decoder\.2": "head"}),
)  # fmt: skip
