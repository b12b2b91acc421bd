"""Planning and explaining run the user's forward in a child process: nothing of the program changes."""

from __future__ import annotations

import ctypes
import itertools
import logging
import os
import random
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.reports import all_gemms
from torch import Tensor, nn

import mxcompile
from mxcompile.models import isolated

CALLS = {"forward": 0, "hook": 0}
NUMBERS = itertools.count()
SQUARES = (number * number for number in itertools.count())
VARIABLE = "MXCOMPILE_TEST_OF_PLANS"


class Net(nn.Module):
    """Writes to all that a forward can reach, at a graph break and beside it, and in hooks."""

    instances_called = 0

    def __init__(self, file: Path) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)
        self.file, self.shapes = file, []
        self.first.register_forward_hook(self.keep)
        self.second.register_forward_hook(torch.compiler.disable(self.keep))

    def keep(self, module: nn.Module, args: object, out: Tensor) -> None:
        CALLS["hook"] += 1
        self.shapes.append(type(out).__name__)

    def forward(self, x: Tensor) -> Tensor:
        CALLS["forward"] += 1
        x = self.first(x) / CALLS["forward"]
        write(self)
        return self.second(x)


@torch.compiler.disable
def write(model: Net, seen: list[int] = []) -> None:  # noqa: B006 - state that a call leaves behind
    Net.instances_called += 1
    seen.append(len(seen))
    next(NUMBERS)
    next(SQUARES)
    random.random()
    np.random.rand()
    torch.rand(1)
    os.environ[VARIABLE] = os.environ.get(VARIABLE, "") + "x"
    with model.file.open("a", encoding="utf-8") as file:
        file.write("called\n")


def state_after(backend: object, file: Path) -> tuple[list[Tensor], tuple[object, ...]]:
    """Returns the results of two calls under `backend`, and the state of the program after them."""
    torch._dynamo.reset()
    CALLS.update(forward=0, hook=0)
    Net.instances_called = 0
    os.environ.pop(VARIABLE, None)
    write.__wrapped__.__defaults__[0].clear()
    for seed in (random.seed, np.random.seed, torch.manual_seed):
        seed(0)
    before = next(NUMBERS), next(SQUARES)
    model = Net(file)
    compiled = torch.compile(model, backend=backend)
    with torch.no_grad():
        outputs = [compiled(torch.ones(32, 64)) for _ in range(2)]
    return outputs, (
        dict(CALLS),
        Net.instances_called,
        next(NUMBERS) - before[0],
        int(next(SQUARES) ** 0.5 - before[1] ** 0.5),
        (random.random(), np.random.rand(), torch.rand(1).item()),
        os.environ.pop(VARIABLE),
        file.read_text(encoding="utf-8"),
        model.shapes,
        list(write.__wrapped__.__defaults__[0]),
    )


def test_planning_leaves_the_state_of_a_program_as_a_plain_backend_does(tmp_path):
    outputs, state = state_after(EagerBackend(policy="bf16"), tmp_path / "ours")
    expected, plain = state_after("eager", tmp_path / "plain")
    assert state == plain
    torch.testing.assert_close(outputs, expected, rtol=0, atol=1e-5)
    assert not torch.allclose(*expected, atol=1e-2), "results depend on the number of calls"
    names = {gemm.name for gemm in all_gemms()}
    assert names == {"first", "second"}, "a plan was made, or the names of parts"


def test_explain_leaves_the_state_of_a_program_alone(tmp_path):
    file = tmp_path / "log"
    model, before = Net(file), (dict(CALLS), Net.instances_called, next(NUMBERS), torch.get_rng_state())
    report = mxcompile.explain(model, torch.ones(32, 64), training=False)
    assert {gemm.name for gemm in report.gemms} == {"first", "second"}
    assert (dict(CALLS), Net.instances_called) == before[:2]
    assert next(NUMBERS) == before[2] + 1
    assert torch.equal(torch.get_rng_state(), before[3])
    assert not file.exists()
    assert VARIABLE not in os.environ
    assert model.shapes == []


def recurses() -> None:
    recurses()


ENDS = {
    "exits": lambda: sys.exit(3),
    "crashes": lambda: ctypes.string_at(0),
    "recurses": recurses,
    "hangs": lambda: time.sleep(3600),
}


@pytest.mark.parametrize("end", ENDS)
def test_a_plan_that_ends_its_process_does_not_end_the_compile(monkeypatch, caplog, end):
    monkeypatch.setattr(isolated, "_IDLE_S", 2)
    parent = os.getpid()

    class Ending(Made, first=(64, 64), second=(64, 64)):
        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            in_child(ENDS[end])
            return self.second(x)

    @torch.compiler.disable
    def in_child(function):
        if os.getpid() != parent:
            function()

    model, x = Ending(), torch.randn(32, 64)
    with caplog.at_level(logging.WARNING, logger="mxcompile"), torch.no_grad():
        out = torch.compile(model, backend=EagerBackend(policy="bf16"))(x)
        assert torch.allclose(out, model(x), atol=1e-5)
    assert any("no plan" in record.getMessage() for record in caplog.records)


def test_a_child_that_hangs_once_is_started_again(monkeypatch, tmp_path):
    monkeypatch.setattr(isolated, "_IDLE_S", 2)
    locked = tmp_path / "locked"
    locked.touch()
    fork = isolated._fork

    def fork_after_a_lock(function, sink, *, tools):
        is_locked = locked.exists()
        locked.unlink(missing_ok=True)
        return fork(ENDS["hangs"] if is_locked else function, sink, tools=tools)

    monkeypatch.setattr(isolated, "_fork", fork_after_a_lock)
    assert isolated.isolated(lambda: 7) == 7
