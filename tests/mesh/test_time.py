"""The time of a step of one rank: what waits, what is hidden, and what the report says of it."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import meshed
import pytest
from torch import nn

import mxcompile
from mxcompile.errors import OptionError
from mxcompile.lowering.targets import TARGETS
from mxcompile.mesh import Collective, RankReport
from mxcompile.mesh.links import Links
from mxcompile.mesh.time import RankWork, StepTime
from mxcompile.offline.estimate import Work

LINKS = Links.parse("nvlink=900,net=50")
MB = 10**6


def sent(
    kind: str, payload: str, name: str, phase: str, *, stride: int = 1, without: int = 64 * MB
) -> Collective:
    return Collective(
        kind=kind,
        what=payload,
        name=name,
        dtype="bfloat16",
        num_bytes=64 * MB,
        without_bytes=without,
        axis="dp",
        ranks=8,
        stride=stride,
        phase=phase,
    )


def step(*collectives: Collective, compute_gb: float = 0.0, **settings: Any) -> StepTime:
    """A step of so many bytes of device memory in each phase, and `collectives`."""
    works = {
        phase: Counter({("rest", Work(num_bytes=compute_gb * 1e9)): 1}) if compute_gb else Counter()
        for phase in ("forward", "backward")
    }
    work = RankWork(policy="preset nvidia", works=works, collectives=collectives, **settings)
    return StepTime.from_works([work], LINKS, TARGETS["sm_100"])


def parts(time: StepTime) -> dict[str, float]:
    return time.works[0].parts(time.links, time.rates)


def test_collectives_of_activations_are_never_hidden():
    collective = sent("all-reduce", "activations", "layers.0.mlp", "forward")
    busy, idle = (parts(step(collective, compute_gb=size)) for size in (100.0, 0.0))
    assert busy["exposed, activations"] == idle["exposed, activations"] > 0
    assert busy["exposed, activations"] == LINKS.us(collective, 64 * MB, step().rates)


def test_the_first_two_gathers_wait_and_others_hide():
    gathers = [sent("all-gather", "weights", f"layers.{i}", "forward") for i in range(6)]
    gather_us = LINKS.us(gathers[0], 64 * MB, step().rates)
    assert parts(step(*gathers))["exposed, FSDP forward"] == pytest.approx(6 * gather_us)
    hidden = step(*gathers, compute_gb=100.0)
    assert parts(hidden)["exposed, FSDP forward"] == pytest.approx(2 * gather_us)
    assert hidden.works[0].hidden_us(LINKS, hidden.rates) == pytest.approx(4 * gather_us)


def test_the_last_reductions_wait_and_gathers_of_backward_hide():
    names = [f"layers.{i}" for i in range(3)]
    gathers = [sent("all-gather", "weights", name, "backward") for name in names]
    reductions = [sent("reduce-scatter", "gradients", name, "backward") for name in names]
    rates = step().rates
    exposed = parts(step(*gathers, *reductions, compute_gb=100.0))["exposed, FSDP backward"]
    assert exposed == pytest.approx(2 * LINKS.us(reductions[0], 64 * MB, rates))


def test_gathers_between_nodes_hide_beside_activations_within_them():
    gathers = [sent("all-gather", "weights", f"layers.{i}", "forward", stride=8) for i in range(3)]
    near = sent("all-reduce", "activations", "layers.0", "forward")
    far = sent("all-reduce", "activations", "layers.0", "forward", stride=8)
    alone, beside, same = (
        parts(step(*gathers, *more))["exposed, FSDP forward"] for more in ((), (near,), (far,))
    )
    assert beside < alone == same
    assert alone - beside == pytest.approx(LINKS.us(near, 64 * MB, step().rates))


def test_without_mxcompile_its_bytes_travel():
    collective = sent("all-gather", "weights", "layers.0", "forward", without=128 * MB)
    assert step(collective, wire=False).us.centre > step(collective).us.centre


def test_equal_steps_are_not_distinguishable():
    collective = sent("all-reduce", "activations", "layers.0", "forward", stride=8)
    works = [RankWork(policy=name, works={}, collectives=(collective,)) for name in ("mine", "theirs")]
    time = StepTime.from_works(works, LINKS, TARGETS["sm_100"])
    assert "mine and theirs: not distinguishable" in str(time)
    assert time.over(*works).text(".2f") == "1.00 (1.00–1.00)"


def test_a_missing_link_is_an_error():
    work = RankWork(
        policy="", works={}, collectives=(sent("all-gather", "weights", "", "forward", stride=8),)
    )
    with pytest.raises(OptionError, match="give the speed of net"):
        StepTime.from_works([work], Links.parse("nvlink=900"), TARGETS["sm_100"])


@pytest.fixture(scope="module")
def rank() -> RankReport:
    return mxcompile.explain_rank(meshed.fsdp_sp, mesh="dp=64,tp=2", target="b200", links="nvlink=900,net=50")


def test_a_rank_has_a_step_beside_fp8_and_bf16(rank: RankReport):
    time = rank.time
    assert time is not None
    assert [work.policy for work in time.works] == ["preset nvidia", "preset fp8_tensor", "preset bf16"]
    for work in time.works:
        values = work.parts(time.links, time.rates)
        assert time.range(work).centre == pytest.approx(sum(values.values()))
        assert all(values[part] > 0 for part in ("product", "rest", "exposed, activations", "optimizer"))
    ours, fp8, plain = (work.parts(time.links, time.rates) for work in time.works)
    assert ours["cast"] > plain["cast"] == 0
    assert fp8["cast"] > 0


def test_bf16_policy_has_no_second_bf16_estimate():
    rank = mxcompile.explain_rank(
        meshed.fsdp_sp, mesh="dp=64,tp=2", target="b200", links="nvlink=900,net=50", policy="bf16"
    )
    assert rank.time is not None
    assert [work.policy for work in rank.time.works] == ["preset bf16"]


def test_the_report_has_the_time(rank: RankReport):
    text = str(rank)
    assert "time of a step on B200, links nvlink=900,net=50, nodes of 8: an estimate, not measured" in text
    data = json.loads(rank.to_json())["time"]
    assert data["links"] == {"nvlink": 900.0, "net": 50.0, "node": 8}
    assert data["steps"][-1]["ratio"]["centre"] == 1.0


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"mesh": "dp=8", "parallel": "fsdp", "links": "net=50", "target": "cpu"}, "`links` needs a target"),
        ({"mesh": "dp=8", "parallel": "fsdp", "node": 4}, "`node` needs the speeds of links"),
        ({"mesh": "dp=8", "parallel": "fsdp", "links": "ib=50", "target": "b200"}, "unknown link"),
    ],
)
def test_time_of_a_rank_refuses_wrong_arguments(settings: dict[str, Any], words: str):
    with pytest.raises(OptionError, match=words):
        mxcompile.explain_rank(nn.Linear(4, 4), **settings)
