"""What `explain` says that a rank sends, held to what ranks send."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from mesh_ranks import Seen, seen_by_ranks
from meshed import TILES, frozen, fsdp, fsdp_sp, gathers, hsdp, sp, tower

import mxcompile
from mxcompile.mesh import RankReport

TRANSCODE = {"version": 1, "rules": [{"match": {"name": "*"}, "use": {"saved": "transcode"}}]}
TWO = [
    (fsdp, "dp=2", {}),
    (frozen, "dp=2", {}),
    (tower, "dp=2", {}),
    (sp, "tp=2", {}),
    (sp, "tp=2", {"policy": TRANSCODE}),
    (gathers, "dp=2", {"policy": TILES}),
]
FOUR = [(fsdp_sp, "dp=2,tp=2", {}), (hsdp, "copies=2,shards=2", {})]


def predicted(rank: RankReport) -> Seen:
    sent = [(c, c.num_bytes // getattr(torch, c.dtype).itemsize) for c in rank.collectives]
    elements = Counter(f"{c.kind} {numel}" for c, numel in sent)
    return dict(elements), dict(Counter(f"{c.kind} {c.dtype} {numel}" for c, numel in sent))


def check(cases: list[Any], ranks: int, folder: Path, *, by_block: bool) -> None:
    for case, every_rank in zip(cases, seen_by_ranks(cases, ranks, folder, by_block=by_block), strict=True):
        factory, mesh, options = case
        rank = mxcompile.explain_rank(factory, mesh=mesh, target="cpu", **options)
        elements, typed = predicted(rank)
        assert elements
        for (seen_elements, seen_typed), state_bytes in every_rank:
            assert seen_elements == elements, factory.__name__
            assert seen_typed, factory.__name__
            assert seen_typed.items() <= typed.items(), factory.__name__
            assert state_bytes.items() <= asdict(rank.memory).items(), factory.__name__


@pytest.mark.slow
def test_traffic_of_two_ranks_matches_the_prediction(tmp_path: Path):
    check(TWO, 2, tmp_path, by_block=False)


@pytest.mark.slow
def test_traffic_of_four_ranks_matches_the_prediction(tmp_path: Path):
    check(FOUR, 4, tmp_path, by_block=True)
