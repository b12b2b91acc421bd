"""What a watch measures on a GPU: one template a cast, and what that costs beside a plain step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from mxcompile import Watch, ops
from mxcompile.offline import codegen

ROOT = Path(__file__).parents[2]
OPERATOR = "mx.cast_statistics.default"
BF16 = torch.bfloat16
SAMPLED_OVER_PLAIN = 1.5


class Measured(nn.Module):
    def __init__(self, dim: int, fmt: str, keep: int = 0) -> None:
        super().__init__()
        self.how = dim, fmt, keep

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return ops.cast_statistics(x, *self.how)


@pytest.mark.slow
@pytest.mark.parametrize("dim", [-1, -2])
def test_one_kernel_reads_the_tensor(dim: int):
    """At the instructions that the committed prediction needs; what joins the tiles reads little."""
    x = torch.empty(8192, 4096, dtype=BF16, device="meta")
    result = codegen(Measured(dim, "e4m3 1x32 rceil"), x, target="sm_100", training=False)
    assert not result.problems
    measuring, *joining = result.launches
    assert measuring.facts.per_element <= 33
    assert measuring.num_bytes >= 2 * x.numel()
    assert len(joining) <= 2
    assert sum(launch.num_bytes for launch in joining) <= x.numel()


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "fmt"), [(-1, ""), (-1, "e2m1 1x32 rceil"), (-1, "e4m3 tensor nearest")])
def test_other_formats_stay_the_operator(dim: int, fmt: str):
    x = torch.empty(64, 64, dtype=BF16, device="meta")
    result = codegen(Measured(dim, fmt), x, target="sm_100", training=False)
    assert [launch.kernel for launch in result.launches] == [f"torch.ops.{OPERATOR}"]


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(128, 256, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return torch.nn.functional.gelu(self.up(x))


@pytest.mark.slow
def test_sampled_step_measures_six_casts_on_the_gpu():
    """Six casts are measured, and what is measured is handed over in forward and in backward."""
    with torch.device("meta"):
        model, x = Layer().to(BF16), torch.empty(64, 128, dtype=BF16, requires_grad=True)
    policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}
    result = codegen(model, x, policy=policy, watch=Watch(lambda record: None))
    assert not result.problems
    kernels = [result.kernel(launch) for launch in result.launches if launch.generated]
    assert len([kernel for kernel in kernels if "statistics.measure(" in kernel.source]) == 6
    delivered = [launch.phase for launch in result.launches if "mx.deliver" in launch.kernel]
    assert delivered == ["forward", "backward"]


def test_a_sampled_step_of_a_large_layer(benchmark):
    """A Llama-8B layer for a B200, by the newest committed estimates of `benchmarks/predicted_watch.py`."""
    lines = (ROOT / "benchmarks/results/predicted_watch.jsonl").read_text().splitlines()
    row = [line for line in map(json.loads, lines) if line["target"] == "sm_100"][-1]
    predicted = benchmark("predicted")
    plain = predicted.step_us(predicted.newest(row["tokens"])["sm_100", "nvidia"]).centre
    assert row["sampled_us"] <= SAMPLED_OVER_PLAIN * plain
    assert row["unclear"] == 0
