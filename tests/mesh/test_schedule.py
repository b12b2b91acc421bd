"""Schedules of pipelines, held to those of `torch.distributed.pipelining`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.pipelining import schedules as torchs

from mxcompile.errors import OptionError
from mxcompile.mesh.schedule import GPIPE, INTERLEAVED, ONE_F_ONE_B, SCHEDULES, Schedule


def order_of_torch(schedule: Schedule) -> dict[int, list[Any]]:
    """What PyTorch's class runs on each rank, made without ranks."""
    kind = torchs.get_schedule_class(schedule.name)
    schedule_of_torch: Any = SimpleNamespace(
        _num_stages=schedule.stages,
        _n_microbatches=schedule.microbatches,
        pp_group_size=schedule.ranks,
        n_local_stages=schedule.stages // schedule.ranks,
        microbatches_per_round=schedule.microbatches // max(1, schedule.microbatches // schedule.ranks),
    )
    if schedule.name == INTERLEAVED:
        return {
            rank: kind._calculate_single_rank_operations(schedule_of_torch, rank)
            for rank in range(schedule.ranks)
        }
    order = kind._get_pipeline_order(schedule_of_torch)
    if schedule.name == ONE_F_ONE_B:  # PyTorch counts the last rank's forwards from 1
        last = order[schedule.ranks - 1]
        last[:] = [
            action._replace(microbatch_index=action.microbatch_index - 1) if is_forward(action) else action
            for action in last
        ]
    return order


def is_forward(action: Any) -> bool:
    return action is not None and action.computation_type == torchs.FORWARD


CASES = [(name, ranks, batches) for name in SCHEDULES for ranks, batches in ((2, 4), (4, 8), (4, 16), (8, 8))]


@pytest.mark.parametrize(("name", "ranks", "microbatches"), CASES)
def test_orders_are_those_of_torch(name: str, ranks: int, microbatches: int):
    schedule = Schedule.parse(name, ranks, microbatches)
    for rank, actions in order_of_torch(schedule).items():
        kinds = {"F": torchs.FORWARD, "B": torchs.FULL_BACKWARD}
        expected = [
            (action.computation_type, action.stage_index, action.microbatch_index)
            for action in actions
            if action is not None and action.computation_type in kinds.values()
        ]
        assert [(kinds[kind], *rest) for kind, *rest in schedule.order(rank)] == expected


@pytest.mark.parametrize(("name", "groups"), [(GPIPE, 1), (ONE_F_ONE_B, 1), (INTERLEAVED, 2)])
def test_equal_stages_of_torchs_orders_have_the_known_bubble(name: str, groups: int):
    schedule = Schedule.parse(name, 4, 16)
    us, busy = schedule.run([1.0] * schedule.stages, [2.0] * schedule.stages)
    assert 1 - busy[0] / us == pytest.approx(3 / (groups * 16 + 3))


def test_schedule_counts_micro_batches_in_flight():
    assert Schedule.parse("gpipe", 4, 16).in_flight(0) == {0: 16}
    assert [Schedule.parse("1f1b", 4, 16).in_flight(rank) for rank in range(4)] == [
        {0: 4},
        {1: 3},
        {2: 2},
        {3: 1},
    ]
    assert sum(Schedule.parse("interleaved1f1b", 4, 16).in_flight(0).values()) == 11


def test_sending_delays_the_next_stage():
    assert Schedule.parse(None, 2, 1).run([1, 1], [2, 2], 0.5)[0] == 7.0


@pytest.mark.parametrize(
    ("name", "microbatches", "words"),
    [
        ("zb", 4, "unknown schedule"),
        ("1F1B", 0, "at least 1"),
        ("Interleaved1F1B", 9, "must be a multiple of"),
    ],
)
def test_schedule_refuses_unknown_names_and_microbatches(name: str, microbatches: int, words: str):
    with pytest.raises(OptionError, match=words):
        Schedule.parse(name, 4, microbatches)
