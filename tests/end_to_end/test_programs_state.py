"""What a program keeps outside of its model, and edits between compiles, is as without mxcompile."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import mxcompile

pytestmark = pytest.mark.slow


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(x)))


class Cut(nn.Module):
    """Two blocks with a graph break between them; `between` is applied before it."""

    def __init__(self, between: Callable[[Tensor], Tensor] = lambda x: x) -> None:
        super().__init__()
        self.first, self.last = Mlp(), Mlp()
        self.__dict__["between"] = between

    def forward(self, x: Tensor) -> Tensor:
        x = self.between(self.first(x))
        torch._dynamo.graph_break()
        return self.last(x)


STATE = {"calls": 0}


def divided(x: Tensor) -> Tensor:
    STATE["calls"] += 1
    return x / STATE["calls"]


def test_a_counter_outside_of_the_model_counts_as_in_eager_mode():
    outputs = {}
    for backend, options in (("eager", None), ("mxfp8", {"policy": "bf16"})):
        torch._dynamo.reset()
        torch.manual_seed(0)
        STATE["calls"] = 0
        call = torch.compile(Cut(divided), backend=backend, options=options)
        with torch.no_grad():
            outputs[backend] = [call(torch.ones(40, 64)) for _ in range(4)]
        assert STATE["calls"] == 4
    for eager, output in zip(outputs["eager"], outputs["mxfp8"], strict=True):
        assert torch.allclose(output, eager, atol=1e-5)
    assert not torch.allclose(*outputs["eager"][:2], atol=1e-2), "the count does not change outputs"


@pytest.mark.parametrize("disabled", [False, True], ids=["in the graph", "outside of it"])
def test_a_list_of_activations_gets_one_tensor_for_each_call(disabled: bool):
    kept: list[Any] = []

    def keep(module: nn.Module, args: Any, output: Tensor) -> None:
        kept.append(output)

    model = Cut()
    model.first.register_forward_hook(torch.compiler.disable(keep) if disabled else keep)
    call = torch.compile(model, backend="mxfp8")
    with torch.no_grad():
        for _ in range(2):
            call(torch.randn(40, 64))
    assert [type(value) for value in kept] == [Tensor, Tensor]


def test_an_edited_policy_file_changes_results_of_the_next_model(tmp_path: Path):
    path, x, models = tmp_path / "policy.yaml", torch.randn(40, 64), (Mlp(), Mlp())
    differs = []
    for preset, model in zip(("nvidia", "bf16"), models, strict=True):
        rules = "rules: [{match: {name: '*'}, use: mxfp8}]\n" if preset == "nvidia" else ""
        path.write_text(f"version: 1\npreset: {preset}\n{rules}", encoding="utf-8")
        with torch.no_grad():
            out = torch.compile(model, backend="mxfp8", options={"policy": str(path)})(x)
            differs.append(not torch.allclose(out, model(x), atol=1e-5))
    assert differs == [True, False]
    assert [report.summary.flop_share for report in mxcompile.reports()] == [1, 0]


class Mix(nn.Module):
    """An expert for the tokens that the data picks."""

    def __init__(self) -> None:
        super().__init__()
        self.dense, self.expert = Mlp(), Mlp()

    def forward(self, x: Tensor) -> Tensor:
        x = self.dense(x)
        chosen = (x[:, 0] > 0).nonzero().squeeze(-1)
        return x.index_add(0, chosen, self.expert(x[chosen]))


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_tokens_that_data_picks_are_not_counted_as_one():
    rules = [{"match": {"name": "*", "min_m": 64}, "use": "mxfp8"}]
    policy = {"version": 1, "preset": "bf16", "rules": rules}
    with torch.no_grad():
        torch.compile(Mix(), backend="mxfp8", options={"policy": policy})(torch.randn(4000, 64))
    (report,) = mxcompile.reports()
    assert {gemm.m for gemm in report.gemms if gemm.name.startswith("expert.")} == {None}
    assert "unknown FLOPs" in " ".join(str(report).split())
