"""What a watch measures on a GPU: one template a cast, and what that costs beside a plain step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from generating import generate
from helpers.written import Written
from torch import nn

from mxcompile import Watch, ops
from mxcompile.offline import CodegenResult

ROOT = Path(__file__).parents[2]
SAMPLED_OVER_PLAIN = 1.5


def measured(shape: tuple[int, int], dim: int, fmt: str) -> CodegenResult:
    return generate(Written(lambda _, x: ops.cast_statistics(x, dim, fmt, 0)), shape, policy="nvidia")


@pytest.mark.slow
@pytest.mark.parametrize("dim", [-1, -2])
def test_one_kernel_reads_the_tensor(dim: int):
    """At the instructions that the committed prediction needs; what joins the tiles reads little."""
    result = measured((8192, 4096), dim, "e4m3 1x32 rceil")
    assert not result.problems
    measuring, *joining = result.launches
    assert measuring.facts.per_element <= 33
    assert measuring.num_bytes >= 2 * 8192 * 4096
    assert len(joining) <= 2
    assert sum(launch.num_bytes for launch in joining) <= 8192 * 4096


@pytest.mark.slow
@pytest.mark.parametrize(("dim", "fmt"), [(-1, ""), (-1, "e2m1 1x32 rceil"), (-1, "e4m3 tensor nearest")])
def test_other_formats_stay_the_operator(dim: int, fmt: str):
    launches = measured((64, 64), dim, fmt).launches
    assert [launch.kernel for launch in launches] == ["torch.ops.mx.cast_statistics.default"]


@pytest.mark.slow
def test_sampled_step_measures_six_casts_on_the_gpu():
    """Six casts are measured, and what is measured is handed over in forward and in backward."""
    model = nn.Sequential(nn.Linear(128, 256, bias=False), nn.GELU())
    x = torch.empty(64, 128, device="meta", dtype=torch.bfloat16, requires_grad=True)
    result = generate(model, x, training=True, watch=Watch(lambda record: None))
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
