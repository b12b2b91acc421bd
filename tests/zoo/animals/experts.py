"""Mixtures of experts: what chooses is a router, what is chosen an expert."""

from __future__ import annotations

from typing import Any

from animal import Animal

from animals.build import GQA, about_animal, hf
from animals.decoders import GATED, HEAD, QKV

IMPLEMENTATIONS = ("grouped_mm", "batched_mm", "eager")
EXPERTS = {
    r"?experts(\.\d+)?(\.gate_up_proj|\.gate_proj|\.up_proj|\.w1|\.w3)": "expert_in",
    r"?experts(\.\d+)?(\.down_proj|\.w2)": "expert_out",
    r"?experts": "expert_in+expert_out",
}
SHARED = {
    r"shared_experts?\.(gate_proj|up_proj)": "ffn_in|expert_in",
    r"shared_experts?\.down_proj": "ffn_out|expert_out",
}
MIXTRAL = {**QKV, "o_proj": "attn_out", **EXPERTS, **HEAD}
SMALL = {**GQA, "moe_intermediate_size": 40, "num_experts_per_tok": 2}


def mixture(name: str, model: str, expect: dict[str, str], **settings: Any) -> Animal:
    """A causal language model of transformers with experts."""
    about = about_animal(settings, attentions=("sdpa", "eager"), experts=IMPLEMENTATIONS)
    return Animal(name=name, make=hf(model, **settings), expect=expect, **about)


LATENT = {"q_a_proj|q_b_proj|q_proj|kv_a_proj_with_mqa|kv_b_proj": "qkv", "o_proj": "attn_out"}

MIXTURES = (
    mixture("mixtral", "MixtralForCausalLM", {r"mlp\.gate": "router", **MIXTRAL}, **GQA, num_local_experts=5, num_experts_per_tok=2),
    mixture("qwen2_moe", "Qwen2MoeForCausalLM", {r"mlp\.gate": "router", "shared_expert_gate": "bf16", **SHARED, **MIXTRAL}, **SMALL, num_experts=5, shared_expert_intermediate_size=72),
    mixture("qwen3_moe", "Qwen3MoeForCausalLM", {r"mlp\.gate": "router", **MIXTRAL}, **SMALL, num_experts=5),
    mixture("olmoe", "OlmoeForCausalLM", {r"mlp\.gate": "router", **MIXTRAL}, **GQA, num_experts=5, num_experts_per_tok=2),
    mixture(
        "deepseek_v3", "DeepseekV3ForCausalLM",
        {r"mlp\.gate": "router", **SHARED, **LATENT, **EXPERTS, **GATED, **HEAD},
        **{**SMALL, "num_key_value_heads": 6}, n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1,
        q_lora_rank=56, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=10, v_head_dim=12,
    ),
    mixture(
        "deepseek_v2", "DeepseekV2ForCausalLM",
        {r"mlp\.gate": "router", **SHARED, **LATENT, **EXPERTS, **GATED, **HEAD},
        **{**SMALL, "num_key_value_heads": 6}, n_routed_experts=8, n_group=2, topk_group=1, first_k_dense_replace=1, n_shared_experts=1,
        q_lora_rank=56, kv_lora_rank=24, qk_rope_head_dim=8, qk_nope_head_dim=10, v_head_dim=12,
    ),
    mixture("gpt_oss", "GptOssForCausalLM", {r"mlp\.router": "router", **MIXTRAL}, **GQA, head_dim=24, num_local_experts=5, num_experts_per_tok=2, sliding_window=7, attentions=("eager",)),
    mixture("phimoe", "PhimoeForCausalLM", {r"mlp\.router": "router", **MIXTRAL}, **GQA, num_local_experts=5, num_experts_per_tok=2),
    mixture("granitemoe", "GraniteMoeForCausalLM", {r"block_sparse_moe\.router": "router", **MIXTRAL}, **GQA, num_local_experts=5, num_experts_per_tok=2),
    mixture("glm4_moe", "Glm4MoeForCausalLM", {r"mlp\.gate": "router", **SHARED, **MIXTRAL, **GATED}, **SMALL, head_dim=24, n_routed_experts=5, first_k_dense_replace=1, n_group=1, topk_group=1),
    mixture("llama4", "Llama4ForCausalLM", {r"feed_forward\.router": "router", **SHARED, **MIXTRAL}, **GQA, intermediate_size_mlp=176, head_dim=24, num_local_experts=5, num_experts_per_tok=1, config="Llama4TextConfig", pad_token_id=0, experts=("batched_mm", "eager")),
    mixture("ernie4_5_moe", "Ernie4_5_MoeForCausalLM", {r"mlp\.gate": "router", **SHARED, **MIXTRAL, **GATED}, **SMALL, moe_num_experts=5, moe_k=2, moe_num_shared_experts=1),
    mixture("jetmoe", "JetMoeForCausalLM", {"router.layer": "router", **HEAD, r"mlp\.input_linear": "expert_in", r"mlp\.output_linear": "expert_out", r"experts\.input_linear": "mx", r"experts\.output_linear": "mx", "kv_proj": "qkv"}, hidden_size=96, intermediate_size=208, num_hidden_layers=2, num_key_value_heads=3, kv_channels=16, vocab_size=517, num_local_experts=5, num_experts_per_tok=2, experts=()),
    mixture("dbrx", "DbrxForCausalLM", {"router.layer": "router", "Wqkv": "qkv", "out_proj": "attn_out", r"experts\.mlp": "expert_in+expert_out", **EXPERTS, **HEAD}, d_model=96, n_heads=6, n_layers=2, max_seq_len=61, vocab_size=517, ffn_config={"ffn_hidden_size": 208, "moe_num_experts": 5, "moe_top_k": 2, "hidden_size": 96}, experts=(), attn_config={"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0}),
    mixture("flex_olmo", "FlexOlmoForCausalLM", {r"mlp\.gate": "router", **MIXTRAL}, **GQA, num_experts=5, num_experts_per_tok=2, pad_token_id=0),
)  # fmt: skip
