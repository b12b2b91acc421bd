"""Sequence parallelism on two and four Gloo ranks: casts in front of the gather against casts after it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from gather_ranks import sends, with_and_without
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.one_linear import policy
from helpers.ranks import on_ranks
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
from torch.utils.checkpoint import checkpoint

import mxcompile

pytestmark = pytest.mark.slow

RANKS, WIDTH, HIDDEN, BATCH = 4, 96, 128, 2


@dataclass(frozen=True, kw_only=True)
class Way:
    """A way to train under sequence parallelism, and what becomes of what its last micro-batch gathers.

    ranks: that share the tokens. saved: what the policy says of it. train: whether weights train. converts:
    whether layers change the dtype of what they have gathered. lengths: tokens of a rank in each micro-batch;
    dynamic shapes if they differ. compiled: by Inductor. quantized, others: gathers of MX bytes, and of the
    dtype that the model has.
    """

    ranks: int = RANKS
    saved: str = "transcode"
    train: bool = True
    checkpointed: bool = False
    autocast: bool = False
    converts: bool = False
    lengths: tuple[int, ...] = (40, 40)
    compiled: bool = False
    quantized: int = 1
    others: int = 1  # of the output's gradient, which wgrad casts along tokens


WAYS = {
    "inductor": Way(ranks=2, compiled=True),
    "columnwise": Way(ranks=2, saved="columnwise", quantized=0, others=2),  # wgrad casts along tokens
    "frozen": Way(saved="columnwise", train=False, autocast=True, quantized=2, others=0),
    "checkpointed": Way(checkpointed=True, converts=True, quantized=2),
    "lengths, autocast": Way(autocast=True, lengths=(40, 52, 44)),
}


class Narrow(nn.Linear):
    """A layer in BF16 of a model in FP32."""

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x.bfloat16(), self.weight)


class MLP(nn.Module):
    def __init__(self, layer: type[nn.Linear]) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)
        self.gate, self.up = (layer(WIDTH, HIDDEN, bias=False) for _ in range(2))
        self.down = nn.Linear(HIDDEN, WIDTH, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        n = self.norm(x)
        return self.down(F.silu(self.gate(n)) * self.up(n))


class Model(nn.Module):
    def __init__(self, way: Way) -> None:
        super().__init__()
        self.mlp = MLP(Narrow if way.converts else nn.Linear)
        self.checkpointed = way.checkpointed

    def forward(self, x: Tensor) -> Tensor:
        return x + (checkpoint(self.mlp, x, use_reentrant=False) if self.checkpointed else self.mlp(x))


def sharded(way: Way) -> nn.Module:
    torch.manual_seed(0)
    model = Model(way)
    if not way.autocast:
        model.bfloat16()
    if way.converts:
        model.mlp.norm.float()
    mesh = init_device_mesh("cpu", (RANKS // way.ranks, way.ranks), mesh_dim_names=("data", "model"))
    tokens = Shard(1)
    plan = {
        "mlp": PrepareModuleInput(input_layouts=(tokens,), desired_input_layouts=(tokens,)),
        "mlp.norm": SequenceParallel(),
        "mlp.gate": ColwiseParallel(input_layouts=tokens),
        "mlp.up": ColwiseParallel(input_layouts=tokens),
        "mlp.down": RowwiseParallel(output_layouts=tokens),
    }
    return parallelize_module(model, mesh["model"], plan)


def step(way: Way) -> dict[str, Any]:
    """Results, gradients summed over micro-batches, what the last one gathers, and the report's summary."""
    forget()
    model = sharded(way)
    for linear in (model.mlp.gate, model.mlp.up, model.mlp.down):
        linear.requires_grad_(way.train)
    rules = policy({"precision": "mxfp8", "saved": way.saved})
    how: dict[str, Any] = {"backend": EagerBackend(policy=rules)}
    if way.compiled:
        how = {"backend": "mxfp8", "options": {"policy": rules}}
    compiled = torch.compile(model, fullgraph=True, dynamic=len({*way.lengths}) > 1, **how)
    generator = torch.Generator().manual_seed(dist.get_rank())
    results: dict[str, Any] = {}
    for number, tokens in enumerate(way.lengths):
        x = torch.randn(BATCH, tokens, WIDTH, generator=generator)
        x = (x if way.autocast or way.converts else x.bfloat16()).requires_grad_()
        sent: list[tuple[str, int]] = []
        last = number == len(way.lengths) - 1
        autocast = torch.autocast("cpu", torch.bfloat16, enabled=way.autocast)
        with sends("all_gather", sent) if last else nullcontext(), autocast:
            y = compiled(x)
            y.float().square().sum().backward()
        results |= {f"y{number}": y.detach(), f"x{number}": x.grad}
    results |= {name: p.grad.to_local() for name, p in model.named_parameters() if p.grad is not None}
    (report,) = mxcompile.reports()
    assert str(report).count("sent by each rank") == 1
    return {"numbers": results, "sent": sent, "summary": report.summary}


def steps() -> dict[str, Any]:
    return {name: step(way) for name, way in WAYS.items()}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return on_ranks(RANKS, tmp_path_factory.mktemp("ranks"), with_and_without, steps)


@pytest.mark.parametrize("name", WAYS)
def test_mx_bytes_travel_and_nothing_else_changes(name: str, ranks: list[Any]):
    way = WAYS[name]
    for rank in ranks:
        before, after = (results[name] for results in rank)
        assert before["numbers"].keys() == after["numbers"].keys()
        assert len(before["numbers"]) == 2 * len(way.lengths) + (4 if way.train else 1)
        for key, value in before["numbers"].items():
            assert torch.equal(value, after["numbers"][key]), key
        check_bytes(way, before["sent"], after["sent"])
        ours, theirs = before["summary"], after["summary"]
        assert ours.wire_bytes_bf16 == theirs.wire_bytes == theirs.wire_bytes_bf16
        assert (ours.wire_bytes < theirs.wire_bytes) == (way.quantized > 0)


def check_bytes(way: Way, before: list[tuple[str, int]], after: list[tuple[str, int]]) -> None:
    """What is sent with casts in front of gathers, and behind them: dtypes and numbers of elements."""
    elements = BATCH * way.lengths[-1] * WIDTH
    assert len(before) == len(after) == way.quantized + way.others
    for ours, theirs in zip(sorted(before), sorted(after), strict=True):
        assert theirs[0] in ("float", "c10::BFloat16")
        assert theirs[1] == elements
        assert ours[0] == "unsigned char" or ours == ("c10::BFloat16", elements)
    carried = [count for kind, count in before if kind == "unsigned char"]
    assert len(carried) == way.quantized
    assert all(count <= 0.53 * 2 * elements for count in carried)
