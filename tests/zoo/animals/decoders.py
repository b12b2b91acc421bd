"""Decoders of language: dense ones.

Of these an engineer says at once what each projection is; the output head, tied or not, is a head.
"""

from __future__ import annotations

from typing import Any

from animal import Animal

from animals.build import GQA, SIZES, about_animal, hf

HEAD = {"lm_head": "head"}
GATED = {"gate_proj|up_proj": "ffn_in", "down_proj": "ffn_out"}
QKV = {"q_proj|k_proj|v_proj": "qkv"}
LLAMA = {**QKV, "o_proj": "attn_out", **GATED, **HEAD}
FC = {"fc1": "ffn_in", "fc2": "ffn_out"}
H_TO_4H = {"dense_h_to_4h": "ffn_in", "dense_4h_to_h": "ffn_out"}


def decoder(name: str, model: str, expect: dict[str, str] = LLAMA, **settings: Any) -> Animal:
    """A causal language model of transformers."""
    about = about_animal(settings, attentions=("sdpa", "eager"))
    return Animal(name=name, make=hf(model, **settings), expect=expect, **about)


DECODERS = (
    decoder("llama", "LlamaForCausalLM", **GQA),
    decoder("mistral", "MistralForCausalLM", **GQA, sliding_window=7),
    decoder("qwen2", "Qwen2ForCausalLM", **GQA),
    decoder("qwen3", "Qwen3ForCausalLM", **GQA, head_dim=24),
    decoder("gemma", "GemmaForCausalLM", **GQA, head_dim=24),
    decoder("gemma2", "Gemma2ForCausalLM", **GQA, head_dim=24, sliding_window=7, attentions=("eager",)),
    decoder("gemma3", "Gemma3ForCausalLM", **GQA, head_dim=24, sliding_window=7),
    decoder("cohere", "CohereForCausalLM", **GQA),
    decoder("granite", "GraniteForCausalLM", **GQA),
    decoder("stablelm", "StableLmForCausalLM", **GQA),
    decoder("olmo2", "Olmo2ForCausalLM", **GQA),
    decoder("smollm3", "SmolLM3ForCausalLM", **GQA, pad_token_id=0),
    decoder("helium", "HeliumForCausalLM", **GQA, head_dim=16),
    decoder("arcee", "ArceeForCausalLM", {**QKV, "o_proj": "attn_out", "up_proj": "ffn_in", "down_proj": "ffn_out", **HEAD}, **GQA),
    decoder("nemotron", "NemotronForCausalLM", {**QKV, "o_proj": "attn_out", "up_proj": "ffn_in", "down_proj": "ffn_out", **HEAD}, **GQA),
    decoder("glm4", "Glm4ForCausalLM", {**QKV, "o_proj": "attn_out", "gate_up_proj": "ffn_in", "down_proj": "ffn_out", **HEAD}, **GQA, head_dim=24, pad_token_id=0),
    decoder("phi", "PhiForCausalLM", {**QKV, "self_attn.dense": "attn_out", **FC, **HEAD}, **SIZES),
    decoder("phi3", "Phi3ForCausalLM", {"qkv_proj": "qkv", "o_proj": "attn_out", "gate_up_proj": "ffn_in", "down_proj": "ffn_out", **HEAD}, **GQA, pad_token_id=0),
    decoder("starcoder2", "Starcoder2ForCausalLM", {**QKV, "o_proj": "attn_out", "c_fc": "ffn_in", "c_proj": "ffn_out", **HEAD}, **GQA),
    decoder(
        "gpt2", "GPT2LMHeadModel",
        {"attn.c_attn": "qkv", "attn.c_proj": "attn_out", "mlp.c_fc": "ffn_in", "mlp.c_proj": "ffn_out", **HEAD},
        n_embd=96, n_head=6, n_layer=2, n_positions=61, n_inner=208, vocab_size=517,
    ),
    decoder(
        "gpt_bigcode", "GPTBigCodeForCausalLM",
        {"attn.c_attn": "qkv", "attn.c_proj": "attn_out", "mlp.c_fc": "ffn_in", "mlp.c_proj": "ffn_out", **HEAD},
        n_embd=96, n_head=6, n_layer=2, n_positions=61, n_inner=208, vocab_size=517, multi_query=True,
    ),
    decoder(
        "gpt_neo", "GPTNeoForCausalLM",
        {**QKV, "out_proj": "attn_out", "c_fc": "ffn_in", "c_proj": "ffn_out", **HEAD},
        hidden_size=96, num_heads=6, num_layers=2, attention_types=[[["global", "local"], 1]], window_size=7,
        intermediate_size=208, vocab_size=517, max_position_embeddings=61, attentions=("eager",),
    ),
    decoder(
        "gptj", "GPTJForCausalLM",
        {**QKV, "out_proj": "attn_out", "fc_in": "ffn_in", "fc_out": "ffn_out", **HEAD},
        n_embd=96, n_head=6, n_layer=2, n_positions=61, n_inner=208, vocab_size=517, rotary_dim=8, attentions=("eager",),
    ),
    decoder(
        "codegen", "CodeGenForCausalLM",
        {"qkv_proj": "qkv", "out_proj": "attn_out", "fc_in": "ffn_in", "fc_out": "ffn_out", **HEAD},
        n_embd=96, n_head=4, n_layer=2, n_positions=61, n_inner=208, vocab_size=517, rotary_dim=8, attentions=("eager",),
    ),
    decoder(
        "gpt_neox", "GPTNeoXForCausalLM",
        {"query_key_value": "qkv", "attention.dense": "attn_out", **H_TO_4H, **HEAD}, **SIZES,
    ),
    decoder("opt", "OPTForCausalLM", {**QKV, "out_proj": "attn_out", **FC, **HEAD},
            hidden_size=96, ffn_dim=208, num_hidden_layers=2, num_attention_heads=6, vocab_size=517,
            max_position_embeddings=61, word_embed_proj_dim=96),
    decoder("bloom", "BloomForCausalLM", {"query_key_value": "qkv", "self_attention.dense": "attn_out", **H_TO_4H, **HEAD},
            hidden_size=96, n_layer=2, n_head=6, vocab_size=517, attentions=("eager",)),
    decoder("mpt", "MptForCausalLM", {"Wqkv": "qkv", "out_proj": "attn_out", "up_proj": "ffn_in", "down_proj": "ffn_out", **HEAD},
            d_model=96, n_heads=6, n_layers=2, vocab_size=517, max_seq_len=61, attentions=("eager",)),
    decoder("falcon", "FalconForCausalLM", {"query_key_value": "qkv", "self_attention.dense": "attn_out", **H_TO_4H, **HEAD},
            hidden_size=96, num_hidden_layers=2, num_attention_heads=6, vocab_size=517, ffn_hidden_size=208),
    decoder("xglm", "XGLMForCausalLM", {**QKV, "out_proj": "attn_out", **FC, **HEAD},
            d_model=96, ffn_dim=208, num_layers=2, attention_heads=6, vocab_size=517, max_position_embeddings=61, attentions=("eager",)),
    decoder("biogpt", "BioGptForCausalLM", {**QKV, "out_proj": "attn_out", **FC, "output_projection": "head"}, **SIZES, max_position_embeddings=61),
    decoder("diffllama", "DiffLlamaForCausalLM", **GQA),
)  # fmt: skip
