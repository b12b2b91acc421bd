"""Meshes of a number of ranks side by side: which are looked at, which fit, which is the fastest."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

import meshed
import pytest

import mxcompile
from mxcompile.cli import main
from mxcompile.errors import OptionError
from mxcompile.lowering.targets import TARGETS
from mxcompile.mesh import Memory, RankReport
from mxcompile.mesh.links import Links
from mxcompile.mesh.sweep import MeshCandidate, MeshPoint, MeshSweep, candidates
from mxcompile.mesh.time import RankWork, StepTime
from mxcompile.offline.estimate import Work
from mxcompile.report import Report

LINKS = Links.parse("nvlink=900,net=50")


def meshes(*args: Any) -> list[tuple[str, str | None]]:
    return [(candidate.mesh, candidate.parallel) for candidate in candidates(*args)]


def test_plain_models_take_every_split_of_a_node():
    assert meshes(8, "fsdp,tp=llama") == [
        ("dp=8", "fsdp"),
        ("dp=4,tp=2", "fsdp,tp=llama"),
        ("dp=2,tp=4", "fsdp,tp=llama"),
        ("tp=8", "tp=llama"),
    ]


def test_large_ones_copy_weights_too():
    assert meshes(128, "fsdp") == [("dp=128", "fsdp"), ("dp_replicate=4,dp_shard=32", "fsdp")]


def test_experts_are_spread_over_some_of_the_ranks():
    assert meshes(8, "fsdp,ep") == [
        ("dp=8", "fsdp"),
        ("dp=4,ep=2", "fsdp,ep"),
        ("dp=2,ep=4", "fsdp,ep"),
        ("dp=1,ep=8", "fsdp,ep"),
    ]
    assert {candidate.tp for candidate in candidates(256, "fsdp,ep")} == {1}


def test_factories_take_dp_and_tp():
    assert meshes(12, None, 4) == [("dp=12,tp=1", None), ("dp=6,tp=2", None), ("dp=3,tp=4", None)]


def point(mesh: str, *, ms: float, gigabytes: float, tp: int = 1) -> MeshPoint:
    """A mesh whose step takes so long by its memory traffic."""
    works = {"forward": Counter({("rest", Work(num_bytes=ms * 1e-3 * 8e12 * 0.78)): 1})}
    work = RankWork(policy="preset bf16", works=works, collectives=())
    rank = RankReport(
        mesh=mesh,
        ranks=8,
        report=Report.from_parts([], target="sm_100", policy="preset bf16"),
        memory=Memory(parameters=int(gigabytes * 1e9)),
        time=StepTime.from_works([work], LINKS, TARGETS["sm_100"]),
    )
    return MeshPoint(candidate=MeshCandidate(mesh=mesh, parallel="fsdp", tp=tp), rank=rank)


def test_sweep_lists_fastest_mesh_first_and_meshes_that_do_not_fit():
    swept = MeshSweep(
        points=(
            point("dp=8", ms=100, gigabytes=200),
            point("dp=4,tp=2", ms=90, gigabytes=100, tp=2),
            point("dp=2,tp=4", ms=20, gigabytes=50, tp=4),
            MeshPoint(
                candidate=MeshCandidate(mesh="tp=8", parallel="tp=llama", tp=8), reason="heads would be cut"
            ),
        ),
        ranks=8,
        tokens=8000,
        memory_gb=180,
    )
    assert [time.candidate.mesh for time in swept.fitting] == ["dp=2,tp=4", "dp=4,tp=2"]
    assert swept.fitting[0].speed(8000).centre == pytest.approx(8000 / 4 / 20e-3, rel=0.01)
    text = str(swept)
    assert "dp=8 does not fit: 186.3 GiB" in text
    assert "tp=8: heads would be cut" in text
    assert INDISTINGUISHABLE_LINE not in text


INDISTINGUISHABLE_LINE = "not distinguishable from the first"


def test_equal_ones_are_not_distinguishable():
    points = tuple(point(f"dp={size}", ms=50, gigabytes=1) for size in (8, 4))
    swept = MeshSweep(points=points, ranks=8, tokens=1, memory_gb=180)
    assert f"dp=4: {INDISTINGUISHABLE_LINE}" in str(swept)


def test_sweep_without_fitting_mesh_reports_it():
    swept = MeshSweep(points=(point("dp=8", ms=1, gigabytes=200),), ranks=8, tokens=1, memory_gb=180)
    assert "no mesh fits" in str(swept)


def test_a_picture_has_a_bar_for_each_mesh_that_fits(tmp_path: Path):
    points = tuple(point(f"dp={size}", ms=50, gigabytes=size) for size in (8, 400))
    MeshSweep(points=points, ranks=8, tokens=1, memory_gb=180).plot(tmp_path / "meshes.svg")
    drawn = (tmp_path / "meshes.svg").read_text()
    assert "dp=8" in drawn
    assert "dp=400" not in drawn
    assert "exposed communication" in drawn
    with pytest.raises(OptionError, match="no mesh fits"):
        MeshSweep(points=points[1:], ranks=8, tokens=1, memory_gb=180).plot(tmp_path / "none.svg")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"ranks": 1}, "needs 2 ranks or more"),
        ({"ranks": 8, "links": "ib=50"}, "unknown link"),
        ({"ranks": 8, "target": "cpu"}, "needs a target with a data sheet, found cpu; allowed: "),
    ],
)
def test_sweep_meshes_refuses_wrong_arguments(settings: dict[str, Any], words: str):
    model, args, _ = meshed.plain()
    with pytest.raises(OptionError, match=words):
        mxcompile.sweep_meshes(
            model, *args, **{"links": "nvlink=900", "target": "b200", "parallel": "fsdp", **settings}
        )


def test_mesh_command_with_rank_count_prints_all_meshes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.syspath_prepend(meshed.__file__.rpartition("/")[0])
    command = ["mesh", "meshed:plain", "2", "--target", "b200"]
    assert main([*command, "--parallel", "fsdp,tp=llama", "--links", "nvlink=900"]) == 0
    text = capsys.readouterr().out
    assert "meshes of 2 ranks, 32 tokens a call, 180 GB a GPU" in text
    assert {line.split()[0] for line in text.splitlines() if line[:2] in ("dp", "tp")} == {"dp=2", "tp=2"}
    assert main(command) != 0
    assert "give --links" in capsys.readouterr().err
