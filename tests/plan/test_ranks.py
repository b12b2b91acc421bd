"""Distributed, on two Gloo ranks: every layer as `explain` has it, losses as in one process.

Both ranks see the same batch, so what data parallelism averages is what one process computes.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from cuts import blocks_of, build, compiled_rows, explained, front_door, policy_by_index, rows, step, whole
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

pytestmark = pytest.mark.slow

RANKS, STEPS = 2, 2


def ddp(case: Any, compiled: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Several buckets."""
    dist._DEFAULT_FIRST_BUCKET_BYTES = 20_000
    wrapped = DistributedDataParallel(case.model, bucket_cap_mb=0.05)
    return compiled(dataclasses.replace(case, model=wrapped), **options)


def fsdp2(case: Any, compiled: Callable[..., Any], by_block: bool = True, **sharding: Any) -> Any:
    from torch.distributed.fsdp import fully_shard

    for block in blocks_of(case.model).values() if by_block else ():
        fully_shard(block, **sharding)
    fully_shard(case.model, **sharding)
    return case


def run_ddp(case: Any, policy: Any) -> Callable[..., Any]:
    return ddp(case, whole, policy=policy)


def run_fsdp2(case: Any, policy: Any) -> Callable[..., Any]:
    return whole(fsdp2(case, whole), policy=policy)


def run_fsdp2_front_door_before(case: Any, policy: Any) -> Callable[..., Any]:
    front_door(case, policy=policy)
    return fsdp2(case, whole).model


def run_fsdp2_front_door_after(case: Any, policy: Any) -> Callable[..., Any]:
    return front_door(fsdp2(case, whole, reshard_after_forward=False), policy=policy)


def run_ddp_front_door(case: Any, policy: Any) -> Callable[..., Any]:
    return ddp(case, front_door, policy=policy)


def run_tensor_parallel(case: Any, policy: Any) -> Callable[..., Any]:
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    split, joined = ColwiseParallel(), RowwiseParallel()
    names = {f"self_attn.{name}_proj": split for name in "qkv"} | {"self_attn.o_proj": joined}
    names |= {"mlp.gate_proj": split, "mlp.up_proj": split, "mlp.down_proj": joined}
    for block in blocks_of(case.model).values():
        parallelize_module(block, init_device_mesh("cpu", (RANKS,)), names)
    return front_door(case, policy=policy)


EXACT = [run_ddp, run_ddp_front_door, run_fsdp2, run_fsdp2_front_door_before, run_fsdp2_front_door_after]


def worker(rank: int, way: Callable[..., Any], policy: Any, folder: str) -> None:
    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache{rank}"
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        case = build("llama")
        losses = train(case, way(case, policy))
        torch.save((losses, compiled_rows()), f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def train(case: Any, run: Callable[..., Any]) -> list[float]:
    optimizer = torch.optim.SGD(case.model.parameters(), lr=0.1)
    losses = []
    for _ in range(STEPS):
        loss, _ = step(case, run)
        losses.append(loss.item())
        optimizer.step()
    return losses


@pytest.mark.parametrize("way", [*EXACT, run_tensor_parallel], ids=lambda way: way.__name__)
def test_as_in_one_process(way: Callable[..., Any], tmp_path: Path):
    case = build("llama")
    policy = policy_by_index(case)
    expected = rows(explained(case, policy).gemms)
    losses = train(case, whole(case, policy=policy))
    torch.multiprocessing.spawn(worker, (way, policy, str(tmp_path)), nprocs=RANKS)
    for rank in range(RANKS):
        found, compiled = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        assert compiled == expected
        close = 1e-5 if way in EXACT else 1e-2  # a shard has blocks of its own
        assert found == pytest.approx(losses, rel=close)
