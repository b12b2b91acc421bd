"""Files of samples: complete up to the last record, whatever ends a run; writers that fail do not end it."""

from __future__ import annotations

import contextlib
import itertools
import logging
import multiprocessing
import os
import random
import signal
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from watched_models import Model, batch, keys, samples

from mxcompile.watch import Watch, read
from mxcompile.watch.writers import SCHEMA, JsonLines, TensorBoard


def write_until_killed(path: Path, first: int, connection: Any) -> None:
    """Tells the number of each record when it is written."""
    write = JsonLines(path)
    for step in itertools.count(first):
        rows = [{"layer": "x" * 100}] * (step % 300)
        write({"schema": SCHEMA, "kind": "sample", "step": step, "rows": rows})
        connection.send(step)


def kill_again_and_again(
    context: Any, work: Callable[..., None], path: Path, pauses: Iterable[float]
) -> Iterator[list[int]]:
    """Yields the steps told so far after each kill, which follows the first step and a pause in seconds."""
    acknowledged: list[int] = []
    for pause in pauses:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=work, args=(path, max(acknowledged, default=-1000) + 1000, sender))
        process.start()
        sender.close()
        acknowledged.append(receiver.recv())
        time.sleep(pause)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        assert process.exitcode == -signal.SIGKILL
        with contextlib.suppress(EOFError, OSError):
            while True:
                acknowledged.append(receiver.recv())
        yield acknowledged


@pytest.mark.parametrize("kills", [2, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_writer_keeps_every_written_record(kills: int, tmp_path: Path):
    path, processes = tmp_path / "run.jsonl", multiprocessing.get_context("fork")
    pauses = [random.Random(kill).uniform(0.0, 0.05) for kill in range(kills)]
    for acknowledged in kill_again_and_again(processes, write_until_killed, path, pauses):
        steps = [record["step"] for record in read(path)]
        assert {*acknowledged} <= {*steps}
        assert steps == sorted({*steps})
        assert all(len(record["rows"]) == record["step"] % 300 for record in read(path))


KILLS = 4
"""Of a training process, which takes seconds to start."""


def train_until_killed(path: Path, first: int, connection: Any) -> None:
    """Tells the number of each step when its optimizer has stepped."""
    torch.set_num_threads(1)
    model = Model()
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=Watch(path, every=1, first=first)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for step in itertools.count(first):
        compiled(batch(step).requires_grad_()).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        connection.send(step)


@pytest.mark.slow
def test_training_that_is_killed_at_random(tmp_path: Path):
    path, processes = tmp_path / "run.jsonl", multiprocessing.get_context("spawn")
    pauses = [random.Random(kill).uniform(0.0, 0.3) for kill in range(KILLS)]
    for acknowledged in kill_again_and_again(processes, train_until_killed, path, pauses):
        written = samples(path)
        assert {*acknowledged} <= {*written}
        assert all({*rows} == {*keys()} for rows in written.values())


def test_a_cut_line_is_left_out_and_the_next_run_goes_on(tmp_path: Path):
    path = tmp_path / "run.jsonl"
    JsonLines(path)({"schema": SCHEMA, "kind": "run"})
    with path.open("a", encoding="utf-8") as file:
        file.write('{"schema": 1, "kind": "sam')
    assert [record["kind"] for record in read(path)] == ["run"]
    JsonLines(path)({"schema": SCHEMA, "kind": "sample", "step": 7})
    assert [record.get("step") for record in read(path)] == [None, 7]


def test_writer_creates_missing_folders(tmp_path: Path):
    path = tmp_path / "a" / "b" / "run.jsonl"
    JsonLines(path)({"schema": SCHEMA, "kind": "run"})
    assert path.is_file()


def test_each_failing_writer_gives_a_single_warning(caplog: pytest.LogCaptureFixture):
    def broken(record: object) -> None:
        raise RuntimeError("no space")

    model, records = Model(), []
    watch = Watch([broken, "/proc/nowhere/run.jsonl", "/dev/full", records.append], every=1)
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    with caplog.at_level(logging.WARNING, "mxcompile.watch"):
        for index in range(3):
            compiled(batch(index)).sum().backward()
            watch.step()
    assert [record.get("step") for record in records] == [None, 0, 1, 2]
    warnings = [record.message for record in caplog.records]
    assert sum("no space" in line and "sample" in line for line in warnings) == 1
    assert sum("/proc/nowhere" in line and "sample" in line for line in warnings) == 1
    assert sum("/dev/full" in line and "No space left" in line and "sample" in line for line in warnings) == 1
    assert all(line.endswith("training goes on") for line in warnings)


def test_tensorboard_writer_sends_only_numbers():
    class Board:
        def __init__(self) -> None:
            self.scalars: dict[tuple[str, int], float] = {}

        def add_scalar(self, tag: str, value: float, step: int) -> None:
            self.scalars[tag, step] = value

    board = Board()
    write = TensorBoard(board)
    row = {"layer": "a.up", "gemm": "fprop", "operand": "x", "role": "qkv", "format": "e4m3", "calls": 1}
    write({"kind": "run"})
    write({"kind": "sample", "step": 3, "rows": [row | {"elements": 4, "amax": 2.0, "changed": None}]})
    assert board.scalars == {("a.up/fprop/x/amax", 3): 2.0}
    assert "add_scalar" not in repr(Watch(board))
