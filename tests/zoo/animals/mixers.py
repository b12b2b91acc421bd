"""State-space models, linear attention and what mixes them with attention."""

from __future__ import annotations

from typing import Any

from animal import Animal

from animals.build import GQA, about_animal, hf, text
from animals.decoders import HEAD, LLAMA, QKV
from animals.experts import EXPERTS, IMPLEMENTATIONS, MIXTRAL

SELECTIVE = {
    r"mixer\.x_proj|mamba\.x_proj": "mixer_in|bf16",
    r"mixer\.dt_proj|mamba\.dt_proj": "mixer_in|bf16",
}
"""What makes the step, B and C of the first Mamba from its activations: small, both are right."""


def mixer(name: str, model: str, expect: dict[str, str], **settings: Any) -> Animal:
    """A causal language model of transformers whose tokens meet otherwise than in a softmax, some or all."""
    about = about_animal(settings, attentions=("eager",))
    return Animal(name=name, make=hf(model, text, **settings), expect=expect, **about)


MAMBA2 = {"num_heads": 12, "head_dim": 16, "state_size": 20, "n_groups": 2, "chunk_size": 8, "expand": 2}
MIXERS = (
    mixer("mamba", "MambaForCausalLM", {**SELECTIVE, r"mixer\.in_proj": "mixer_in", r"mixer\.out_proj": "mixer_out", "?mixer": "bf16", **HEAD}, hidden_size=96, state_size=10, num_hidden_layers=2, vocab_size=517, expand=2, time_step_rank=7),
    mixer("falcon_mamba", "FalconMambaForCausalLM", {**SELECTIVE, r"mixer\.in_proj": "mixer_in", r"mixer\.out_proj": "mixer_out", "?mixer": "bf16", **HEAD}, hidden_size=96, state_size=10, num_hidden_layers=2, vocab_size=517, expand=2, time_step_rank=7),
    mixer("mamba2", "Mamba2ForCausalLM", {r"mixer\.in_proj": "mixer_in", r"mixer\.out_proj": "mixer_out", "?mixer": "bf16", **HEAD}, hidden_size=96, num_hidden_layers=2, vocab_size=517, **MAMBA2),
    mixer("jamba", "JambaForCausalLM", {r"mamba\.in_proj": "mixer_in", r"mamba\.out_proj": "mixer_out", **SELECTIVE, "?mamba": "bf16", "router": "router", **EXPERTS, **LLAMA}, **GQA, num_experts=4, num_experts_per_tok=2, attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1, use_mamba_kernels=False, mamba_d_state=10, mamba_dt_rank=7, pad_token_id=0, attentions=("sdpa", "eager"), experts=IMPLEMENTATIONS),
    mixer("bamba", "BambaForCausalLM", {r"mamba\.in_proj": "mixer_in", r"mamba\.out_proj": "mixer_out", "?mamba": "bf16", **LLAMA}, **GQA, attn_layer_indices=[1], mamba_n_heads=12, mamba_d_head=16, mamba_d_state=20, mamba_n_groups=2, mamba_chunk_size=8, pad_token_id=0, attentions=("sdpa", "eager")),
    mixer("falcon_h1", "FalconH1ForCausalLM", {r"mamba\.in_proj": "mixer_in", r"mamba\.out_proj": "mixer_out", "?mamba": "bf16", **LLAMA}, **GQA, mamba_d_ssm=192, mamba_n_heads=12, mamba_d_head=16, mamba_d_state=20, mamba_n_groups=2, mamba_chunk_size=8, pad_token_id=0, attentions=("sdpa", "eager")),
    mixer("granite_hybrid", "GraniteMoeHybridForCausalLM", {r"mamba\.in_proj": "mixer_in", r"mamba\.out_proj": "mixer_out", "?mamba": "bf16", r"block_sparse_moe\.router": "router", r"shared_mlp\.input_linear": "ffn_in|expert_in", r"shared_mlp\.output_linear": "ffn_out|expert_out", **MIXTRAL}, **GQA, num_local_experts=4, num_experts_per_tok=2, shared_intermediate_size=72, layer_types=["mamba", "attention"], mamba_n_heads=12, mamba_d_head=16, mamba_d_state=20, mamba_n_groups=2, mamba_chunk_size=8, pad_token_id=0, attentions=("sdpa", "eager"), experts=IMPLEMENTATIONS),
    mixer("zamba2", "Zamba2ForCausalLM", {r"(mamba|mamba_decoder\.mamba)\.in_proj": "mixer_in", r"(mamba|mamba_decoder\.mamba)\.out_proj": "mixer_out", "?mamba": "bf16", r"gate_up_proj(_adapter_list\.\d\.\d)?": "ffn_in", "down_proj": "ffn_out", r"layers\.\d+\.linear": "bf16|mx", **QKV, "o_proj": "attn_out", **HEAD}, hidden_size=96, intermediate_size=208, num_hidden_layers=3, num_attention_heads=6, vocab_size=517, layers_block_type=["mamba", "hybrid", "mamba"], hybrid_layer_ids=[1], mamba_d_state=20, mamba_ngroups=2, mamba_expand=2, n_mamba_heads=12, mamba_headdim=16, chunk_size=8, num_mem_blocks=1, attention_hidden_size=192, attention_head_dim=32, kv_channels=16, adapter_rank=12, attentions=("sdpa", "eager")),
    mixer("recurrent_gemma", "RecurrentGemmaForCausalLM", {"linear_x|linear_y": "mixer_in", "linear_out": "mixer_out", r"temporal_block\.rg_lru(\.\w+)?": "bf16|mx", **LLAMA}, **GQA, lru_width=96, attention_window_size=7, conv1d_width=4, block_types=["recurrent", "attention"], pad_token_id=0, bf16=False, attentions=("sdpa",)),
    mixer("qwen3_next", "Qwen3NextForCausalLM", {r"linear_attn\.(in_proj_qkvz|in_proj_qkv|in_proj_z)": "mixer_in", r"linear_attn\.(in_proj_ba|in_proj_b|in_proj_a)": "mixer_in|bf16", r"linear_attn\.out_proj": "mixer_out", "?linear_attn": "bf16", r"mlp\.gate": "router", "shared_expert_gate": "bf16", r"shared_expert\.(gate_proj|up_proj)": "ffn_in|expert_in", r"shared_expert\.down_proj": "ffn_out|expert_out", **MIXTRAL}, **GQA, head_dim=24, moe_intermediate_size=40, num_experts_per_tok=2, num_experts=5, shared_expert_intermediate_size=72, layer_types=["linear_attention", "full_attention"], linear_key_head_dim=12, linear_value_head_dim=14, linear_num_key_heads=3, linear_num_value_heads=6, attentions=("sdpa", "eager"), experts=IMPLEMENTATIONS),
    mixer("minimax", "MiniMaxForCausalLM", {r"self_attn\.qkv_proj|self_attn\.output_gate": "mixer_in|qkv", r"self_attn\.out_proj": "mixer_out|attn_out", r"?self_attn": "bf16", r"(mlp|block_sparse_moe)\.gate": "router", **MIXTRAL}, **GQA, head_dim=16, layer_types=["linear_attention", "full_attention"], block_size=8, num_local_experts=4, num_experts_per_tok=2, attentions=("sdpa", "eager"), experts=IMPLEMENTATIONS),
    mixer("rwkv", "RwkvForCausalLM", {r"attention\.(key|value|receptance)": "mixer_in", r"attention\.output": "mixer_out", r"feed_forward\.(key|receptance)": "ffn_in", r"feed_forward\.value": "ffn_out", "head": "head"}, hidden_size=96, intermediate_size=208, num_hidden_layers=2, vocab_size=517, context_length=61, bf16=False),
    mixer("lfm2", "Lfm2ForCausalLM", {r"conv\.in_proj": "mixer_in", r"conv\.out_proj": "mixer_out", "?conv": "bf16", **QKV, r"self_attn\.out_proj": "attn_out", r"w1|w3": "ffn_in", "w2": "ffn_out", **HEAD}, **GQA, layer_types=["conv", "full_attention"], block_auto_adjust_ff_dim=False, attentions=("sdpa", "eager")),
)  # fmt: skip
