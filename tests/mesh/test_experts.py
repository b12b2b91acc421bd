"""Experts on several ranks: what `explain` says that they exchange, held to what ranks exchange."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from expert_ranks import NUMBER, TOKENS, TOP_K, layer, run_on

import mxcompile
from mxcompile.mesh import RankReport


def experts_use(**use: str) -> dict[str, Any]:
    match = {"role": ["expert_in", "expert_out"]}
    return {"version": 1, "rules": [{"match": match, "use": {"precision": "mxfp8", **use}}]}


POLICIES = {"as usual": experts_use(), "sent": experts_use(sent="mxfp8")}


@pytest.fixture(autouse=True)
def splits_in_graphs():
    with torch._dynamo.config.patch(capture_scalar_outputs=True):
        yield


def explained(ranks: int, policy: Any) -> RankReport:
    return mxcompile.explain_rank(layer, mesh=f"ep={ranks}", policy=policy, target="b200", links="nvlink=900")


def test_the_exchange_of_a_factory_is_among_its_collectives():
    rank = explained(4, POLICIES["sent"])
    rows, width = TOKENS * TOP_K, 64
    exchanges = [
        (c.phase, c.dtype, c.num_bytes, c.without_bytes, c.axis, c.ranks)
        for c in rank.collectives
        if c.kind == "all-to-all"
    ]
    whole = rows * width * 2
    assert exchanges == [
        ("forward", "int64", 8 * NUMBER, 8 * NUMBER, "ep", 4),
        ("forward", "uint8", whole * 33 // 64, whole, "ep", 4),
        ("forward", "bfloat16", whole, whole, "ep", 4),
        ("backward", "uint8", whole * 33 // 64, whole, "ep", 4),
        ("backward", "bfloat16", whole, whole, "ep", 4),
    ]
    sizes = {(g.name, g.m, g.n, g.k, g.precision) for g in rank.report.gemms if g.gemm == "fprop"}
    assert ("moe.experts.gate", rows, 96, width, "mxfp8") in sizes
    assert rank.time is not None
    works = rank.time.works[0], rank.time.works[-1]
    mine, plain = (work.parts(rank.time.links, rank.time.rates) for work in works)
    assert 0 < mine["exposed, activations"] < plain["exposed, activations"]
    assert any("other ranks send the same values as this rank" in w for w in rank.report.summary.warnings)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4])
def test_bytes_exchanged_by_ranks_match_the_prediction(ranks: int, tmp_path: Path):
    """All together; what one rank gives back depends on the choices of others."""
    results = run_on(ranks, tmp_path, POLICIES)
    for name, policy in POLICIES.items():
        predicted: Counter[str] = Counter()
        for collective in explained(ranks, policy).collectives:
            predicted[collective.dtype] += ranks * collective.num_bytes
        assert sum((Counter(sent[name]) for sent, _ in results), Counter[str]()) == predicted, name
    for _, pairs in results:
        for spread, plain in pairs:
            torch.testing.assert_close(spread, plain, rtol=1e-4, atol=1e-5)
