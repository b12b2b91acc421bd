"""The work of graphs before any code is generated: by hand, and a layer beside its code."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from helpers.policies import every
from helpers.written import Written
from torch import Tensor, fx, nn
from torch.nn import functional as F

from mxcompile import ops
from mxcompile.analysis.explain.explainer import Explainer
from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.session.options import Options
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.estimate import Work, total
from mxcompile.offline.graph_work import Works, works
from mxcompile.offline.launch import Launch
from mxcompile.offline.rates import Rates
from mxcompile.plan.repeats import keep_all

M, N, K = 512, 256, 128
BF16 = 2


class Launches(Explainer):
    """The rehearsal that keeps the work of each phase."""

    def parted(self, capture: Capture, forward: fx.Graph, backward: fx.Graph) -> None:
        self.sides = [works(graph, self.target, self.repeats.count) for graph in (forward, backward)]


def launched(model: nn.Module, *args: Tensor, policy: Any = "bf16", target: str = "sm_100") -> list[Works]:
    options = Options.parse(None, {"policy": policy, "target": target})
    tracer = Launches(model, options, True, keep_all)
    tracer.run(args, {})
    return tracer.sides


def test_launches_end_at_products():
    """One between elementwise operators, of which two read its result."""

    def scaled(model: Written, x: Tensor) -> Tensor:
        y = model.up(x * 2)
        return F.relu(y) + y.sigmoid()

    with torch.device("meta"):
        model = Written(scaled, up=nn.Linear(K, N, bias=False)).bfloat16()
        x = torch.empty(M, K, dtype=torch.bfloat16)
    forward, _ = launched(model, x)
    (product,) = (work for kind, work in forward if kind == "product")
    peak = TARGETS["sm_100"].peak
    assert peak is not None
    assert product.num_bytes == BF16 * (M * K + N * K + M * N)
    assert product.mma_us == pytest.approx(2 * M * N * K / (peak.dense_tflops["bf16"] * 1e6))
    rest = Counter({work.num_bytes: times for (kind, work), times in forward.items() if kind == "rest"})
    assert rest == {BF16 * 2 * M * K: 1, BF16 * 2 * M * N: 1}


def test_emulated_products_run_at_the_rate_of_bf16():
    with torch.device("meta"):
        model = nn.Sequential(nn.RMSNorm(K), nn.Linear(K, N, bias=False)).bfloat16()
        x = torch.empty(M, K, dtype=torch.bfloat16)
    kinds = {}
    for target in ("sm_90", "sm_100", "sm_120"):
        sides = launched(model, x, policy=every("mxfp8"), target=target)
        kinds[target] = {work.product for side in sides for kind, work in side if kind == "product"}
    assert kinds == {"sm_90": {"bf16"}, "sm_100": {"mxfp8"}, "sm_120": {"own_mxfp8"}}


@pytest.mark.parametrize("operator", sorted(map(str, ops.CAST_WORK)))
def test_launch_computed_only_for_casts_is_of_kind_cast(operator: str):
    """Also the largest magnitude of a transformed tensor, which formats of two levels ask for."""
    launch = Launch(
        phase="forward", kernel="k", generated=True, operators=("aten.add", f"{operator}.default")
    )
    assert launch.kind == "cast"


def test_the_largest_of_an_input_is_a_cast():
    graph = fx.Graph()
    x = graph.placeholder("x")
    largest = graph.call_function(ops.largest, (x,))
    graph.output((largest,))
    x.meta["val"], largest.meta["val"] = torch.empty(M, K), torch.empty(1)
    (cast_work,) = works(graph, TARGETS["sm_100"], lambda _: 1)
    assert cast_work == ("cast", Work(num_bytes=4.0 * (M * K + 1)))


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "sm_100"])
@pytest.mark.parametrize("policy", ["bf16", "nvidia"])
def test_a_layer_takes_as_long_as_its_code(target: str, policy: str, benchmark: Any):
    """A Llama-8B layer, within 10 % of the estimate from its machine code."""
    predicted = benchmark("predicted")
    with torch.device("meta"):
        layer = predicted.Layer().bfloat16()
        x = torch.empty(1, predicted.TOKENS, 4096, dtype=torch.bfloat16, requires_grad=True)
        cos, sin = (torch.empty(1, predicted.TOKENS, 128, dtype=torch.bfloat16) for _ in range(2))
    rates = Rates.for_target(TARGETS[target])
    sides = launched(layer, x, cos, sin, policy=policy, target=target)
    us = sum(total([work] * times, rates) for side in sides for (_, work), times in side.items())
    row = predicted.newest(predicted.TOKENS)[target, policy]
    generated = [Work(**work) for _, work in row["works"]]
    assert us == pytest.approx(total(generated, rates), rel=0.1)
