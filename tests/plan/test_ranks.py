"""Distributed, on Gloo ranks: every layer as `explain` has it, losses as in one process.

Context parallelism is not here: torch's ring attention knows the attention operators of GPUs alone (see
`test_context_parallelism_needs_a_gpu`).
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import ranks
from ways import Row, policy, report_of_all, rows, whole

import mxcompile

pytestmark = pytest.mark.slow

EXACT = [
    ranks.ddp_buckets, ranks.ddp_front_door, ranks.fsdp2_whole, ranks.fsdp2_blocks, ranks.fsdp2_kept,
    ranks.fsdp2_before, ranks.fsdp2_offload, ranks.fsdp1, ranks.checkpointed_run,
]  # fmt: skip
"""Every rank computes what one process does."""
SPLIT = [ranks.fsdp2_mixed, ranks.tensor_parallel, ranks.tensor_parallel_whole, ranks.sequence_parallel]
"""Other dtypes, or shards with blocks of their own."""
PIPELINES = [ranks.pipeline, ranks.pipeline_interleaved]


@pytest.fixture(scope="module")
def alone() -> tuple[list[float], set[Row]]:
    """Losses of one process, and what `explain` says."""
    model = ranks.build()
    decided = policy(model)
    explained = mxcompile.explain(model, ranks.batch(), policy=decided, target="cpu")
    losses = ranks.train(model, whole(model, policy=decided))
    assert rows(report_of_all()) == rows(explained)
    return losses, rows(explained)


@pytest.fixture(scope="module")
def two(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    folder = tmp_path_factory.getbasetemp()
    shared = folder.parent if "PYTEST_XDIST_WORKER" in os.environ else folder  # of all workers of a run
    return ranks.launch_once([*EXACT, *SPLIT, *PIPELINES], 2, shared / "two")


def result(results: dict[str, Any], name: str) -> Any:
    assert not isinstance(results[name], str), results[name]
    return results[name]


def check(results: list[dict[str, Any]], name: str, alone: Any, close: float) -> None:
    losses, expected = alone
    for rank in results:
        rank_losses, compiled, waiting = result(rank, name)
        assert compiled <= expected, sorted(compiled - expected)[:3]
        assert {row[0] for row in expected - compiled} == {row[0] for row in waiting}
        assert waiting <= expected
        assert {row[3] for row in waiting} <= {"bf16"}
        assert rank_losses == pytest.approx(losses, rel=close)


@pytest.mark.parametrize("name", [way.__name__ for way in EXACT])
def test_two_ranks_compute_the_step_of_one_process(name: str, two: Any, alone: Any):
    check(two, name, alone, 1e-5)


@pytest.mark.parametrize("name", [way.__name__ for way in SPLIT])
def test_shards_follow_the_whole(name: str, two: Any, alone: Any):
    check(two, name, alone, 1e-2)


@pytest.mark.parametrize("name", [way.__name__ for way in PIPELINES])
def test_stages_are_parts_of_one_model(name: str, two: Any, alone: Any):
    losses, expected = alone
    stages = [result(rank, name) for rank in two]
    assert stages[0][1] | stages[1][1] == expected
    assert not stages[0][1] & stages[1][1]
    assert stages[1][0] == pytest.approx(losses, rel=1e-2)


def test_a_mesh_of_two_dimensions(tmp_path: Path, alone: Any):
    check(ranks.launch([ranks.two_dimensions], 4, tmp_path), "two_dimensions", alone, 1e-2)


def test_context_parallelism_needs_a_gpu():
    """Why it is not tested here, for as long as torch's ring attention has no operator of the CPU."""
    from torch.distributed.tensor.experimental._context_parallel import _attention

    operators = {str(operator) for operator in _attention.custom_ops}
    assert "aten._scaled_dot_product_flash_attention.default" in operators
    assert not any("for_cpu" in operator or "math" in operator for operator in operators)
