"""Known models on meshes of 8 to 4,096 ranks: every decision is the whole model's, every byte adds up.

FSDP2 splits the first dimension. Of 8 experts on 64 ranks 8 ranks have one each, and 64 are gathered.
"""

from __future__ import annotations

import functools
from collections import Counter
from typing import Any

import pytest
import torch
from helpers.giants import GIANTS, qwen3_moe
from meshed import decisions
from torch import nn

import mxcompile
from mxcompile.mesh import RankReport

NAMED = {"policy": "nvidia", "target": "sm_100", "strict": False}
LINKS = "nvlink=900,net=50"
FSDP, BOTH, EXPERTS = "fsdp", "fsdp,tp=llama", "fsdp,ep"
ALL = 126


def built(name: str, layers: int) -> tuple[nn.Module, dict[str, Any]]:
    ids = torch.zeros(1, 256, dtype=torch.int64)
    with torch.device("meta"):
        if name == "qwen3_moe":
            return qwen3_moe(layers), {"input_ids": ids, "labels": ids}
        build, inputs, _, _ = GIANTS[name]
        return build(layers), inputs


@functools.cache
def whole(name: str, layers: int) -> Counter[Any]:
    model, inputs = built(name, layers)
    return decisions(mxcompile.explain(model, **inputs, **NAMED))


def checked(name: str, layers: int, mesh: str, parallel: str) -> RankReport:
    model, inputs = built(name, layers)
    rank = mxcompile.explain_rank(model, **inputs, mesh=mesh, parallel=parallel, links=LINKS, **NAMED)
    assert not rank.warnings
    assert decisions(rank.report) == whole(name, layers)
    axes = {name: int(size) for name, size in (word.split("=") for word in mesh.split(","))}
    tp, ep, shards = axes.get("tp", 1), axes.get("ep", 1), axes.get("dp") or axes["dp_shard"]
    local, whole_bytes = 0.0, 0.0
    for path, p in model.named_parameters():
        spread = ep > 1 and ".experts." in path and p.ndim == 3
        height, ranks = (p.shape[0] // ep, shards) if spread else (p.shape[0], shards * ep)
        whole_experts = spread and height < ranks  # then each expert is split, and nothing padded
        rows = height / ranks if whole_experts else -(-height // ranks)
        local += rows * p[0].numel() / tp
        whole_bytes += 2 * rows * ranks * p[0].numel() / tp
    parameter_bytes = rank.memory.parameters - sum(buffer.nbytes for buffer in model.buffers())
    assert parameter_bytes == pytest.approx(4 * local, rel=0.05)
    exchanges = [c for c in rank.collectives if c.kind == "all-to-all" and c.dtype != "int64"]
    assert len({c.name for c in exchanges}) * 4 == len(exchanges)
    spread_layers = {shard.name.rpartition(".")[0] for shard in rank.shards if shard.experts is not None}
    assert {c.name for c in exchanges} == spread_layers
    assert bool(exchanges) == (ep > 1)
    gathered = [c for c in rank.collectives if c.kind == "all-gather" and c.what == "weights"]
    forward = sum(c.num_bytes * c.ranks for c in gathered if c.phase == "forward")
    assert forward == pytest.approx(whole_bytes, rel=0.05)
    assert rank.time is not None
    assert 0 < rank.time.us.low < rank.time.us.centre < rank.time.us.high
    return rank


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers", "mesh", "parallel"),
    [
        ("llama", 4, "dp=8", FSDP),
        ("llama", 4, "dp=64,tp=8", BOTH),
        ("llama", 4, "dp=1024,tp=4", BOTH),
        ("llama", 4, "dp_replicate=8,dp_shard=64,tp=8", BOTH),
        ("mixtral", 4, "dp=64", FSDP),
        ("mixtral", 4, "dp_replicate=4,dp_shard=128", FSDP),
        ("deepseek", 4, "dp=256", FSDP),
        ("deepseek", 4, "dp=4096", FSDP),
        ("qwen3_moe", 4, "dp=16", FSDP),
        ("qwen3_moe", 4, "dp_replicate=32,dp_shard=32", FSDP),
        ("mixtral", 4, "dp=8,ep=8", EXPERTS),
        ("deepseek", 4, "dp=64,ep=64", EXPERTS),
        ("qwen3_moe", 4, "dp=2,ep=8", EXPERTS),
        ("t5", 4, "dp=8", FSDP),
        ("t5", 4, "dp=2048", FSDP),
    ],
)
def test_a_model_on_a_mesh(name: str, layers: int, mesh: str, parallel: str):
    checked(name, layers, mesh, parallel)


@pytest.mark.slow
def test_405b_on_a_thousand_ranks():
    """Equal layers are folded under FSDP2 and tensor parallelism too: 126 cost what 3 cost."""
    rank = checked("llama", ALL, "dp=128,tp=8", BOTH)
    reduced = [c for c in rank.collectives if c.kind == "reduce-scatter" and c.axis == "dp"]
    assert {c.name for c in reduced} == {"", *(f"model.layers.{index}" for index in range(ALL))}
    assert len({shard.name for shard in rank.shards if shard.gemm == "fprop"}) == 7 * ALL + 1
