"""Audit a Hugging Face model: `python examples/audit.py [DIRECTORY]`.

DIRECTORY holds a config.json, and safetensors with its weights. Without it the script audits a small Llama
with random weights.
"""

from __future__ import annotations

import sys

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM

import mxcompile

CONFIG = LlamaConfig(
    hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=2, vocab_size=512
)


def main() -> None:
    """Prints the worst layers under the default policy, and the error of each role."""
    torch.manual_seed(0)
    if len(sys.argv) > 1:
        model = AutoModelForCausalLM.from_pretrained(sys.argv[1], local_files_only=True)
    else:
        model = LlamaForCausalLM(CONFIG)
    tokens = torch.randint(0, model.config.vocab_size, (2, 64))
    audit = mxcompile.audit(model, input_ids=tokens, labels=tokens)
    print(audit)
    print(audit.view("role"))
    worst = audit.numerics.worst_gemms()[0]
    print(f"most harmful: {worst.name} {worst.gemm}, {worst.sqnr_db:.1f} dB")


if __name__ == "__main__":
    main()
