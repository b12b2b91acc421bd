"""A model that nobody keeps is freed while Dynamo keeps its code, as with Inductor alone."""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mxcompile

Use = Callable[[nn.Module], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    """Two equal blocks, with a graph break after the first if `cut`."""

    def __init__(self, *, cut: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Block(), Block()])
        self.cut = cut

    def forward(self, x: Tensor) -> Tensor:
        x = self.layers[0](x)
        if self.cut:
            torch._dynamo.graph_break()
        return self.layers[1](x)


@pytest.fixture(autouse=True)
def _fresh(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def trained(call: Callable[[Tensor], Tensor]) -> None:
    call(torch.ones(32, 64)).sum().backward()


def compiled(model: Any, **options: Any) -> Any:
    return torch.compile(model, backend="mxfp8", options=options)


def as_whole(model: nn.Module, **options: Any) -> None:
    trained(compiled(model, **options))


def without_backward(model: nn.Module) -> None:
    compiled(model)(torch.ones(32, 64))  # its backward is never lowered


def without_gradients(model: nn.Module) -> None:
    with torch.no_grad():
        compiled(model)(torch.ones(32, 64))


def with_a_watch(model: nn.Module) -> None:
    rule = {"when": {"underflow": "> 0.9"}, "do": "bf16"}
    watch = mxcompile.Watch("run.jsonl", every=1, nonfinite="warn", rules=[rule])
    as_whole(model, watch=watch)


def with_histories(model: nn.Module) -> None:
    as_whole(model, policy="fp8_delayed")


def block_by_block(model: nn.Module) -> None:
    trained(mxcompile.compile(model))


def with_a_root(model: nn.Module) -> None:
    for block in model.layers:
        block.compile(backend=mxcompile.Backend(root=model, block=block))
    trained(model)


def in_a_function(model: nn.Module) -> None:
    trained(compiled(lambda x: model(x)))


def with_another_model(model: nn.Module) -> None:
    other = Net()
    trained(compiled(lambda x: model(other(x))))


def in_a_training_step(model: nn.Module) -> None:
    with torch._dynamo.config.patch(compiled_autograd=True):
        compiled(lambda x: model(x).sum().backward())(torch.ones(32, 64))


def with_stored_weights(model: nn.Module) -> None:
    mxcompile.quantize_weights_(model, args=(torch.ones(32, 64),))
    without_gradients(model)


def compiled_again(model: nn.Module) -> None:
    call = compiled(model)
    for rows in (32, 48):
        call(torch.ones(rows, 64)).sum().backward()


def audited(model: nn.Module) -> None:
    mxcompile.audit(model, torch.ones(32, 64))


USES: list[Use] = [
    as_whole,
    without_backward,
    without_gradients,
    with_a_watch,
    with_histories,
    block_by_block,
    with_a_root,
    in_a_function,
    with_another_model,
    in_a_training_step,
    with_stored_weights,
    compiled_again,
    audited,
]


@pytest.mark.parametrize("cut", [False, True], ids=["whole", "cut"])
@pytest.mark.parametrize("use", USES, ids=lambda use: use.__name__)
def test_a_model_that_nobody_keeps_is_freed_without_a_reset(use: Use, cut: bool):
    model = Net(cut=cut)
    use(model)
    alive = weakref.ref(model)
    del model
    gc.collect()
    assert alive() is None


@pytest.mark.parametrize("copied", [False, True], ids=["another", "a copy"])
def test_models_that_share_code_are_freed_one_by_one_and_keep_their_reports(copied: bool):
    mxcompile.clear_reports()
    first = Net()
    as_whole(first)
    second = copy.deepcopy(first) if copied else Net()
    as_whole(second)
    alive = [weakref.ref(first), weakref.ref(second)]
    del first
    gc.collect()
    assert [model() is None for model in alive] == [True, False]
    as_whole(second)
    third = Net()
    as_whole(third)  # runs the code that was compiled for the first
    del second, third
    gc.collect()
    assert [model() is None for model in alive] == [True, True]
    reports = mxcompile.reports()
    assert [report.summary.flop_share for report in reports] == [1.0, 1.0, 1.0]
    assert {len(report.gemms) for report in reports} == {11}


def test_a_backend_whose_model_was_freed_says_that_a_block_is_named_without_it(caplog):
    model = Net()
    block = model.layers[0]
    backend = mxcompile.Backend(root=model)
    del model
    gc.collect()
    assert backend.root is None
    with torch.no_grad():
        torch.compile(block, backend=backend)(torch.ones(32, 64))
    assert "Backend(root=…): the model was freed" in caplog.text
    assert [gemm.name for gemm in mxcompile.reports()[-1].gemms] == ["up", "down"]
