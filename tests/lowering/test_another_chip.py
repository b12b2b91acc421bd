"""Products for a target that is not the GPU at hand, where Triton has to emulate the MX instruction."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import quantize, scaled_mm
from helpers.graphs import traced
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.graph.opsets import packet
from mxcompile.graph.tags import tag_of
from mxcompile.lowering import optional
from mxcompile.lowering.graph import pipeline
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.device import move
from mxcompile.offline.standin import DEVICE, stand_in


def product() -> fx.Graph:
    def function(x: Tensor, w: Tensor) -> Tensor:
        a, b = (quantize(side, -1, torch.float8_e4m3fn, "rceil") for side in (x, w))
        return scaled_mm(*a, b[0].t(), b[1].t(), None, torch.bfloat16)

    with FakeTensorMode():
        x, w = (torch.empty(256, 256, dtype=torch.bfloat16) for _ in range(2))
        graph = traced(function, x, w).graph
    move(graph, DEVICE)
    return graph


EMULATED = "; Triton 3.8 would read scale bytes of 0 as 0 on sm_90, which has no MX instruction"


@pytest.mark.parametrize(
    ("chip", "release", "expected"),
    [
        ("sm_90", (3, 8), f"aten.mm (bfloat16, dequantized){EMULATED}"),
        ("sm_90", (3, 9), "mx_scaled_mm_tiled"),
        ("sm_100", (3, 8), "mx_scaled_mm_tiled"),
    ],
)
def test_emulation_that_loses_scales_is_not_used(chip, release, expected, monkeypatch):
    monkeypatch.setattr(optional, "triton_release", lambda: release)
    with stand_in(TARGETS[chip]):
        graph = product()
        pipeline.run_joint(graph, TARGETS["sm_100"], DEVICE)
        pipeline.run(graph, TARGETS["sm_100"], DEVICE)
    (tag,) = filter(None, map(tag_of, graph.nodes))
    assert tag.kernel.startswith(expected)
    emulated = release < (3, 9) and chip == "sm_90"
    assert any(packet(node) is torch.ops.aten.mm for node in graph.nodes) == emulated
