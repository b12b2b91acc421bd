"""Sharded models on Gloo ranks: what is exported is what the forward multiplies, whole, on every rank."""

from __future__ import annotations

from typing import Any

import export_ranks as ranks
import pytest
import torch
from helpers.casts import quantize

pytestmark = pytest.mark.slow

BF16, FP32 = torch.bfloat16, torch.float32
BLOCK = {f"blocks.0.{layer}.weight" for layer in ("q", "k", "v", "o", "gate", "up", "down")}


@pytest.fixture(scope="module")
def exports(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    ways = [ranks.fsdp, ranks.tensor_parallel, ranks.gathered_in_mxfp8]
    return ranks.launch(ways, 4, tmp_path_factory.mktemp("four"))


def check(step: dict[str, Any], dtype: torch.dtype, squares: tuple[str, ...]) -> None:
    """Every weight is the cast of what the forward had of it, in `dtype`; the rest is as it was."""
    exported, whole = step["exported"], step["whole"]
    assert exported.keys() == whole.keys()
    for name, (codes, scales) in exported.items():
        if name not in BLOCK or name in step["reasons"]:
            assert scales is None
            assert torch.equal(codes, whole[name].to(dtype)), name
            continue
        rounding = "floor" if "down" in name else "rceil"
        square = any(word in name for word in squares)
        elements, blocks = quantize(whole[name].to(dtype), -1, torch.float8_e4m3fn, rounding, square)
        assert torch.equal(codes.view(torch.uint8), elements.view(torch.uint8)), name
        assert torch.equal(scales, blocks), name


@pytest.mark.parametrize(
    ("name", "dtype", "squares", "kept"),
    [
        ("fsdp", BF16, ("gate",), {}),
        ("tensor_parallel", FP32, ("gate",), {}),
        (
            "gathered_in_mxfp8",
            FP32,
            ("blocks",),
            {
                "blocks.0.k.weight": "4 shards of its dimension 0 (64) cut blocks of 32",
                "blocks.0.v.weight": "4 shards of its dimension 0 (64) cut blocks of 32",
                "blocks.0.gate.weight": (
                    "compressed-tensors has MXFP8 e4m3, MXINT8 int8, MXFP4 e2m1 and NVFP4 e2m1 only"
                ),
            },
        ),
    ],
)
def test_every_rank_exports_the_cast_of_the_whole_weight(name, dtype, squares, kept, exports):
    for rank in exports:
        assert not isinstance(rank[name], str), rank[name]
        for step in rank[name]:
            reasons = step["reasons"]
            assert {name: why for name, why in reasons.items() if "blocks" in name} == kept
            assert {"embed.weight", "head.weight"} <= reasons.keys()
            check(step, dtype, squares)
    codes = [step["exported"]["blocks.0.q.weight"][0].view(torch.uint8) for step in exports[0][name]]
    assert not torch.equal(*codes)
