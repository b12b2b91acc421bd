"""Stages of a pipeline: how blocks are split, what a rank holds and sends, and how long it waits."""

from __future__ import annotations

import json
from typing import Any

import meshed
import pytest
from torch import nn

import mxcompile
from mxcompile.errors import ModelError, OptionError
from mxcompile.mesh import RankReport
from mxcompile.mesh.schedule import split

DEPTH = 6
MODEL, ARGS, _ = meshed.plain(DEPTH)
SETTINGS = {"target": "b200", "links": "nvlink=900,net=50", "policy": "bf16", "parallel": "fsdp"}


def explained(mesh: str, **settings: Any) -> RankReport:
    return mxcompile.explain_rank(MODEL, *ARGS, mesh=mesh, **SETTINGS, **settings)


@pytest.fixture(scope="module")
def staged() -> RankReport:
    return explained("pp=2,dp=8", microbatches=4)


@pytest.fixture(scope="module")
def whole() -> RankReport:
    return explained("dp=8")


def test_ends_count_as_a_block():
    assert split(126, 16) == (7, *[8] * 14, 7)
    assert split(6, 2) == (3, 3)
    with pytest.raises(OptionError, match="needs at least a block for each"):
        split(4, 4)


def parts(rank: RankReport) -> dict[str, float]:
    assert rank.time is not None
    return rank.time.works[0].parts(rank.time.links, rank.time.rates)


def test_pipeline_stages_compute_the_work_of_the_whole_model(staged: RankReport, whole: RankReport):
    """A step has 4 micro-batches of what a step without stages computes; a stage has one of them."""
    assert staged.pipeline is not None
    assert staged.time is not None
    waits, once = staged.time.works[0].waits, whole.time.works[0]
    assert waits is not None
    for phase in ("forward", "backward"):
        us = sum(stage.pass_us(phase, staged.time.links, staged.time.rates) for stage in waits.stages)
        assert us == pytest.approx(once.pass_us(phase, whole.time.links, whole.time.rates), rel=0.02)
    assert staged.pipeline.slowest == 1
    assert parts(staged)["bubble"] > 0


def test_the_bubble_shrinks_with_more_micro_batches_and_with_more_stages(staged: RankReport):
    shares = []
    for settings in ({"microbatches": 16}, {"microbatches": 4, "schedule": "interleaved1f1b"}):
        values = parts(explained("pp=2,dp=8", **settings))
        shares.append(values["bubble"] / sum(values.values()))
    values = parts(staged)
    assert max(shares) < values["bubble"] / sum(values.values())


def test_stages_send_activations_and_gather_once(staged: RankReport):
    sent = [c for c in staged.collectives if c.kind == "send"]
    assert {(c.phase, c.axis, c.stride, c.dtype, c.num_bytes) for c in sent} == {
        ("backward", "pp", 8, "bfloat16", 2 * meshed.TOKENS * meshed.WIDTH)
    }
    assert len(sent) == 4
    gathers = [c.name for c in staged.collectives if c.kind == "all-gather"]
    assert sorted(gathers) == ["", "layers.3", "layers.4", "layers.5"]
    assert sorted(c.name for c in staged.collectives if c.kind == "reduce-scatter") == sorted(gathers)


def test_parameters_are_those_of_a_stage(staged: RankReport, whole: RankReport):
    ranks = staged.pipeline.ranks
    assert sum(rank.memory.parameters for rank in ranks) == whole.memory.parameters
    assert [rank.blocks for rank in ranks] == [3, 3]
    assert [rank.in_flight for rank in ranks] == [(2,), (1,)]
    kept = [rank.memory.saved for rank in ranks]
    assert kept[0] / 2 + kept[1] == pytest.approx(whole.memory.saved)
    assert staged.memory is ranks[staged.pipeline.largest].memory


def test_the_report_has_the_pipeline(staged: RankReport):
    text = str(staged)
    assert "pipeline of 2 ranks, 1F1B, micro-batches 4; inputs are one micro-batch" in text
    assert "bubble" in text
    data = json.loads(staged.to_json())["pipeline"]
    assert (data["schedule"], data["microbatches"], len(data["ranks"])) == ("1F1B", 4, 2)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mesh": "dp=8", "microbatches": 4}, "`microbatches` needs a pipeline"),
        ({"mesh": "pp=2,dp=8", "schedule": "zb"}, "unknown schedule"),
        ({"mesh": "pp=8,dp=8"}, "needs at least a block for each"),
    ],
)
def test_pipeline_refuses_wrong_microbatches_and_stages(settings: dict[str, Any], words: str):
    with pytest.raises(OptionError, match=words):
        explained(**settings)


def test_a_model_without_one_stack_has_no_stages():
    with pytest.raises(ModelError, match="needs a model with one stack of blocks"):
        mxcompile.explain_rank(
            nn.Linear(32, 32), meshed.torch.zeros(32, 32), mesh="pp=2,dp=2", parallel="fsdp", target="b200"
        )
