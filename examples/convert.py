"""Convert a checkpoint to MXFP8, look into it, and load it without BF16 weights in between."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig, LlamaForCausalLM

import mxcompile
from mxcompile.cli import main as command

CONFIG = LlamaConfig(
    hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, vocab_size=128
)


def main() -> None:
    """Writes a small checkpoint, and runs `mxcompile convert` and `mxcompile inspect` on it."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).bfloat16().eval()
    tokens = torch.randint(0, CONFIG.vocab_size, (1, 16))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        source, target = Path(folder, "bf16"), Path(folder, "mxfp8")
        model.save_pretrained(source)
        assert command(["convert", str(source), str(target)]) == 0
        assert command(["inspect", str(target)]) == 0
        loaded = mxcompile.load_quantized(target).eval()
        expected, result = model(tokens).logits.float(), loaded(tokens).logits.float()
    error = ((result - expected).norm() / expected.norm()).item()
    print(f"relative error of the logits {error:.3f}")
    assert 0 < error < 0.2


if __name__ == "__main__":
    main()
