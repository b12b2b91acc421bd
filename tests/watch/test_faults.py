"""Faults that are put into a run are found and named: on one rank, and on many, in one file."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from faulty_models import FAULTS, FAULTY, Block, Model, trained
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.ranks import on_ranks
from torch import Tensor, nn
from watched_models import WIDTH, batch, direction, fully_sharded, tensor_parallel

from mxcompile.watch import Watch, read

STEPS = 3
RATES = {"stuck": 0.1}
"""Of learning, by fault: others would spread."""


def compiled(model: nn.Module, watch: Watch) -> nn.Module:
    blocks = model.blocks
    backend = EagerBackend(root=model, parts=tuple(f"blocks.{name}" for name in blocks), watch=watch)
    for block in blocks.values():
        block.compile(backend=backend)
    return model


def reported_places(path: Path) -> set[tuple[str, str, str]]:
    """What rules have told in the file at `path`."""
    records = [record for record in read(path) if record["kind"] == "rule"]
    assert len({(record["step"], record["message"]) for record in records}) == len(records)
    return {(record["layer"], record["gemm"], record["operand"]) for record in records}


@pytest.mark.parametrize("fault", FAULTS)
def test_watch_names_the_fault_on_one_rank(fault: str, tmp_path: Path):
    model, path = Model(), tmp_path / "run.jsonl"
    FAULTS[fault].inject(model.blocks[str(FAULTY)])
    watch = Watch(path, every=1, rules=[FAULTS[fault].rule], nonfinite="warn" if fault == "inf" else None)
    compiled(model, watch)
    optimizer = torch.optim.SGD(trained(model, fault), lr=RATES.get(fault, 0.0))
    for step in range(STEPS):
        (model(batch(step).requires_grad_()) * direction()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert reported_places(path) == FAULTS[fault].places
    first = [record for record in read(path) if record["kind"] == "nonfinite"][:1]
    places = [(record["step"], record["layer"], record["operand"]) for record in first]
    assert places == ([(0, f"blocks.{FAULTY}.up", "w")] if fault == "inf" else [])


def test_an_inf_in_one_expert(tmp_path: Path):
    """Of a mixture whose experts are modules, the expert is named."""

    class Mixture(Made, gate=(WIDTH, 3), experts=lambda: nn.ModuleList(Block() for _ in range(3))):
        def forward(self, x: Tensor) -> Tensor:
            shares = self.gate(x).softmax(-1)
            results = [expert(x) for expert in self.experts]
            return sum(shares[:, i : i + 1] * result for i, result in enumerate(results))

    model, records = Mixture(), []
    FAULTS["inf"].inject(model.experts[2])
    watch = Watch(records.append, every=None, nonfinite="warn")
    model = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    model(batch(0).requires_grad_()).sum().backward()
    watch.close()
    ((layer, operand),) = [(record["layer"], record["operand"]) for record in records]
    assert (layer, operand) == ("experts.2.up", "w")


def pipeline(model: Model) -> Model:
    """A block for each rank."""
    rank = dist.get_rank()
    model.blocks = nn.ModuleDict({name: block for name, block in model.blocks.items() if int(name) == rank})
    return model


def step_of(model: nn.Module, wrap: Any, step: int) -> None:
    rank, last = dist.get_rank(), dist.get_world_size() - 1
    if wrap is not pipeline:
        shard = step * dist.get_world_size() + (rank if wrap is fully_sharded else 0)
        (model(batch(shard).requires_grad_()) * direction()).sum().backward()
        return
    x = batch(step).requires_grad_()  # by hand: the schedules of torch change the batch
    if rank > 0:
        dist.recv(x.data, rank - 1)
    y, gradient = model(x), direction()
    if rank < last:
        dist.send(y.detach(), rank + 1)
        dist.recv(gradient, rank + 1)
    y.backward(gradient)
    if rank > 0:
        dist.send(x.grad, rank - 1)


def train(wrap: Callable[[Model], Model], fault: str) -> None:
    torch.manual_seed(0)
    model = Model(dist.get_world_size() if wrap is pipeline else 2)
    FAULTS[fault].inject(model.blocks[str(FAULTY)])
    nonfinite = "warn" if fault == "inf" else None
    watch = Watch("run.jsonl", every=1, rules=[FAULTS[fault].rule], nonfinite=nonfinite)
    model = compiled(wrap(model), watch)
    optimizer = torch.optim.SGD(trained(model, fault), lr=RATES.get(fault, 0.0))
    for step in range(STEPS):
        step_of(model, wrap, step)
        optimizer.step()
        optimizer.zero_grad()
    dist.barrier()
    watch.close()
    dist.barrier()


WRAPS = {"fsdp2": fully_sharded, "tp": tensor_parallel, "pp": pipeline}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("wrap", "ranks"), [("fsdp2", 2), ("fsdp2", 4), ("tp", 2), ("tp", 4), ("pp", 2), ("pp", 4)], ids=str
)
@pytest.mark.parametrize("fault", FAULTS)
def test_watch_names_the_fault_on_many_ranks(wrap: str, fault: str, ranks: int, tmp_path: Path):
    on_ranks(ranks, tmp_path, train, WRAPS[wrap], fault, apart=True)
    path = tmp_path / "run.jsonl"
    assert reported_places(path) == FAULTS[fault].places
    assert {record["ranks"] for record in read(path) if record["kind"] == "sample"} == {ranks}
    records = [record for record in read(path) if record["kind"] == "nonfinite" and record["step"] == 0]
    if fault == "inf":
        assert {record["rank"] for record in records} >= ({1} if wrap == "pp" else {0})
        assert {(record["layer"], record["operand"]) for record in records} >= {(f"blocks.{FAULTY}.up", "w")}
