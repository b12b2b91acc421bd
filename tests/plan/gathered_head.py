"""The ranks of `test_gathered_head`: a head whose result is gathered from all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import mxcompile

WIDTH, WORDS, TOKENS, RANKS = 8, 12, 4, 2


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)) for _ in range(2)
        )
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


def sharded(mesh: DeviceMesh, *, sequence: bool) -> Model:
    """The model with a head in columns; with `sequence` its tokens are split among the ranks."""
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    torch.manual_seed(0)
    model = Model()
    style = ColwiseParallel(input_layouts=Shard(1) if sequence else Replicate(), output_layouts=Replicate())
    parallelize_module(model, mesh, {"head": style})
    return model


def plain(model: nn.Module) -> nn.Module:
    return model


def front_door(model: nn.Module) -> nn.Module:
    return mxcompile.compile(model, policy="bf16")


def head_alone(model: nn.Module) -> nn.Module:
    model.head.compile(backend=mxcompile.Backend(policy="bf16"))
    return model


WAYS: dict[str, Callable[[nn.Module], nn.Module]] = {
    way.__name__: way for way in (plain, front_door, head_alone)
}


def gradients(way: str, sequence: bool) -> dict[str, Tensor]:
    """Output and gradients of a step in which every result counts another way."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch._dynamo.reset()
    model = sharded(mesh, sequence=sequence)
    call = WAYS[way](model)
    x = torch.randn(2, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1))
    if sequence:
        x = x.chunk(dist.get_world_size(), 1)[dist.get_rank()].clone()
    y = call(x)
    (y * torch.linspace(-1, 1, y.numel()).view_as(y)).sum().backward()
    gradients_by_name = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"output": y.detach(), **{name: local(grad) for name, grad in gradients_by_name.items()}}


def local(grad: Any) -> Tensor:
    return grad.to_local() if hasattr(grad, "to_local") else grad


def gradients_of_ways() -> dict[tuple[str, bool], dict[str, Tensor]]:
    return {(way, sequence): gradients(way, sequence) for way in WAYS for sequence in (False, True)}
