"""A small Llama under torchtitan's names, and factories whose own code parallelises it on a mesh."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch
from helpers.made import Made
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import mxcompile

WORDS, WIDTH, HEAD, FFN, TOKENS = 96, 128, 32, 160, 32
Prepared = tuple[nn.Module, tuple[Tensor, ...], dict[str, Any]]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wo = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.wk, self.wv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (p(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for p in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(-2))


class FeedForward(Made, w1=(WIDTH, FFN, False), w3=(WIDTH, FFN, False), w2=(FFN, WIDTH, False)):
    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(WIDTH), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))


class Llama(nn.Module):
    def __init__(self, depth: int = 2) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(WORDS, WIDTH)
        self.layers = nn.ModuleList([Block() for _ in range(depth)])
        self.norm, self.output = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))


def plain(depth: int = 2) -> Prepared:
    """The model as it is before anything is distributed."""
    return Llama(depth), (torch.zeros(1, TOKENS, dtype=torch.int64),), {}


def decisions(report: mxcompile.Report) -> Counter[Any]:
    """How often a report has each decision."""
    return Counter((gemm.name, gemm.role, gemm.gemm, gemm.precision, gemm.reason) for gemm in report.gemms)


def copied(_: nn.Module, __: Any, result: Tensor) -> Tensor:
    """A hook of an embedding: compiled blocks cannot take what is still on its way from other ranks."""
    return result.clone()


def sequence_parallel_(model: nn.Module, along: DeviceMesh) -> None:
    """As torchtitan does it: norms on a rank's own tokens, products on all of them."""
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    ends = {
        "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, along, ends)
    model.tok_embeddings.register_forward_hook(copied)
    for block in model.layers:
        styles = {
            "attention_norm": SequenceParallel(),
            "ffn_norm": SequenceParallel(),
            "attention": gathered,
            "feed_forward": gathered,
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            **{f"feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        }
        parallelize_module(block, along, styles)


def fully_shard_(model: nn.Module, along: DeviceMesh, **settings: Any) -> None:
    for block in model.layers:
        fully_shard(block, mesh=along, **settings)
    fully_shard(model, mesh=along, **settings)


MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def fsdp(mesh: DeviceMesh) -> Prepared:
    example = plain()
    fully_shard_(example[0], mesh["dp"], mp_policy=MIXED)
    return example


def freeze_(model: Llama, blocks: int) -> None:
    """Freezes the embedding and the first of the `blocks`."""
    model.tok_embeddings.requires_grad_(False)
    for block in model.layers[:blocks]:
        block.requires_grad_(False)


def frozen(mesh: DeviceMesh) -> Prepared:
    """Backward ends after the first block that trains, beside which FSDP2 gathers a frozen block."""
    example = plain(4)
    freeze_(example[0], 3)
    fully_shard_(example[0], mesh["dp"], mp_policy=MIXED)
    return example


class Tower(Llama):
    """A Llama whose first blocks run without gradients, though their weights have some."""

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        with torch.no_grad():
            for layer in self.layers[:-1]:
                x = layer(x)
        return self.output(self.norm(self.layers[-1](x)))


def tower(mesh: DeviceMesh) -> Prepared:
    model, inputs = Tower(4), plain()[1]
    fully_shard_(model, mesh["dp"], mp_policy=MIXED)
    return model, inputs, {}


TILES = {"version": 1, "rules": [{"match": {"name": "*"}, "use": {"weight_block": "32x32"}}]}


def gathers(mesh: DeviceMesh) -> Prepared:
    example = plain()
    mxcompile.quantize_gathers_(example[0], TILES, mesh=mesh["dp"], args=example[1])
    fully_shard_(example[0], mesh["dp"], mp_policy=MIXED)
    return example


def hsdp(mesh: DeviceMesh) -> Prepared:
    example = plain()
    example[0].output.weight.requires_grad_(False)
    fully_shard_(example[0], mesh["copies", "shards"], reshard_after_forward=False)
    return example


def sp(mesh: DeviceMesh) -> Prepared:
    example = plain()
    sequence_parallel_(example[0], mesh["tp"])
    return example


def fsdp_sp(mesh: DeviceMesh) -> Prepared:
    example = plain()
    sequence_parallel_(example[0], mesh["tp"])
    fully_shard_(example[0], mesh["dp"], mp_policy=MIXED)
    return example


def deep(mesh: DeviceMesh) -> Prepared:
    """Deep enough for equal layers to be traced once."""
    example = plain(6)
    sequence_parallel_(example[0], mesh["tp"])
    fully_shard_(example[0], mesh["dp"])
    return example
