"""Train under FSDP2 on two ranks of this machine: one plan for all blocks, one report for all ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from tiny import Model, batch
from torch.distributed.fsdp import fully_shard

import mxcompile

RANKS = 2


def train(rank: int, folder: str) -> None:
    """Trains three steps as `rank`; rank 0 prints the merged report."""
    torch.set_num_threads(1)
    store = dist.FileStore(str(Path(folder, "store")), RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    torch.manual_seed(0)
    model = Model()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    compiled = mxcompile.compile(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    torch.manual_seed(rank)
    for _ in range(3):
        compiled(batch()).backward()
        optimizer.step()
        optimizer.zero_grad()
    report = mxcompile.gather_reports()[-1]  # a collective
    if rank == 0:
        print(report)
        assert {gemm.precision for gemm in report.gemms if gemm.role == "ffn_in"} == {"mxfp8"}
    dist.destroy_process_group()


def main() -> None:
    """Starts the ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(train, (folder,), nprocs=RANKS)


if __name__ == "__main__":
    main()
