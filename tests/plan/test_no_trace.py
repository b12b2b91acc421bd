"""Planning and explaining run the user's forward in a child process: nothing of the program changes."""

from __future__ import annotations

import collections
import contextvars
import ctypes
import functools
import io
import itertools
import logging
import os
import random
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from helpers.eager_backend import EagerBackend
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
        x = self.first(x)
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


def state_after(backend: object, file: Path) -> tuple[object, ...]:
    """All that two calls under `backend` leave behind."""
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
    assert all(torch.isfinite(output).all() for output in outputs)
    return (
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
    assert state_after(EagerBackend(policy="nvidia"), tmp_path / "ours") == state_after(
        "eager", tmp_path / "plain"
    )
    names = {gemm.name for report in mxcompile.reports() for gemm in report.gemms}
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


class Keeper:
    """State that code reaches by a property, a descriptor, a weak key, and a class."""

    total = 0

    def __init__(self) -> None:
        self.reads = 0
        self.seen: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()

    @property
    def factor(self) -> int:
        self.reads += 1
        return 1

    @functools.cached_property
    def once(self) -> list[int]:
        return []


class State:
    """What the functions in `WRITES` write to. `read` returns it as plain values."""

    def __init__(self) -> None:
        self.keeper, self.local, self.queue = Keeper(), threading.local(), collections.deque(maxlen=5)
        self.variable = contextvars.ContextVar("calls", default=0)
        self.generator, self.numbers = torch.Generator().manual_seed(0), np.random.default_rng(0)
        self.stream, self.records = io.StringIO(), []
        self.closed_over = 0
        self.cached = functools.cache(lambda size: self.queue.append(size) or size)
        Keeper.total = 0

    def count(self) -> Callable[[], None]:
        calls = 0

        def write() -> None:
            nonlocal calls
            calls += 1
            self.closed_over = calls

        return write

    def read(self) -> tuple[Any, ...]:
        keeper = self.keeper
        return (
            (Keeper.total, keeper.reads, "once" in vars(keeper), len(keeper.seen), self.closed_over),
            (getattr(self.local, "calls", 0), self.variable.get(), list(self.queue)),
            (torch.rand(1, generator=self.generator).item(), self.numbers.random()),
            (self.stream.getvalue(), self.records, self.cached.cache_info().misses),
        )


WRITES: dict[str, Callable[[State, Tensor], object]] = {
    "property": lambda state, x: state.keeper.factor,
    "cached property": lambda state, x: state.keeper.once.append(1),
    "class attribute": lambda state, x: setattr(Keeper, "total", Keeper.total + 1),
    "weak dictionary": lambda state, x: state.keeper.seen.update({state.keeper: 1}),
    "thread": lambda state, x: setattr(state.local, "calls", getattr(state.local, "calls", 0) + 1),
    "context variable": lambda state, x: state.variable.set(state.variable.get() + 1),
    "deque": lambda state, x: state.queue.append(x.shape[0]),
    "generator of torch": lambda state, x: torch.rand(1, generator=state.generator),
    "generator of numpy": lambda state, x: state.numbers.random(),
    "stream": lambda state, x: state.stream.write("called\n"),
    "tensors": lambda state, x: state.records.append(type(x).__name__),
    "cached function": lambda state, x: state.cached(x.shape[1]),
}
"""By name, what a forward does between its layers, in code that Dynamo does not compile."""


class Writing(nn.Module):
    def __init__(self, writes: Callable[[], object]) -> None:
        super().__init__()
        self.first, self.second, self.writes = nn.Linear(64, 64), nn.Linear(64, 64), writes

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        self.writes(x)
        return self.second(x)


def state_of_writes(backend: object, names: Iterable[str]) -> tuple[Any, ...]:
    """What three calls of a model leave behind that does all of `WRITES` called `names`."""
    torch._dynamo.reset()
    state = State()
    count = state.count()

    @torch.compiler.disable
    def writes(x: Tensor) -> None:
        count()
        for name in names:
            WRITES[name](state, x)

    run = torch.compile(Writing(writes), backend=backend)
    for rows in (32, 32, 8):
        run(torch.ones(rows, 64)).sum().backward()
    return state.read()


@pytest.mark.slow
def test_planning_leaves_every_kind_of_state_as_a_plain_backend_does():
    before = State().read()
    plain, planned = (state_of_writes(backend, WRITES) for backend in ("eager", EagerBackend(policy="ocp")))
    assert planned == plain
    assert all(written != fresh for written, fresh in zip(plain, before, strict=True)), "calls write to it"
    assert {gemm.name for report in mxcompile.reports() for gemm in report.gemms} == {"first", "second"}


def exits() -> None:
    sys.exit(3)


def crashes() -> None:
    ctypes.string_at(0)


def recurses() -> None:
    recurses()


def hangs() -> None:
    time.sleep(3600)


@pytest.mark.parametrize("end", [exits, crashes, recurses, hangs])
def test_a_plan_that_ends_its_process_does_not_end_the_compile(monkeypatch, caplog, end):
    monkeypatch.setattr(isolated, "_IDLE_S", 2)
    parent = os.getpid()

    class Ending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 64)

        def forward(self, x: Tensor) -> Tensor:
            x = self.first(x)
            in_child(end)
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
        return fork(hangs if is_locked else function, sink, tools=tools)

    monkeypatch.setattr(isolated, "_fork", fork_after_a_lock)
    assert isolated.isolated(lambda: 7) == 7
