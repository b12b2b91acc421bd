"""The report's number of casts is that of the copies which the graphs that are lowered make."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.made import Made
from torch import fx, nn

import mxcompile
from mxcompile import ops
from mxcompile.formats import CopyPart
from mxcompile.lowering.graph import pipeline
from mxcompile.ops.view import Casts
from mxcompile.policy.presets import PRESETS

pytestmark = pytest.mark.usefixtures("in_this_process")
LAYERS = ("up", "down")


class Mlp(Made, up=(512, 1024), down=(1024, 512, False)):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(nn.functional.gelu(self.up(x)))


def copies(graph: fx.Graph) -> set[Any]:
    """Which copies `graph`, a lowered one, makes: of which tensor, along which dimension or lying how."""
    copies_of_tensors: set[Any] = set()
    for node in graph.nodes:
        if node.target is ops.cast:
            cast = Casts.read(node)
            dims = [copy.dim for copy in cast.parsed if copy.part in (CopyPart.CODES, CopyPart.ELEMENTS)]
            copies_of_tensors |= {
                (tensor, dim % 2) for tensor in (cast.x, cast.y) if tensor is not None for dim in dims
            }
        elif node.target is ops.quantize_mm:
            copies_of_tensors.add((node.args[0], 1))
    return copies_of_tensors


FAST = {("nvidia", "sm_100"), ("fp8_tensor", "sm_90"), ("fp8_block", "sm_90"), ("fp8_delayed", "cpu")}
CASES = [
    pytest.param(preset, target, marks=() if (preset, target) in FAST else pytest.mark.slow)
    for preset in PRESETS
    for target in ("cpu", "sm_90", "sm_100")
    if preset != "bf16"
]


@pytest.mark.parametrize(("preset", "target"), CASES)
def test_as_many_as_are_lowered(preset: str, target: str, monkeypatch: pytest.MonkeyPatch):
    lowered: list[set[Any]] = []

    def run(graph: fx.Graph, *arguments: Any, **options: Any) -> None:
        lower(graph, *arguments, **options)
        lowered.append(copies(graph))

    lower = pipeline.run
    monkeypatch.setattr(pipeline, "run", run)
    model, x = Mlp().to("meta", torch.bfloat16), torch.empty(128, 512, dtype=torch.bfloat16)
    x.requires_grad_()
    report = mxcompile.explain(model, x, policy=preset, target=target)
    assert len(report.gemms) == 3 * len(LAYERS)
    assert report.summary.casts == sum(map(len, lowered))
