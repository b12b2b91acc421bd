"""Scales that follow from calls before on two ranks: whose amax a history has, saving, loading, agreeing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.eager_backend import EagerBackend
from helpers.one_linear import ByHand
from helpers.reference import sqnr_db
from test_distributed import RANKS, two_ranks
from test_histories import policy
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import mxcompile

STEPS, HISTORY = 3, 2


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linear = nn.Linear(40, 16, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x)


def batches() -> list[list[tuple[Tensor, Tensor]]]:
    """Of every step, what each rank reads and the gradient of what it gives; the second rank's are larger."""
    gen = torch.Generator().manual_seed(1)
    draw = lambda *shape: torch.randn(*shape, generator=gen)  # noqa: E731
    return [
        [(draw(24, 40) * size * (1 + 3 * rank), draw(24, 16) * size / (10 + rank)) for rank in range(RANKS)]
        for size in [1.0, 8.0, 0.5, 2.0]
    ]


def data_parallel(layer: Layer) -> nn.Module:
    return DistributedDataParallel(layer)


def fully_sharded(layer: Layer) -> nn.Module:
    from torch.distributed.fsdp import fully_shard

    return fully_shard(layer)


WAYS: dict[str, Callable[[Layer], nn.Module]] = {
    "data parallel": data_parallel,
    "fully sharded": fully_sharded,
}


