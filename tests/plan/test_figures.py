"""The figures of a report are those of the model, however many graphs compute it and modules share one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from test_nothing_compiled import POLICY, WIDTH, Block, Model, step
from torch import nn
from ways import front_door, report_of_all, whole


def model(blocks: int) -> nn.Module:
    return Model(blocks=nn.ModuleList(Block() for _ in range(blocks)), head=nn.Linear(WIDTH, WIDTH))


def figures(way: Any, blocks: int) -> Any:
    step(way(model(blocks), policy=POLICY))
    summary = report_of_all().summary
    forget()
    return summary


def test_blocks_that_share_code_count_each():
    by_block, at_once = figures(front_door, 4), figures(whole, 4)
    for key in ("num_gemms", "weight_bytes", "weight_bytes_bf16"):
        assert getattr(by_block, key) == getattr(at_once, key), key
    more = {blocks: figures(front_door, blocks) for blocks in (2, 3)} | {4: by_block}
    for key in ("saved_bytes", "saved_bytes_bf16", "casts", "weight_bytes"):
        steps = [getattr(more[n], key) - getattr(more[n - 1], key) for n in (3, 4)]
        assert steps[0] == steps[1] > 0, key


@pytest.mark.parametrize("way", [front_door, whole], ids=lambda way: way.__name__)
def test_a_call_without_gradients_adds_nothing_to_a_step(way: Any):
    call = way(model(3), policy=POLICY)
    step(call)
    before = report_of_all()
    with torch.no_grad():
        call(torch.ones(4, WIDTH))
    after = report_of_all()
    assert sorted((g.name, g.gemm) for g in after.gemms) == sorted((g.name, g.gemm) for g in before.gemms)
    for key in ("num_gemms", "saved_bytes", "casts", "weight_bytes", "weight_bytes_bf16", "wire_bytes"):
        assert getattr(after.summary, key) == getattr(before.summary, key), key


def test_prefill_and_decode_are_a_call_each():
    call = torch.compile(model(3), backend=EagerBackend(policy=POLICY), dynamic=False)
    with torch.no_grad():
        call(torch.ones(4, WIDTH))
        before = report_of_all().summary
        call(torch.ones(1, WIDTH))
    after = report_of_all().summary
    assert (after.graphs, after.casts, after.weight_bytes) == (2, before.casts, before.weight_bytes)
