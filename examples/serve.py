"""Serve a Hugging Face model with its weights, head, embedding, keys and values stored in MXINT8."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mxcompile

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=128,
    tie_word_embeddings=True,
    eos_token_id=None,
)
POLICY = {"version": 1, "preset": "mxint8", "rules": [{"match": {"role": "head"}, "use": "mxint8"}]}


def main() -> None:
    """Stores the weights in place, and generates eight tokens. `from_pretrained` loads a real model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).eval()
    print(mxcompile.quantize_weights_(model, POLICY))
    cache = mxcompile.static_cache(model, max_cache_len=64, precision="mxint8")
    cache.early_initialization(1, CONFIG.num_key_value_heads, CONFIG.head_dim, model.dtype, model.device)
    model.forward = torch.compile(model.forward, backend="mxfp8", options={"policy": "bf16"})
    prompt = torch.randint(0, CONFIG.vocab_size, (1, 16))
    with torch.no_grad():
        tokens = model.generate(prompt, cache=cache, max_new_tokens=8, do_sample=False, disable_compile=True)
    print(tokens[0, 16:].tolist())
    assert tokens.shape == (1, 24)


if __name__ == "__main__":
    main()
