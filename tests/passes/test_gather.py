"""Sequence parallelism on two Gloo ranks: casts in front of the gather against casts after it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from eager_backend import EagerBackend
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional as F

import mxcompile
from mxcompile.passes.gather import Gather

pytestmark = pytest.mark.slow

RANKS, WIDTH, HIDDEN, TOKENS = 2, 96, 128, 40
WAYS = {  # what is said of saved, whether weights train
    "transcode": ("transcode", True),
    "columnwise": ("columnwise", True),
    "frozen": ("columnwise", False),
}


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.mlp = MLP()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mlp(x)


def sharded() -> nn.Module:
    torch.manual_seed(0)
    model = Model().bfloat16()
    tokens = Shard(1)
    plan = {
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(tokens,)),
        "mlp.norm": SequenceParallel(),
        "mlp.gate": ColwiseParallel(input_layouts=tokens),
        "mlp.up": ColwiseParallel(input_layouts=tokens),
        "mlp.down": RowwiseParallel(output_layouts=tokens),
    }
    return parallelize_module(model, init_device_mesh("cpu", (RANKS,)), plan)


def step(saved: str, train: bool, rank: int) -> dict[str, Any]:
    """Result, gradients and the bytes a rank puts into each gather of forward."""
    torch._dynamo.reset()
    model = sharded()
    for linear in (model.mlp.gate, model.mlp.up, model.mlp.down):
        linear.requires_grad_(train)
    rule = {"match": {"name": "*"}, "use": {"precision": "mxfp8", "saved": saved}}
    backend = EagerBackend(policy={"version": 1, "rules": [rule]})
    generator = torch.Generator().manual_seed(rank)
    x = torch.randn(2, TOKENS, WIDTH, generator=generator).bfloat16().requires_grad_()
    y = torch.compile(model, backend=backend, fullgraph=True)(x)
    y.float().square().sum().backward()
    sent = []
    for node in backend.graphs[0].graph.nodes:
        if node.target is torch.ops._c10d_functional.all_gather_into_tensor.default:
            value = node.args[0].meta["val"]
            sent.append(value.numel() * value.element_size())
    (report,) = mxcompile.reports()
    gradients = {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}
    given = [node for graph in backend.graphs for node in graph.graph.nodes if "_c10d_" in str(node.target)]
    total = sum(node.args[0].meta["val"].nbytes for node in given if "wait" not in str(node.target))
    assert report.summary.wire_bytes == total
    mxcompile.clear_reports()
    return {"y": y.detach(), "x": x.grad, **gradients, "sent": sent, "wire": report.summary}


def worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=RANKS)
    try:
        found = {way: step(*how, rank) for way, how in WAYS.items()}
        Gather.apply = lambda self, graph: None  # type: ignore[method-assign]
        found |= {f"{way} after": step(*how, rank) for way, how in WAYS.items()}
        torch.save(found, f"{folder}/{rank}.pt")
    finally:
        dist.destroy_process_group()


def test_mx_bytes_travel_and_nothing_else_changes(tmp_path: Path):
    torch.multiprocessing.spawn(worker, (str(tmp_path),), nprocs=RANKS)
    for rank in range(RANKS):
        found = torch.load(tmp_path / f"{rank}.pt", weights_only=False)
        for way in WAYS:
            before, after = found[way], found[f"{way} after"]
            assert before.keys() == after.keys()
            numbers = [key for key in before if key not in ("sent", "wire")]
            assert all(torch.equal(before[key], after[key]) for key in numbers), way
            assert before["wire"].wire_bytes_bf16 == after["wire"].wire_bytes == after["wire"].wire_bytes_bf16
            assert after["sent"] == [2 * TOKENS * WIDTH * 2]
            if way == "columnwise":  # wgrad casts the source along tokens
                assert before["sent"] == after["sent"]
            else:
                assert sum(before["sent"]) <= 0.53 * sum(after["sent"])
