"""The pass `cache`: which casts of weights it keeps, and what records say of the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from torch import Tensor, nn
from torch._inductor import config
from torch.nn import functional as F

import mxcompile
from mxcompile.lowering import pipeline
from mxcompile.lowering.targets import TARGETS

WIDTH = 64
CAST = "the weight is cast in every call: "


def records(subject: Callable[[Tensor], Tensor], x: Tensor, **use: Any) -> tuple[str, mxcompile.Report]:
    """The graph after the passes, and the report."""
    torch._dynamo.reset()
    mxcompile.clear_reports()
    rule = {"match": {"name": "*"}, "use": {"precision": "mxfp8", "weights": "cached", **use}}
    backend = EagerBackend(policy={"version": 1, "rules": [rule]})
    torch.compile(subject, backend=backend, fullgraph=True)(x).float().sum().backward()
    (report,) = mxcompile.reports()
    return backend.ir[0], report


class Computed(nn.Module):
    """A weight that is not what is stored."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(96, WIDTH))
        self.gain = nn.Parameter(torch.ones(96, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight * self.gain)


class Turned(nn.Linear):
    """A weight whose rows are columns in memory."""

    def __init__(self) -> None:
        super().__init__(WIDTH, 96)
        self.weight = nn.Parameter(torch.randn(WIDTH, 96).t())


class Packed(nn.Module):
    """Two layers in the halves of one parameter, as attention modules have theirs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(192, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.chunk(2)
        return F.linear(x, first) * F.linear(x, second)


def test_weights_are_cast_once_and_activations_every_time():
    ir, report = records(nn.Linear(WIDTH, 96), torch.randn(32, WIDTH, requires_grad=True))
    assert ir.count("mx.quantize_cached.default(") == 2
    assert ir.count("mx.quantize.default(") == 4  # x and dy, along rows and along columns
    assert report.summary.casts == 4
    assert not any(CAST in gemm.reason for gemm in report.gemms)
    plain, report = records(nn.Linear(WIDTH, 96), torch.randn(32, WIDTH, requires_grad=True), weights="cast")
    assert "quantize_cached" not in plain
    assert report.summary.casts == 6


def test_parts_of_a_parameter_are_weights_too():
    ir, _ = records(Packed(), torch.randn(32, WIDTH, requires_grad=True))
    assert ir.count("mx.quantize_cached.default(") == 4


@pytest.mark.parametrize(
    ("build", "dtype", "use", "reason"),
    [
        (Computed, torch.float32, {}, "it is computed"),
        (Turned, torch.float32, {}, "it does not lie in memory as it is cast"),
        (lambda: nn.Linear(WIDTH, 96), torch.float16, {}, "its dtype is float16"),
    ],
)
def test_other_casts_stay_and_say_why(
    build: Callable[[], nn.Module], dtype: torch.dtype, use: dict[str, Any], reason: str
):
    x = torch.randn(32, WIDTH, dtype=dtype, requires_grad=True)
    ir, report = records(build().to(dtype), x, **use)
    assert "quantize_cached" not in ir
    said = {gemm.gemm: gemm.reason for gemm in report.gemms}
    assert said["fprop"].endswith(f"; {CAST}{reason}")
    assert said["dgrad"].endswith(f"; {CAST}{reason}")
    assert CAST not in said["wgrad"]


def test_a_target_that_keeps_none_says_so():
    model = nn.Sequential(nn.Linear(WIDTH, 96), nn.ReLU(), nn.Linear(96, WIDTH))
    rule = {"match": {"name": "*"}, "use": {"precision": "mxfp8", "weights": "cached"}}
    policy = {"version": 1, "rules": [rule]}
    for target in ("cpu", "sm_90", "sm_100"):
        report = mxcompile.explain(model, torch.randn(32, WIDTH), policy=policy, target=target)
        found = {gemm.gemm: CAST in gemm.reason for gemm in report.gemms}
        assert found["fprop"] == found["dgrad"] == (target != "cpu")
        assert not found["wgrad"]


def test_without_a_compiler_nothing_is_kept(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(pipeline.kernel, "obstacle", lambda: "no C++ compiler: cl")
    ir, report = records(nn.Linear(WIDTH, 96), torch.randn(32, WIDTH, requires_grad=True))
    assert "quantize_cached" not in ir
    assert report.gemms[0].reason.endswith(f"{CAST}no C++ compiler: cl")


def test_code_that_calls_no_python_keeps_nothing():
    assert pipeline.uncached(TARGETS["cpu"]) == ""
    with config.patch(cpp_wrapper=True):
        assert "config.cpp_wrapper" in pipeline.uncached(TARGETS["cpu"])


def test_memory_and_casts_of_a_model_that_is_not_run():
    """Equal layers are traced once and count as often as there are."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(6))).bfloat16()
    found = {}
    for word in ("cast", "cached"):
        rule = {"match": {"name": "*"}, "use": {"precision": "mxfp8", "weights": word}}
        policy = {"version": 1, "rules": [rule]}
        x = torch.randn(32, WIDTH, dtype=torch.bfloat16)
        found[word] = mxcompile.explain(blocks, x, policy=policy, target="cpu_bf16").summary
    cast, cached = found["cast"], found["cached"]
    assert (cast.cached_casts, cast.cached_bytes) == (0, 0)
    assert cached.cached_casts == 6 + 5  # nothing asks for the gradient of the input
    assert cached.cached_bytes == 11 * WIDTH * WIDTH * 2
    assert cast.casts - cached.casts == 11
    assert cached.peak_bytes == cast.peak_bytes + cached.cached_bytes
