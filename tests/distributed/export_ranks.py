"""What runs on the ranks of `test_export_ranks`: sharded models, exported before and after a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from helpers.ranks import on_ranks, results_of
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from weight_ranks import MIXED, TOKENS, WORDS, Model, build, compiled, gather, loss, shard

import mxcompile

POLICY: dict[str, Any] = {
    "version": 1,
    "rules": [
        {"match": {"name": "*.down"}, "use": {"rounding": "floor"}},
        {"match": {"name": "*.gate"}, "use": {"weight_block": "32x32"}},
        {"match": {"name": "blocks.*"}, "use": "mxfp8"},
    ],
}
IDS = torch.randint(0, WORDS, (2, TOKENS), generator=torch.Generator().manual_seed(5))
"""The same on every rank."""


def fsdp(model: Model) -> tuple[nn.Module, Any]:
    """FP32 masters, gathered in BF16."""
    return compiled(shard(model, mp_policy=MIXED), POLICY), POLICY


def tensor_parallel(model: Model) -> tuple[nn.Module, Any]:
    """Shards of rows and of columns, then each of them sharded by FSDP2."""
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "model"))
    columns = {name: ColwiseParallel() for name in ("q", "k", "v", "gate", "up")}
    for block in model.blocks:
        parallelize_module(
            block, mesh["model"], {**columns, "o": RowwiseParallel(), "down": RowwiseParallel()}
        )
    return compiled(shard(model, mesh=mesh["data"]), POLICY), POLICY


def gathered_in_mxfp8(model: Model) -> tuple[nn.Module, Any]:
    """Weights that travel as codes of tiles."""
    from weight_ranks import POLICY as TILES

    gather(model)
    return compiled(fully_shard(model), TILES), TILES


def run(way: Callable[[Model], tuple[nn.Module, Any]]) -> list[dict[str, Any]]:
    """For two steps: what is exported, the whole weights, and why some are not in MXFP8."""
    torch._dynamo.reset()
    mxcompile.clear_reports()
    model = build()
    call, policy = way(model)
    call(IDS)
    exported = mxcompile.export_weights(model, policy=policy, args=(IDS,))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    steps = []
    for _ in range(2):
        parts = {name: (codes, scales) for name, codes, scales, _ in exported}
        whole = {name: plain(value) for name, value in model.state_dict().items()}
        reasons = {row.name: row.reason for row in exported.weights.weights if not row.stored}
        steps.append({"exported": parts, "whole": whole, "reasons": reasons})
        loss(call(IDS)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return steps


def plain(value: Any) -> Tensor:
    return value.full_tensor().detach().clone()


def launch(ways: list[Callable[..., Any]], ranks: int, folder: Path) -> list[dict[str, Any]]:
    return on_ranks(ranks, folder, results_of, run, ways)
