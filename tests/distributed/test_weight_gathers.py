"""FSDP2 on Gloo ranks: weights cast before they are gathered, against the same casts after it."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import weight_ranks as ranks

pytestmark = pytest.mark.slow

TWO = [ranks.accumulated, ranks.checkpointed, ranks.whole_fp32]
FOUR = [ranks.loaded, ranks.two_dimensions, ranks.hybrid]
ALL = {"head.weight"} | {f"blocks.0.{name}.weight" for name in ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.launch(TWO, 2, tmp_path_factory.mktemp("two"))


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return ranks.launch(FOUR, 4, tmp_path_factory.mktemp("four"))


def check(rank_results: list[dict[str, Any]], name: str, stay: set[str]) -> None:
    for rank in rank_results:
        assert not isinstance(rank[name], str), rank[name]
        before, after = rank[name]
        assert before["losses"] == after["losses"]
        assert before["losses"][0] != before["losses"][1]
        for entry in ("gradients", "state"):
            assert before[entry].keys() == after[entry].keys()
            assert all(torch.equal(before[entry][key], value) for key, value in after[entry].items())
        assert len(before["gradients"]) >= 12
        assert before["types"] == before["moments"] == {"Tensor"}  # others can read what is saved
        assert (set(before["stays"]), set(before["travels"])) == (stay, ALL - stay)
        sent(before["sent"], after["sent"], all_of_them=not stay - {"head.weight"})
        reported(before, after, name)


def reported(before: dict[str, Any], after: dict[str, Any], name: str) -> None:
    """The report says what FSDP2 gathers for a forward and its backward, with and without MXFP8.

    Of compiled graphs, which are those of blocks: the embedding and the head are gathered apart.
    """
    pairs = [pair for pair in zip(before["last"], after["last"], strict=True) if pair[0] != pair[1]]
    ours, theirs = before["summary"], after["summary"]
    gathered = [sum(sizes) // (1 + (name == "accumulated")) for sizes in zip(*pairs, strict=True)]
    others = ours.wire_bytes - gathered[0]  # of tensor parallelism, in the graphs
    assert others == theirs.wire_bytes - gathered[1]
    assert (others > 0) == (name == "two_dimensions")
    assert theirs.wire_bytes == theirs.wire_bytes_bf16 == ours.wire_bytes_bf16
    sent = [re.search(r"^sent by each rank: .*$", way["report"], re.MULTILINE) for way in (before, after)]
    assert [reason is not None and "without mxcompile" in reason[0] for reason in sent] == [True, False]


def sent(before: list[tuple[str, int]], after: list[tuple[str, int]], all_of_them: bool) -> None:
    """Collectives that carry codes take at most 0.53 of BF16's bytes, if all large weights are among them."""
    assert len(before) == len(after)
    carried = [(ours, theirs, kind) for (dtype, ours), (kind, theirs) in zip(before, after, strict=True)
               if dtype == "torch.uint8"]  # fmt: skip
    assert carried
    for ours, theirs, kind in carried:
        assert ours <= (0.53 if all_of_them else 0.7) * (theirs / 2 if kind == "torch.float32" else theirs)
    rest = [(x, y) for x, y in zip(before, after, strict=True) if x[0] != "torch.uint8"]
    assert all(x == y for x, y in rest)


@pytest.mark.parametrize("name", ["accumulated", "checkpointed"])
def test_before_the_gather_is_as_after_it(name: str, two: Any):
    check(two, name, {"head.weight"})


def test_one_group_of_fp32_masters(two: Any):
    """Tiles are cast from FP32; embedding and head travel in FP32 in the same collective."""
    for rank in two:
        assert not isinstance(rank["whole_fp32"], str), rank["whole_fp32"]
        before, after = rank["whole_fp32"]
        assert before["losses"] == after["losses"]
        assert all(torch.equal(before["gradients"][key], value) for key, value in after["gradients"].items())
        assert len(before["travels"]) == 7
        reported(before, after, "whole_fp32")
        assert all(
            ours < 0.35 * theirs for (_, ours), (_, theirs) in zip(before["sent"], after["sent"], strict=True)
        )


def test_four_ranks_from_meta_with_shards_that_cut_tiles(four: Any):
    check(four, "loaded", {"head.weight", "blocks.0.k.weight", "blocks.0.v.weight"})
    assert "16 of its 64 rows" in four[0]["loaded"][0]["stays"]["blocks.0.k.weight"]


def test_gathers_of_tensor_parallel_shards_are_quantized(four: Any):
    check(four, "two_dimensions", {"head.weight", "blocks.0.k.weight", "blocks.0.v.weight"})


def test_shards_in_groups_of_replicas(four: Any):
    """HSDP: shards of one of two groups; a checkpoint that DCP writes and reads."""
    check(four, "hybrid", {"head.weight"})
