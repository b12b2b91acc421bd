"""What runs on the ranks of `test_ranks`: one launch, one model, many ways to distribute it.

All ranks see the same batch, so that what data parallelism averages is what one process computes.
"""

from __future__ import annotations

import copy
import fcntl
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from families import LAYERS, WORDS, Attention, Block, Decoder, FeedForward, _rms
from helpers.fresh import forget
from helpers.ranks import on_ranks, results, results_of
from torch import Tensor, nn
from torch.distributed import checkpoint, pipelining
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FullyShardedDataParallel,
    MixedPrecisionPolicy,
    fully_shard,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from ways import Call, data_parallel, front_door, pending, policy, report_of_all, rows, stacks, whole

STEPS, TOKENS = 2, 8
Run = Callable[[Tensor], Tensor]


def build() -> nn.Module:
    """The same decoder everywhere; its heads can be shared out among ranks."""
    torch.manual_seed(0)

    def block(_: int) -> Block:
        return Block(_rms, Attention(causal=True), FeedForward(F.silu, gated=True))

    return Decoder(block, _rms, positions=False, tied=False)


def batch() -> Tensor:
    return torch.randint(0, WORDS, (4, TOKENS), generator=torch.Generator().manual_seed(1))


def loss_of(y: Tensor, _: Any = None) -> Tensor:
    return y.float().square().mean()


def train(model: nn.Module, run: Call) -> list[float]:
    """The losses of some steps; `run` calls the model or makes the whole step and returns its loss."""
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.05)
    losses = []
    for _ in range(STEPS):
        y = run(batch())
        loss = loss_of(y) if y.ndim else y
        if loss.requires_grad:
            loss.backward()
        losses.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def shard(model: nn.Module, by_block: bool = True, **how: Any) -> nn.Module:
    for block in stacks(model).values() if by_block else ():
        fully_shard(block, **how)
    return fully_shard(model, **how)


def ddp_buckets(model: nn.Module) -> Call:
    return data_parallel(model, policy=policy(model))


def ddp_front_door(model: nn.Module) -> Call:
    return front_door(DistributedDataParallel(model), policy=policy(model))


def fsdp2_whole(model: nn.Module) -> Call:
    return whole(shard(model, by_block=False), policy=policy(model))


def fsdp2_blocks(model: nn.Module) -> Call:
    return whole(shard(model), policy=policy(model))


def fsdp2_kept(model: nn.Module) -> Call:
    return front_door(shard(model, reshard_after_forward=False), policy=policy(model))


def fsdp2_before(model: nn.Module) -> Call:
    return shard(front_door(model, policy=policy(model)))


def fsdp2_offload(model: nn.Module) -> Call:
    return whole(shard(model, offload_policy=CPUOffloadPolicy(pin_memory=False)), policy=policy(model))


def fsdp2_mixed(model: nn.Module) -> Call:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return whole(shard(model, mp_policy=mixed), policy=policy(model))


def fsdp1(model: nn.Module) -> Call:
    decided, cpu, wrap = policy(model), torch.device("cpu"), ModuleWrapPolicy({Block})
    sharded = FullyShardedDataParallel(model, auto_wrap_policy=wrap, device_id=cpu, use_orig_params=True)
    return whole(sharded, policy=decided)


def parallelize(model: nn.Module, mesh: DeviceMesh, sequence: bool = False) -> nn.Module:
    """Tensor parallelism; with `sequence` the norms and residuals are split along the tokens."""
    parts: dict[str, Any] = {f"mixer.{name}": ColwiseParallel() for name in "qkv"}
    parts |= {"feed.gate": ColwiseParallel(), "feed.up": ColwiseParallel()}
    joined = {"output_layouts": Shard(1)} if sequence else {}
    parts |= {name: RowwiseParallel(**joined) for name in ("mixer.o", "feed.down")}
    if sequence:
        gathered = {"input_layouts": (Shard(1),), "desired_input_layouts": (Replicate(),)}
        parts |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        parts |= {"mixer": PrepareModuleInput(**gathered), "feed": PrepareModuleInput(**gathered)}
        ends = {
            "embed": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
        }
        parallelize_module(model, mesh, ends)
    for block in stacks(model).values():
        parallelize_module(block, mesh, parts)
    return model