def whole(value: Tensor) -> Tensor:
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def step(call: Any, layer: Layer, batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    x, dy = batch
    layer.linear.weight.grad = None
    y = call(x)
    y.backward(dy)
    return y.detach().clone(), whole(layer.linear.weight.grad).clone()


def trained(way: str, rank: int) -> dict[str, Any]:
    """Three steps, the state dict, what a fourth gives, and what it gives after loading; then agreement."""
    use = policy(scaling="delayed", history=HISTORY)
    layer = Layer()
    torch._dynamo.reset()
    call = torch.compile(WAYS[way](layer), backend=EagerBackend(policy=use))
    inputs = [every[rank] for every in batches()]
    results = {"steps": [step(call, layer, batch) for batch in inputs[:STEPS]]}
    results["history"] = layer.linear.weight_amax_history.clone()
    saved = copy.deepcopy(layer.state_dict())
    results["fourth"] = step(call, layer, inputs[STEPS])

    fresh = Layer()
    mxcompile.Backend(policy=use, root=fresh)
    if way == "data parallel":
        fresh.load_state_dict(saved)
    sharded = WAYS[way](fresh)
    if way != "data parallel":
        fresh.load_state_dict(saved)
    torch._dynamo.reset()
    results["loaded"] = step(torch.compile(sharded, backend=EagerBackend(policy=use)), fresh, inputs[STEPS])
    results["moved on"] = (layer.linear.weight_amax_history.clone(), fresh.linear.weight_amax_history.clone())
    mxcompile.reduce_histories(layer)
    results["agreed"] = layer.linear.weight_amax_history.clone()
    return results


def tensor_parallel(rank: int) -> tuple[Tensor, list[str], list[str]]:
    """What a layer gives whose columns two ranks share, why its scales are what they are, its buffers."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

    layer = Layer()
    parallelize_module(layer, init_device_mesh("cpu", (RANKS,)), {"linear": ColwiseParallel()})
    torch._dynamo.reset()
    mxcompile.clear_reports()
    use = policy(scaling="delayed", history=HISTORY)
    y = torch.compile(layer, backend=EagerBackend(policy=use))(batches()[0][0][0])
    reasons = {gemm.reason for report in mxcompile.reports() for gemm in report.gemms}
    return y.detach().clone(), sorted(reasons), [name for name, _ in layer.named_buffers()]


def every_way(rank: int) -> tuple[Tensor, dict[str, Any]]:
    results: dict[str, Any] = {way: trained(way, rank) for way in WAYS}
    return torch.zeros(1), {**results, "tensor parallel": tensor_parallel(rank)}


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return [results for _, results, _ in two_ranks(every_way, tmp_path_factory.mktemp("ranks"))]


def by_hand() -> tuple[list[list[tuple[Tensor, Tensor]]], list[ByHand]]:
    """What each rank gives in every step, and its histories."""
    weight = Layer().linear.weight.detach()
    hands = [ByHand(weight, HISTORY) for _ in range(RANKS)]
    steps = []
    for every in batches()[:STEPS]:
        rank_steps = []
        for rank, hand in enumerate(hands):
            x, dy = every[rank]
            y, _, dw = hand.step(x.double(), dy.double())
            rank_steps.append((y, dw))
        steps.append(rank_steps)
    return steps, hands


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_history_of_each_rank_holds_the_amax_of_its_tensors(ranks: list[dict[str, Any]], way: str):
    """Its own batch, the weight as it multiplies it (whole under FSDP2) and its own gradient."""
    steps, hands = by_hand()
    for rank, (results, hand) in enumerate(zip(ranks, hands, strict=True)):
        for row, name in zip(results[way]["history"], ("x", "w", "dy"), strict=True):
            torch.testing.assert_close(row, torch.tensor(hand.seen[name]), rtol=1e-6, atol=0)
        for (y, dw), expected in zip(results[way]["steps"], steps, strict=True):
            assert sqnr_db(expected[rank][0], y) > 100
            assert sqnr_db(sum(gradient for _, gradient in expected) / RANKS, dw) > 100


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_a_saved_model_goes_on_where_it_was(ranks: list[dict[str, Any]], way: str):
    for results in ranks:
        for tensor, other in zip(results[way]["fourth"], results[way]["loaded"], strict=True):
            assert torch.equal(tensor, other)
        assert torch.equal(*results[way]["moved on"])


@pytest.mark.slow
@pytest.mark.parametrize("way", WAYS)
def test_ranks_agree_on_the_largest_when_asked(ranks: list[dict[str, Any]], way: str):
    first, second = (results[way]["moved on"][0] for results in ranks)
    assert not torch.equal(first, second)
    for results in ranks:
        assert torch.equal(results[way]["agreed"], torch.maximum(first, second))


@pytest.mark.slow
def test_a_shard_of_tensor_parallelism_takes_the_amax_at_hand(ranks: list[dict[str, Any]]):
    weight, x = Layer().linear.weight.detach(), batches()[0][0][0]
    for rank, (y, reasons, buffers) in enumerate(results["tensor parallel"] for results in ranks):
        shard = weight.chunk(RANKS, 0)[rank]
        x8, w8 = (value / (value.abs().max() / 448) for value in (x, shard))
        values = [v.to(torch.float8_e4m3fn).double() for v in (x8, w8)]
        expected = values[0] @ values[1].t() * float(x.abs().max() / 448) * float(shard.abs().max() / 448)
        assert sqnr_db(expected, y) > 100
        (reason,) = reasons
        assert reason.endswith(
            "scales of current tensors, no history: the weight is not a parameter of the graph"
        )
        assert buffers == []


def test_one_process_agrees_with_itself():
    layer = Layer()
    layer.linear.register_buffer("weight_amax_history", torch.ones(3, HISTORY))
    assert not dist.is_initialized()
    assert mxcompile.reduce_histories(layer) == 1
    assert torch.equal(layer.linear.weight_amax_history, torch.ones(3, HISTORY))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(40, 96, bias=False), nn.Linear(96, 40, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


MASTERS = {
    "version": 1,
    "rules": [{"match": {"name": "*"}, "use": {"precision": "fp8", "grad_dtype": "e5m2"}}],
}


def offloaded(rank: int) -> tuple[Tensor, dict[str, Any]]:
    """FSDP2 that keeps FP32 masters, their gradients and the optimizer on the CPU and computes in BF16."""
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    net = Net()
    fully_shard(
        net,
        mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
        offload_policy=CPUOffloadPolicy(pin_memory=False),
    )
    torch._dynamo.reset()
    x = torch.randn(2, RANKS, 32, 40, generator=torch.Generator().manual_seed(3))
    call = torch.compile(net, backend=EagerBackend(policy=MASTERS))
    optimizer = torch.optim.SGD(net.parameters(), lr=1e-3)
    for inputs in x[:, rank]:
        optimizer.zero_grad()
        call(inputs).float().square().mean().backward()
        optimizer.step()
    kept = {
        name: (value.device.type, value.dtype, whole(value.detach()), whole(value.grad).dtype)
        for name, value in net.named_parameters()
    }
    return torch.zeros(1), kept


@pytest.mark.slow
def test_masters_in_fp32_on_the_cpu(tmp_path: Path):
    """Two ranks' steps are those of one process that averages both gradients and computes in BF16."""
    net = Net()
    x = torch.randn(2, RANKS, 32, 40, generator=torch.Generator().manual_seed(3))
    torch._dynamo.reset()
    working = copy.deepcopy(net).bfloat16()
    call = torch.compile(working, backend=EagerBackend(policy=MASTERS))
    before = [parameter.detach().clone() for parameter in net.parameters()]
    for every in x:
        for parameter in net.parameters():
            parameter.grad = torch.zeros_like(parameter)
        for inputs in every:
            with torch.no_grad():
                for kept, master in zip(working.parameters(), net.parameters(), strict=True):
                    kept.copy_(master)
                    kept.grad = None
            call(inputs.bfloat16()).float().square().mean().backward()
            for kept, master in zip(working.parameters(), net.parameters(), strict=True):
                master.grad += kept.grad.float() / RANKS
        with torch.no_grad():
            for master in net.parameters():
                master -= 1e-3 * master.grad
    for _, kept, reports in two_ranks(offloaded, tmp_path):
        assert {gemm.precision for report in reports for gemm in report.gemms} == {"fp8"}
        for (name, master), start in zip(net.named_parameters(), before, strict=True):
            device, dtype, value, grad_dtype = kept[name]
            assert (device, dtype, grad_dtype) == ("cpu", torch.float32, torch.float32)
            assert sqnr_db(master.detach() - start, value - start) > 60
            assert not torch.equal(value, value.bfloat16().float())
