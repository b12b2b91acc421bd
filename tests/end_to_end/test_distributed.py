"""DDP, FSDP2 and tensor parallelism on two Gloo ranks: one process's step, and the user's own names.

The ranks run in processes of their own (`two_ranks`), which hand back what they computed as a file.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.eager import NVIDIA, product, reference_linears
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.paces import mostly_slow
from helpers.ranks import on_ranks
from helpers.reference import sqnr_db
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel

import mxcompile

WIDTH, FFN, RANKS = 48, 80, 2
NAMES = {f"stack.{i}.{name}" for i in range(2) for name in ("gate", "up", "down")}


class SwiGLU(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = nn.Linear(WIDTH, FFN, bias=False), nn.Linear(WIDTH, FFN, bias=False)
        self.down = nn.Linear(FFN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        return x + self.down(F.silu(self.gate(y)) * self.up(y))


class Model(Made, stack=lambda: nn.ModuleList([SwiGLU(), SwiGLU()])):
    def forward(self, x: Tensor) -> Tensor:
        for inner in self.stack:
            x = inner(x)
        return x


def build() -> tuple[Model, Tensor]:
    """The same model and the batches of all ranks, in every process."""
    torch.manual_seed(0)
    return Model(), torch.randn(RANKS, 3, 11, WIDTH)


def step(run: Any, x: Tensor) -> Tensor:
    y = run(x)
    y.square().mean().backward()
    return y.detach()


def data_parallel(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    model, x = build()
    y = step(torch.compile(DistributedDataParallel(model), backend=EagerBackend()), x[rank])
    return y, {name: p.grad for name, p in model.named_parameters()}


def fully_sharded(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    from torch.distributed.fsdp import fully_shard

    model, x = build()
    for inner in model.stack:
        fully_shard(inner)
    fully_shard(model)
    y = step(torch.compile(model, backend=EagerBackend()), x[rank])
    return y, {name: p.grad.full_tensor() for name, p in model.named_parameters()}


def tensor_parallel(rank: int) -> tuple[Tensor, dict[str, Tensor]]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    model, x = build()
    plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
    for inner in model.stack:
        parallelize_module(inner, init_device_mesh("cpu", (RANKS,)), plan)
    y = step(torch.compile(model, backend=EagerBackend()), x[0])
    gradients = {name: p.grad for name, p in model.named_parameters()}
    return y, {k: g.full_tensor() if hasattr(g, "full_tensor") else g for k, g in gradients.items()}


def with_reports(run: Callable[[int], Any]) -> tuple[Tensor, dict[str, Tensor], list[mxcompile.Report]]:
    return (*run(dist.get_rank()), list(mxcompile.reports()))


def two_ranks(run: Callable[[int], Any], folder: Path) -> list[tuple[Tensor, dict[str, Tensor], list[Any]]]:
    """What `run` gives on each of two ranks, with the reports of each."""
    return on_ranks(RANKS, folder, with_reports, run, apart=True)


def reference(report: mxcompile.Report, batches: list[Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """One process: outputs of every batch and the mean of their gradients."""
    model, _ = build()
    with reference_linears(model, report):
        outputs = [step(model, x) for x in batches]
    return outputs, {name: p.grad / len(batches) for name, p in model.named_parameters()}


def gemms(reports: list[mxcompile.Report]) -> tuple[mxcompile.GemmRecord, ...]:
    return tuple(gemm for report in reports for gemm in report.gemms)


def merged(reports: list[mxcompile.Report]) -> mxcompile.Report:
    return mxcompile.Report(gemms=gemms(reports), summary=reports[0].summary)


@pytest.mark.parametrize(
    "run", mostly_slow([data_parallel, fully_sharded], fully_sharded), ids=lambda run: run.__name__
)
def test_data_parallel_step_has_outputs_and_mean_gradients_of_one_process(
    run: Callable[[int], Any], tmp_path: Path
):
    """Each rank's output is that of its own batch, the gradients are the mean over ranks."""
    ranks = two_ranks(run, tmp_path)
    _, x = build()
    outputs, gradients = reference(merged(ranks[0][2]), list(x))
    for (y, grads, reports), expected in zip(ranks, outputs, strict=True):
        assert {gemm.name for gemm in gemms(reports)} == NAMES
        assert {gemm.precision for gemm in gemms(reports)} == {"mxfp8"}
        assert sqnr_db(expected, y) > 90
        assert grads.keys() == gradients.keys()
        assert min(sqnr_db(gradients[name], grads[name]) for name in gradients) > 90


def shards(weight: Tensor, dim: int) -> list[Tensor]:
    return list(weight.chunk(RANKS, dim))


def sharded(model: Model, x: Tensor) -> Tensor:
    """What tensor parallelism computes: every rank's shard is a layer of its own, with blocks of its own."""

    def linear(y: Tensor, weight: Tensor) -> Tensor:
        return product(y.flatten(0, 1), weight.t(), NVIDIA, y.dtype).unflatten(0, y.shape[:2])

    for inner in model.stack:
        y = inner.norm(x)
        pairs = zip(shards(inner.gate.weight, 0), shards(inner.up.weight, 0), strict=True)
        hidden = [F.silu(linear(y, gate)) * linear(y, up) for gate, up in pairs]
        downs = zip(hidden, shards(inner.down.weight, 1), strict=True)
        x = x + sum(linear(part, down) for part, down in downs)
    return x


def test_tensor_parallel_step_quantizes_shards_under_whole_names(tmp_path: Path):
    """Each rank quantizes the shard it has; names are those of the whole layers."""
    ranks = two_ranks(tensor_parallel, tmp_path)
    model, x = build()
    expected = step(lambda batch: sharded(model, batch), x[0])
    gradients = {name: p.grad for name, p in model.named_parameters()}
    for y, grads, reports in ranks:
        assert {gemm.name for gemm in gemms(reports)} == NAMES
        assert {gemm.precision for gemm in gemms(reports)} == {"mxfp8"}
        widths = {gemm.n for gemm in gemms(reports) if gemm.gemm == "fprop" and gemm.role == "ffn_in"}
        assert widths == {FFN // RANKS}
        assert sqnr_db(expected, y) > 90
        assert min(sqnr_db(gradients[name], grads[name]) for name in gradients) > 90