def tensor_parallel(model: nn.Module) -> Call:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return front_door(parallelize(model, mesh), policy=policy(model))


def tensor_parallel_whole(model: nn.Module) -> Call:
    return whole(parallelize(model, init_device_mesh("cpu", (dist.get_world_size(),))), policy=policy(model))


def sequence_parallel(model: nn.Module) -> Call:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return whole(parallelize(model, mesh, sequence=True), policy=policy(model))


def two_dimensions(model: nn.Module) -> Call:
    """FSDP2 over one dimension of the mesh, tensor parallelism over the other."""
    mesh = init_device_mesh("cpu", (2, dist.get_world_size() // 2), mesh_dim_names=("data", "model"))
    return whole(shard(parallelize(model, mesh["model"]), mesh=mesh["data"]), policy=policy(model))


class Stage(nn.Module):
    """A pipeline stage as torchtitan makes one: the model, with what other ranks have taken out of it."""

    def __init__(self, model: Decoder, kept: range, first: bool, last: bool) -> None:
        super().__init__()
        self.embed = model.embed if first else None
        self.blocks = nn.ModuleDict({str(index): model.blocks[index] for index in kept})
        self.norm, self.head = (model.norm, model.head) if last else (None, None)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(self.norm(x))


def pipeline(model: nn.Module, schedule: str = "ScheduleGPipe") -> Call:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    kept = range(LAYERS)[:1] if rank == 0 else range(LAYERS)[1:]
    decided = policy(model)
    part = Stage(copy.deepcopy(model), kept, rank == 0, rank == ranks - 1)
    stage = pipelining.PipelineStage(whole(part, policy=decided), rank, ranks, torch.device("cpu"))
    plan = getattr(pipelining, schedule)(stage, n_microbatches=2, loss_fn=loss_of)
    optimizer = torch.optim.SGD(part.parameters(), lr=0.05)

    def run(ids: Tensor) -> Tensor:
        losses: list[Tensor] = []
        optimizer.zero_grad()
        if rank == 0:
            plan.step(ids)
        else:
            plan.step(target=ids, losses=losses)
        optimizer.step()
        return torch.stack(losses).mean().detach() if losses else torch.tensor(float("nan"))

    return run


def pipeline_interleaved(model: nn.Module) -> Call:
    return pipeline(model, "Schedule1F1B")


def checkpointed_run(model: nn.Module) -> Call:
    """Saved after the first step, loaded into a model that is compiled anew, which makes the second."""
    run, steps, folder = fsdp2_blocks(model), [0], "checkpoint"

    def call(ids: Tensor) -> Tensor:
        steps[0] += 1
        if steps[0] > 1:
            checkpoint.save({"model": get_model_state_dict(model)}, checkpoint_id=folder)
            for parameter in model.parameters():
                parameter.data.zero_()
            fresh = build()
            sharded = fsdp2_before(fresh)
            for parameter in fresh.parameters():
                parameter.data.zero_()
            state = {"model": get_model_state_dict(fresh)}
            checkpoint.load(state, checkpoint_id=folder)
            set_model_state_dict(fresh, state["model"])
            return sharded(ids)
        return run(ids)

    return call


def trained(way: Callable[[nn.Module], Call]) -> tuple[Any, ...]:
    """Losses and the report of a model that goes `way`."""
    forget()
    model = build()
    losses = train(model, way(model))
    report = report_of_all()
    return losses, rows(report), pending(report)


def launch_once(ways: list[Callable[[nn.Module], Call]], ranks: int, folder: Path) -> list[dict[str, Any]]:
    """What `launch` gives, of one launch for all processes that run these tests and share `folder`."""
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "done").exists():
            launch(ways, ranks, folder)
            (folder / "done").touch()
    return results(ranks, folder)


def launch(ways: list[Callable[[nn.Module], Call]], ranks: int, folder: Path) -> list[dict[str, Any]]:
    return on_ranks(ranks, folder, results_of, trained, ways)
