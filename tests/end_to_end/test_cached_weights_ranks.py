"""`weights: cached` on one Gloo rank and on two: FSDP2, which frees and refills weights, and DDP."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.eager_backend import EagerBackend
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

from mxcompile.lowering.cpu.copies import COPIES

pytestmark = pytest.mark.slow

WIDTH, HIDDEN, BLOCKS, MICRO_BATCHES, STEPS = 64, 96, 2, 3, 2
CASTS = 3 * 2 * BLOCKS
"""Of three weights in each block, in two layouts."""


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(MLP() for _ in range(BLOCKS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def train(way: str, word: str, rank: int) -> dict[str, Any]:
    """Losses, gradients and weights of some steps, and how often weights were cast in each."""
    from torch.distributed.fsdp import fully_shard

    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = Model().bfloat16()
    if way == "ddp":
        model = DistributedDataParallel(model)
    else:
        for layer in model.layers:
            fully_shard(layer, reshard_after_forward=way == "fsdp2")
        fully_shard(model, reshard_after_forward=way == "fsdp2")
    policy = {
        "version": 1,
        "rules": [{"match": {"name": "*"}, "use": {"precision": "mxfp8", "weights": word}}],
    }
    compiled = torch.compile(model, backend=EagerBackend(policy=policy))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    generator = torch.Generator().manual_seed(rank)
    found: dict[str, Any] = {"seen": [], "casts": []}
    for _ in range(STEPS):
        optimizer.zero_grad()
        before = COPIES.casts
        for _ in range(MICRO_BATCHES):
            loss = compiled(torch.randn(2, 20, WIDTH, generator=generator).bfloat16()).float().square().mean()
            loss.backward()
            found["seen"].append(loss.detach())
        found["casts"].append(COPIES.casts - before)
        found["seen"] += [_local(p.grad) for p in model.parameters()]
        optimizer.step()
        found["seen"] += [_local(p).clone() for p in model.parameters()]
    return found


def _local(value: Any) -> Tensor:
    return (value.to_local() if hasattr(value, "to_local") else value).detach()


def worker(rank: int, ranks: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=ranks)
    try:
        ways = [(way, word) for way in ("fsdp2", "fsdp2 whole", "ddp") for word in ("cast", "cached")]
        torch.save({how: train(*how, rank) for how in ways}, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_same_on_ranks(ranks: int, tmp_path: Path):
    torch.multiprocessing.spawn(worker, (ranks, str(tmp_path)), nprocs=ranks)
    for rank in range(ranks):
        found = torch.load(tmp_path / f"{rank}.pt")
        for way in ("fsdp2", "fsdp2 whole", "ddp"):
            cast, cached = found[way, "cast"], found[way, "cached"]
            assert len(cast["seen"]) == len(cached["seen"])
            assert all(torch.equal(a, b) for a, b in zip(cast["seen"], cached["seen"], strict=True)), way
            assert cast["casts"] == [0] * STEPS
            assert cached["casts"] == [CASTS] * STEPS, way
