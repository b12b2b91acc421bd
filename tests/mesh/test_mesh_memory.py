"""What `explain` says that a rank holds, held to PyTorch's tracker and to the allocations of real ranks."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import memory_ranks
import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from memory_ranks import Case, Shape, measured_on_a_fake_rank, peaks_of_ranks
from torch import nn
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker

import mxcompile
from mxcompile.mesh import Memory, liveness
from mxcompile.ranks.shape import MeshShape, fake_ranks

ACTIVATIONS, WEIGHTS = Shape(batch=4, length=128, depth=4), Shape(batch=1, length=32, depth=6)
FROZEN = Shape(batch=1, length=32, depth=6, frozen=4)


def estimated(factory: Any, mesh: str = "dp=2", policy: str = "bf16") -> Memory:
    rank = mxcompile.explain_rank(factory, mesh=mesh, target="b200", policy=policy)
    assert str(rank).count("this rank holds at most") == 1
    return rank.memory


class Tracker(FSDPMemTracker):
    """One that looks into compiled code."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True


def tracked(shape: Shape) -> int:
    """The peak of a step that PyTorch's tracker sees, on one of two fake ranks; code is not fused."""
    with fake_ranks(MeshShape.parse("dp=2")) as mesh:
        model, args, _ = shape.fsdp(mesh)
        memory_ranks.compile_(model, EagerBackend(policy="bf16"))
        optimizer = torch.optim.AdamW(model.parameters(), foreach=False)
        for _ in range(2):
            memory_ranks.step(model, args, optimizer)
        tracker = Tracker(model, optimizer)
        with tracker:
            memory_ranks.step(model, args, optimizer)
        (peak,) = (sizes["Total"] for device, sizes in tracker.get_tracker_snapshot("peak").items())
        return int(peak)


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # the results of eager code are views
@pytest.mark.parametrize("shape", [ACTIVATIONS, WEIGHTS, FROZEN])
def test_the_peak_is_that_of_the_tracker(shape: Shape, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(liveness, "unwritten", lambda _: set())
    assert estimated(shape.fsdp).total == pytest.approx(tracked(shape), rel=0.1)


@pytest.mark.slow
@pytest.mark.parametrize("case", [(ACTIVATIONS.fsdp, "dp=2", "nvidia"), (WEIGHTS.fsdp, "dp=2", "bf16")])
def test_the_peak_is_that_of_generated_code(case: Case, tmp_path: Path):
    """On one of two fake ranks. Without MX products decoded operands come on top, but not between phases."""
    kept, peak = measured_on_a_fake_rank(case, tmp_path / "trace.json")
    check(case, kept, peak)


@pytest.mark.slow
def test_the_peak_is_that_of_two_ranks(tmp_path: Path):
    """Of the rank that holds less; both keep what Gloo's threads have not let go of yet, a tenth at times."""
    case = (ACTIVATIONS.sp, "tp=2", "bf16")
    check(case, *map(min, zip(*peaks_of_ranks(case, tmp_path), strict=True)), rel=0.15)


class Graph(Made, fc=(64, 64)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sparse.mm(self.edges, self.fc(x))


def test_sparse_buffer_counts_with_its_indices():
    model = Graph(edges=nn.Buffer(torch.eye(32).to_sparse()))
    x = torch.randn(32, 64)
    rank = mxcompile.explain_rank(model, x, mesh="dp=2", parallel="fsdp", policy="bf16", target="cpu")
    assert rank.memory.parameters == (64 * 64 + 64) * 4 // 2 + 32 * (2 * 8 + 4)


def check(case: Case, kept: int, peak: int, rel: float = 0.1) -> None:
    memory = estimated(*case)
    assert memory.parameters + memory.optimizer + memory.loss.total == pytest.approx(kept, rel=rel)
    if case[2] == "bf16":
        assert memory.total == pytest.approx(peak, rel=rel)
