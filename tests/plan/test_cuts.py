"""One model, however it is cut: every layer has the role, decision, formats and name that `explain` gives."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from cuts import (
    FAMILIES,
    broken,
    build,
    by_block,
    by_block_in_place,
    compiled_rows,
    explained,
    front_door,
    policy_by_index,
    rows,
    step,
    whole,
)
from reference import sqnr_db
from torch._dynamo.exc import BackendCompilerFailed

import mxcompile

CUTS = 3
WAYS = {"whole": whole, "by block": by_block, "by block in place": by_block_in_place}


@pytest.mark.parametrize("way", ["by block", "by block in place"])
def test_blocks_compiled_alone_follow_a_policy_by_index(way: str):
    case = build("llama")
    policy = policy_by_index(case)
    expected = {row for row in rows(explained(case, policy).gemms) if row[0] != "lm_head"}
    step(case, WAYS[way](case, policy=policy))
    assert compiled_rows() == expected


def test_equal_blocks_share_one_code_and_different_ones_do_not():
    case = build("llama", layers=6)
    policy = policy_by_index(case)
    compiled: list[str] = []

    def count(graph: Any) -> None:
        compiled.append(str(len(graph.nodes)))

    run = by_block(case, policy=policy, before=count)
    step(case, run)
    graphs = len(compiled)
    step(case, run)
    assert len(compiled) == graphs, "a second step compiles nothing"
    assert graphs == 3  # one for every kind of block


def cut_at_random(case: Any, rng: random.Random) -> set[str]:
    """Paths of modules to break graphs in front of: some of all that hold layers, below the model."""
    inner = [
        name for name, module in case.model.named_modules() if name and any(True for _ in module.parameters())
    ]
    return set(rng.sample(inner, rng.randint(1, 3)))


def test_the_front_door_compiles_all_of_it_and_each_kind_once():
    case = build("llama", layers=6)
    policy = policy_by_index(case)
    expected = rows(explained(case, policy).gemms)
    compiled: list[Any] = []
    run = front_door(case, policy=policy, before=compiled.append)
    found, _ = step(case, run)
    assert compiled_rows() == expected
    assert len(compiled) == 4  # three kinds of block, the head
    step(case, run)
    assert len(compiled) == 4
    with_head, _ = step(other := build("llama", layers=6), whole(other, policy=policy))
    assert torch.allclose(found, with_head, rtol=1e-6)


def test_more_kinds_than_dynamo_keeps_codes():
    case = build("llama", layers=10)
    kinds = [{"match": {"name": f"model.layers.{i}.*", "min_n": 8 + i}, "use": "mxfp8"} for i in range(10)]
    policy = {"version": 1, "preset": "nvidia", "rules": kinds}
    eight = torch._dynamo.config.patch(recompile_limit=8)  # another test may have raised it
    with eight, pytest.raises(BackendCompilerFailed, match=r"mxcompile\.compile"):
        step(case, by_block(case, policy=policy))
    torch._dynamo.reset()
    limit = torch._dynamo.config.recompile_limit
    try:
        run = front_door(case, policy=policy)
        step(case, run)
        assert compiled_rows() == rows(explained(case, policy).gemms)
    finally:
        torch._dynamo.config.recompile_limit = limit


STRICT = {
    "a rule that fits nothing": ({"name": "model.layers.9.*"}, "rule 1 matched no layer"),
    "a name misspelt": ({"name": "lm_heed"}, "did you mean 'lm_head'"),
}


@pytest.mark.parametrize("name", STRICT)
@pytest.mark.parametrize("way", [by_block, front_door, whole], ids=lambda way: way.__name__)
def test_strict_holds_before_the_first_step(name: str, way: Any):
    match, said = STRICT[name]
    case = build("llama", layers=3)
    run = way(case, policy={"version": 1, "rules": [{"match": match, "use": "bf16"}]}, strict=True)
    with broken(case.model, {"model.layers.1"}), pytest.raises(BackendCompilerFailed, match=said):
        step(case, run)
    assert mxcompile.reports() == []


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_graph_breaks_change_nothing(family: str):
    rng = random.Random(family)
    case = build(family)
    policy = policy_by_index(case)
    expected = rows(explained(case, policy).gemms)
    loss, gradients = step(case, whole(case, policy=policy))
    assert compiled_rows() == expected
    for _ in range(CUTS):
        torch._dynamo.reset()
        mxcompile.clear_reports()
        cut, paths = build(family), cut_at_random(case, rng)
        with broken(cut.model, paths):
            found, grads = step(cut, whole(cut, policy=policy))
        assert compiled_rows() == expected, paths
        assert torch.allclose(found, loss, rtol=1e-6), paths
        worst = min(sqnr_db(gradients[name], grads[name]) for name in gradients)
        assert worst > 90, paths  # graphs of their own add up the gradients of a residual in another order
