"""Small models whose weights are stored quantized, and what is asked of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mxcompile
from mxcompile import MXTensor
from mxcompile.errors import CheckpointError

BF16 = torch.bfloat16


class Block(nn.Module):
    """A gated feed-forward network with a residual, its output layer as wide as it is long."""

    def __init__(self, width: int = 96, hidden: int = 128) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, dtype=BF16)
        self.gate = nn.Linear(width, hidden, bias=False, dtype=BF16)
        self.up = nn.Linear(width, hidden, bias=False, dtype=BF16)
        self.down = nn.Linear(hidden, width, dtype=BF16)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        return x + self.down(F.silu(self.gate(h)) * self.up(h))


class Model(nn.Module):
    """An embedding, blocks that repeat, and a head tied to the embedding."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.embed = nn.Embedding(64, 96, dtype=BF16)
        self.blocks = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(96, 64, bias=False, dtype=BF16)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


TOKENS = torch.arange(12).view(2, 6)


def stored_names(model: nn.Module) -> set[str]:
    return {name for name, value in model.named_parameters() if isinstance(value, MXTensor)}


def quantized(model: nn.Module | None = None, policy=None) -> tuple[nn.Module, mxcompile.StoredWeights]:
    model = Model() if model is None else model
    return model, mxcompile.quantize_weights_(model, policy, args=(TOKENS,), progress=False)


def dense_copy(model: nn.Module) -> nn.Module:
    """The model of the values of the stored weights."""
    dense = Model(blocks=len(model.blocks))
    dense.load_state_dict(model.state_dict())
    assert not stored_names(dense)
    return dense.requires_grad_(False)


def head_rule(use: str, preset: str = "inference", **embedding: str) -> dict[str, Any]:
    """A policy that stores the head too. embedding: what a rule says of the embedding."""
    rules = [{"match": {"role": "head"}, "use": use}]
    rules += [{"match": {"role": "embedding"}, "use": word} for word in embedding.values()]
    return {"version": 1, "preset": preset, "rules": rules}


def same_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.view(torch.uint8), b.view(torch.uint8))


def row_of(table: mxcompile.StoredWeights, name: str) -> Any:
    """What the table says of the weight `name`."""
    (row,) = (row for row in table.weights if row.name == name)
    return row


def assert_same_logits(tokens: Tensor, first: nn.Module, *others: nn.Module) -> None:
    assert others
    with torch.no_grad():
        logits = first(tokens).logits
        for other in others:
            assert torch.equal(other(tokens).logits, logits)


def change_json(path: Path, *without: str, **changes: Any) -> None:
    """Change entries of a file, and take out those named in `without`, which it must have."""
    whole = json.loads(path.read_text()) | changes
    for name in without:
        del whole[name]
    path.write_text(json.dumps(whole))


def assert_refused(message: str, folder: Path, *model: nn.Module) -> None:
    """Loading fails with a message of one line."""
    with pytest.raises(CheckpointError, match=message) as caught:
        mxcompile.load_quantized(folder, *model)
    assert "\n" not in str(caught.value)


def mixtral(layers: int = 2) -> nn.Module:
    """A Mixtral of four experts."""
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=layers, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, max_position_embeddings=64, dtype="bfloat16",
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    return MixtralForCausalLM._from_config(config, dtype=BF16).eval()


def llama(tied: bool = False, **sizes: int) -> nn.Module:
    """A Llama of two blocks. tied: its head has the weight of the embedding. sizes: those that differ."""
    from transformers import LlamaConfig, LlamaForCausalLM

    small = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2}
    config = LlamaConfig(
        vocab_size=64, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=64,
        tie_word_embeddings=tied, dtype="bfloat16", bos_token_id=0, eos_token_id=1, **small | sizes,
    )  # fmt: skip
    return LlamaForCausalLM._from_config(config, dtype=BF16).eval()


def store_blocks(model: nn.Module, attention: Any = None, others: Any = None) -> nn.Module:
    """All matrices inside the blocks stored, but for routers. attention, others: what `quantize` is told."""
    for name, parameter in list(model.named_parameters()):
        if ".layers." in name and parameter.ndim > 1 and "mlp.gate.weight" not in name:
            weight = mxcompile.quantize(
                parameter.detach(), **((attention if "_attn." in name else others) or {})
            )
            owner, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(owner), attribute, nn.Parameter(weight, requires_grad=False))
    return model
