"""Train with Hugging Face's Trainer: compile the model in place, then hand it over."""

from __future__ import annotations

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import mxcompile

CONFIG = LlamaConfig(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=2,
    vocab_size=128,
    use_cache=False,
)


def main() -> None:
    """Trains two steps."""
    model = LlamaForCausalLM(CONFIG)
    model.compile(backend="mxfp8")
    rows = torch.randint(0, CONFIG.vocab_size, (4, 32))
    data = [{"input_ids": row, "labels": row} for row in rows]
    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=2, per_device_train_batch_size=2, report_to=[], use_cpu=True, save_strategy="no"
        )
        Trainer(model=model, args=arguments, train_dataset=data).train()
    report = mxcompile.reports()[-1]
    print(report)
    assert {gemm.precision for gemm in report.gemms if gemm.role == "ffn_out"} == {"mxfp8"}


if __name__ == "__main__":
    main()
