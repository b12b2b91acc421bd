"""Ranks that find caches warm: a second launch compiles nothing and says what the first one said."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import ranks
from helpers.ranks import on_ranks
from torch import nn
from ways import Call, policy

import mxcompile

RANKS = 2


def by_block(model: nn.Module) -> Call:
    """FSDP2's blocks by the front door: three kinds, and the head."""
    decided = policy(model)
    return mxcompile.compile(ranks.shard(model), policy=decided)


def trained(way: Callable[[nn.Module], Call]) -> dict[str, Any]:
    """Losses and reports of this rank, and what Dynamo and the caches counted."""
    from torch._dynamo.utils import counters

    os.environ["TORCHINDUCTOR_CACHE_DIR"] = str(Path.cwd() / "cache")
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    model = ranks.build()
    losses = ranks.train(model, way(model))
    aot, inductor = counters["aot_autograd"], counters["inductor"]
    return {
        "losses": losses,
        "reports": [report.to_json() for report in mxcompile.reports()],
        "graphs": counters["stats"]["unique_graphs"],
        "recompiles": dict(counters["recompiles"]),
        "hits": aot["autograd_cache_hit"],  # ranks share a folder: in a cold one they meet in Inductor's
        "misses": aot["autograd_cache_miss"],
        "generated": inductor["fxgraph_cache_miss"],
    }


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
    cold, warm = (on_ranks(RANKS, tmp_path, trained, way) for _ in range(2))
    for first, second in zip(cold, warm, strict=True):
        assert first["graphs"] == first["hits"] + first["misses"] > 1
        assert (second["hits"], second["misses"], second["generated"]) == (first["graphs"], 0, 0)
        assert second["graphs"] == first["graphs"]
        assert first["recompiles"] == second["recompiles"]
        assert second["losses"] == first["losses"]
        assert lasting(second["reports"]) == lasting(first["reports"])
    assert lasting(warm[0]["reports"]) == lasting(warm[1]["reports"])
    assert warm[0]["losses"] == warm[1]["losses"]
