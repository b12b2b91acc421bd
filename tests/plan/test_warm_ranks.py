"""Ranks that find caches warm: a second launch compiles nothing and says what the first one said."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import ranks
import torch
import torch.distributed as dist
from torch import nn
from ways import Call, policy

import mxcompile

RANKS = 2


def by_block(model: nn.Module) -> Call:
    """FSDP2's blocks by the front door: three kinds, and the head."""
    decided = policy(model)
    return mxcompile.compile(ranks.shard(model), policy=decided)


def worker(rank: int, way: Callable[[nn.Module], Call], folder: str) -> None:
    """Train on this rank; losses, reports and what Dynamo and the caches counted, as a file."""
    from torch._dynamo.utils import counters

    torch.set_num_threads(1)
    os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache"
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    store = dist.FileStore(f"{folder}/rendezvous{os.getppid()}", RANKS)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=RANKS, timeout=timedelta(seconds=120))
    try:
        model = ranks.build()
        losses = ranks.train(model, way(model))
        aot, inductor = counters["aot_autograd"], counters["inductor"]
        found = {
            "losses": losses,
            "reports": [report.to_json() for report in mxcompile.reports()],
            "graphs": counters["stats"]["unique_graphs"],
            "recompiles": dict(counters["recompiles"]),
            "hits": aot["autograd_cache_hit"],  # ranks share a folder: in a cold one they meet in Inductor's
            "misses": aot["autograd_cache_miss"],
            "generated": inductor["fxgraph_cache_miss"],
        }
        torch.save(found, Path(folder) / f"{rank}.pt")
    finally:
        dist.destroy_process_group()


def launch(way: Callable[[nn.Module], Call], folder: Path) -> list[dict[str, Any]]:
    (folder / f"rendezvous{os.getpid()}").unlink(missing_ok=True)
    torch.multiprocessing.spawn(worker, (way, str(folder)), nprocs=RANKS)
    return [torch.load(folder / f"{rank}.pt") for rank in range(RANKS)]


def lasting(texts: list[str]) -> list[mxcompile.Report]:
    """The reports, without what is of one launch only."""
    read = [mxcompile.Report.from_json(text) for text in texts]
    return [
        dataclasses.replace(r, summary=dataclasses.replace(r.summary, cache="", pass_time_us=0.0))
        for r in read
    ]


@pytest.mark.slow
@pytest.mark.parametrize("way", [by_block], ids=lambda way: way.__name__)
def test_a_second_launch_compiles_nothing_and_reports_the_same(
    way: Callable[[nn.Module], Call], tmp_path: Path
):
    cold, warm = launch(way, tmp_path), launch(way, tmp_path)
    for first, second in zip(cold, warm, strict=True):
        assert first["graphs"] == first["hits"] + first["misses"] > 1
        assert (second["hits"], second["misses"], second["generated"]) == (first["graphs"], 0, 0)
        assert second["graphs"] == first["graphs"]
        assert first["recompiles"] == second["recompiles"]
        assert second["losses"] == first["losses"]
        assert lasting(second["reports"]) == lasting(first["reports"])
    assert lasting(warm[0]["reports"]) == lasting(warm[1]["reports"])
    assert warm[0]["losses"] == warm[1]["losses"]
