"""A mixture of experts: the router stays in BF16 or FP32, the experts' grouped products are quantized."""

from __future__ import annotations

import torch
from transformers import MixtralConfig, MixtralForCausalLM

import mxcompile

CONFIG = MixtralConfig(
    hidden_size=64,
    intermediate_size=96,
    num_hidden_layers=1,
    num_attention_heads=2,
    num_key_value_heads=2,
    num_local_experts=4,
    vocab_size=128,
    use_cache=False,
)


def main() -> None:
    """Prints the roles of the layers, and runs one training step."""
    torch.manual_seed(0)
    model = MixtralForCausalLM(CONFIG)
    tokens = torch.randint(0, CONFIG.vocab_size, (2, 32))
    compiled = torch.compile(model, backend="mxfp8")
    loss = compiled(input_ids=tokens, labels=tokens).loss
    loss.backward()
    report = mxcompile.reports()[-1]
    print(report)
    precision = {gemm.role: gemm.precision for gemm in report.gemms}
    assert precision["router"] == "bf16"
    assert precision["expert_in"] == precision["expert_out"] == "mxfp8"


if __name__ == "__main__":
    main()
