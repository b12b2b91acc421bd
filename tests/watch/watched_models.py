"""A small model with two products a block, and runs of it with and without a watch."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.made import Made
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from mxcompile.watch import read

WIDTH, FFN = 40, 72
LAYERS = {f"blocks.{i}.{name}" for i in range(2) for name in ("up", "down")}
OPERANDS = {(gemm, operand) for gemm, both in (("fprop", "xw"), ("dgrad", "dw"), ("wgrad", "dx"))
            for operand in (letter.replace("d", "dy") for letter in both)}  # fmt: skip


class Block(Made, norm=lambda: nn.LayerNorm(WIDTH), up=(WIDTH, FFN), down=(FFN, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Model(nn.Module):
    """checkpointed: None, or whether checkpoints of blocks are reentrant."""

    def __init__(self, checkpointed: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.checkpointed = checkpointed

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if self.checkpointed is None:
                x = block(x)
            else:
                x = checkpoint(block, x, use_reentrant=self.checkpointed)
        return x


def fully_sharded(model: Any) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    for block in model.blocks.children():
        fully_shard(block)
    return fully_shard(model)


def tensor_parallel(model: Any) -> nn.Module:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks.children():
        parallelize_module(block, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return model


def batch(index: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(index)).to(dtype)


def direction(dtype: torch.dtype = torch.float32) -> Tensor:
    """The gradient of the loss in the model's output."""
    return torch.randn(24, WIDTH, generator=torch.Generator().manual_seed(99)).to(dtype)


def train(
    compiled: Callable[[Tensor], Tensor],
    model: nn.Module,
    steps: int = 3,
    micro: int = 1,
    dtype: torch.dtype = torch.float32,
    rate: float = 0.1,
) -> list[Tensor]:
    optimizer, results = torch.optim.SGD(model.parameters(), lr=rate), []
    for step in range(steps):
        for part in range(micro):
            loss = (compiled(batch(step * micro + part, dtype).requires_grad_()) * direction(dtype)).sum()
            loss.backward()
            results.append(loss.detach())
        results += [parameter.grad.clone() for parameter in model.parameters()]
        optimizer.step()
        optimizer.zero_grad()
    return results


def samples(path: Path) -> dict[int, dict[tuple[str, str, str], dict[str, Any]]]:
    """The rows of the file at `path`, by step, and by layer, GEMM and operand."""
    return {record["step"]: rows(record) for record in read(path) if record["kind"] == "sample"}


def rows(record: dict[str, Any]) -> dict[tuple[str, str, str], dict[str, Any]]:
    return {(row["layer"], row["gemm"], row["operand"]): row for row in record["rows"]}


def keys(layers: set[str] = LAYERS) -> Iterator[tuple[str, str, str]]:
    return ((layer, gemm, operand) for layer in layers for gemm, operand in OPERANDS)
