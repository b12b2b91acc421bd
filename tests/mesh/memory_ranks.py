"""What runs on real ranks: steps of training, with every allocation that the profiler sees."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import meshed
import torch
import torch.distributed as dist
from helpers.ranks import on_ranks
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.profiler import ProfilerActivity, profile, record_function

from mxcompile.ranks.shape import MeshShape, fake_ranks

RANKS, STEPS = 2, 8
BACKWARD = "backward of the step"
Case = tuple[Callable[[DeviceMesh], meshed.Prepared], str, str]
"""A factory, its mesh in words, and a policy."""


def ends(norm: nn.Module, output: nn.Module, x: Tensor) -> Tensor:
    return output(norm(x))


class Tall(meshed.Llama):
    """A Llama whose norm and head are code of their own, which can be compiled."""

    tail = staticmethod(ends)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tok_embeddings(ids)
        for layer in self.layers:
            x = layer(x)
        return self.tail(self.norm, self.output, x)


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a step of training. frozen: number of blocks that do not train, nor does the embedding."""

    batch: int
    length: int
    depth: int
    frozen: int = 0

    def plain(self) -> meshed.Prepared:
        model = Tall(self.depth)
        if self.frozen:
            meshed.freeze_(model, self.frozen)
        return model, (torch.zeros(self.batch, self.length, dtype=torch.int64),), {}

    def fsdp(self, mesh: DeviceMesh) -> meshed.Prepared:
        example = self.plain()
        meshed.fully_shard_(example[0], mesh["dp"], mp_policy=meshed.MIXED)
        return example

    def sp(self, mesh: DeviceMesh) -> meshed.Prepared:
        example = self.plain()
        meshed.sequence_parallel_(example[0], mesh["tp"])
        return example


def compile_(model: Any, backend: Any, **settings: Any) -> None:
    """Compile the blocks, and what follows them, each by itself, as torchtitan does."""
    for block in model.layers:
        block.compile(backend=backend, **settings)
    model.tail = torch.compile(ends, backend=backend, **settings)


def step(model: nn.Module, args: Any, optimizer: torch.optim.Optimizer) -> None:
    loss = model(*args).square().mean()
    with record_function(BACKWARD):
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def allocated(trace: Path) -> tuple[int, int]:
    """Bytes that are allocated before backward begins, and at the peak of the step."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if "ts" in event]
    now = peak = kept = 0
    for event in sorted(events, key=lambda event: float(event["ts"])):
        if event["name"] == "[memory]":
            now = event["args"]["Total Allocated"]
            peak = max(peak, now)
        elif event["name"] == BACKWARD:
            kept = now
    return kept, peak


def measured(case: Case, mesh: DeviceMesh, trace: Path, steps: int = 1) -> tuple[int, int]:
    """Bytes that this rank holds before backward begins, and at the peak, after two steps of warming up.

    The least of so many `steps`: Gloo's threads let go of what they have sent a little later, by chance.
    """
    torch.manual_seed(0)
    factory, _, policy = case
    model, args, _ = factory(mesh)
    compile_(model, "mxfp8", options={"policy": policy})
    optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
    for _ in range(2):
        step(model, args, optimizer)
    sizes = []
    for _ in range(steps):
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
            step(model, args, optimizer)
        profiled.export_chrome_trace(str(trace))
        sizes.append(allocated(trace))
    states = [value for state in optimizer.state.values() for value in state.values() if value.ndim]
    before = sum(map(local_bytes, (*model.parameters(), *states)))
    kept, peak = map(min, zip(*sizes, strict=True))
    return before + kept, before + peak


def measured_on_a_fake_rank(case: Case, trace: Path) -> tuple[int, int]:
    """The same in this process, where nothing is sent and the network needs no buffers."""
    with fake_ranks(MeshShape.parse(case[1])) as mesh:
        return measured(case, mesh, trace)


def measured_here(case: Case) -> tuple[int, int]:
    shape = MeshShape.parse(case[1])
    mesh = init_device_mesh("cpu", shape.sizes, mesh_dim_names=shape.names)
    return measured(case, mesh, Path(f"trace{dist.get_rank()}.json"), STEPS)


def peaks_of_ranks(case: Case, folder: Path) -> list[tuple[int, int]]:
    """The bytes of `measured` on each of two ranks."""
    return on_ranks(RANKS, folder, measured_here, case, apart=True)


def local_bytes(tensor: Any) -> int:
    return int((tensor.to_local() if hasattr(tensor, "to_local") else tensor).nbytes)
