"""Histories of delayed scales where a function is compiled, and where checkpoints run a forward again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.one_linear import run
from test_histories import Blocks, compiled, linear, policy, steps
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

import mxcompile
from mxcompile.compiler.calls import delayed_scales


class Trainer:
    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def forward(self, x: Tensor) -> Tensor:
        return self.model(x)


HELD: dict[str, Any] = {}


def helper(x: Tensor) -> Tensor:
    """Reads models that the function which calls it does not name."""
    return HELD["deep"]["er"][0]["models"][1](x) + HELD["second"](x)


def in_argument(model: nn.Module) -> Callable[..., Tensor]:
    call = torch.compile(lambda m, x: m(x), backend=EagerBackend(policy=policy()))
    return lambda x: call(model, x)


def in_helper(model: nn.Module) -> Callable[..., Tensor]:
    HELD.update(deep={"er": [{"models": (None, model)}]}, second=nn.Linear(40, 16, bias=False))
    nn.init.zeros_(HELD["second"].weight)
    return torch.compile(lambda x: helper(x), backend=EagerBackend(policy=policy()))


def in_functional_call(model: nn.Module) -> Callable[..., Tensor]:
    def function(weights: dict[str, Tensor], x: Tensor) -> Tensor:
        return torch.func.functional_call(model, weights, (x,))

    call = torch.compile(function, backend=EagerBackend(policy=policy()))
    return lambda x: call({"weight": model.weight * 1}, x)


FUNCTIONS: dict[str, Callable[[nn.Module], Callable[..., Tensor]]] = {
    "closure": lambda model: torch.compile(lambda x: model(x), backend=EagerBackend(policy=policy())),
    "argument": in_argument,
    "method": lambda model: torch.compile(Trainer(model).forward, backend=EagerBackend(policy=policy())),
    "helper": in_helper,
    "other tensors": in_functional_call,
}


@pytest.mark.parametrize("way", FUNCTIONS)
def test_compiled_function_has_the_histories_and_evaluation_of_the_compiled_module(way: str):
    module, model = linear(), linear()
    reference, call = compiled(module, policy()), FUNCTIONS[way](model)
    for x, dy in steps(3):
        run(reference, module.weight, x, dy)
        call(x.requires_grad_()).backward(dy)
    assert torch.equal(model.weight_amax_history, module.weight_amax_history)
    for tokens in (24, 7):
        x = torch.randn(tokens, 40)
        with torch.no_grad():
            assert torch.equal(call(x), reference(x))
        assert torch.equal(call(x), reference(x))


def test_frozen_weight_in_a_buffer_has_its_history_beside_it():
    model = linear()
    weight = model.weight.detach()
    del model.weight
    model.register_buffer("weight", weight)
    compiled(model, policy())(torch.ones(8, 40, requires_grad=True)).sum().backward()
    saved = model.state_dict()
    assert saved["weight_amax_history"][:, 0].tolist() == [1.0, weight.abs().max().item(), 1.0]
    fresh = linear()
    del fresh.weight
    fresh.register_buffer("weight", weight)
    assert mxcompile.Backend(policy=policy(), root=fresh).root is fresh
    fresh.load_state_dict(saved)


def test_weight_outside_modules_has_one_history_in_all_graphs_and_a_warning(caplog):
    module, weight = linear(), nn.Parameter(linear().weight.detach())
    reference = compiled(module, policy())
    call = torch.compile(
        lambda x: nn.functional.linear(x, weight), backend=EagerBackend(policy=policy()), dynamic=False
    )
    for x, dy in steps(3):
        run(reference, module.weight, x, dy)
        call(x.requires_grad_()).backward(dy)
    for tokens in (24, 7):
        x = torch.randn(tokens, 40)
        with torch.no_grad():
            assert torch.equal(call(x), reference(x))
    ours = [record.getMessage() for record in caplog.records if record.name == delayed_scales.log.name]
    assert ours == [
        "no module has weight as a parameter or buffer: its amax history stays with the tensor, outside of"
        " state dicts"
    ]


def once(first: Any, second: Any, region: Any, x: Tensor) -> list[Tensor]:
    return [region(lambda x: second(first(x)), x)]


def nested(first: Any, second: Any, region: Any, x: Tensor) -> list[Tensor]:
    return [region(lambda x: second(region(first, x)), x)]


def used_twice(first: Any, second: Any, region: Any, x: Tensor) -> list[Tensor]:
    return [region(lambda x: second(first(first(x) * 3)), x)]


def two_batches(first: Any, second: Any, region: Any, x: Tensor) -> list[Tensor]:
    return [region(lambda x: second(first(x)), batch) for batch in (x, x * 5)]


def checkpointed(call: Any, region: Any) -> list[Tensor]:
    """Gradients and histories of three steps of two compiled blocks, called inside `region`."""
    torch._dynamo.reset()
    model = Blocks()
    for block in model.blocks:
        block.compile(backend=EagerBackend(policy=policy(), root=model))
    for x, _ in steps(3):
        model.zero_grad()
        for y in call(*model.blocks, region, x.requires_grad_()):
            y.square().mean().backward()
    return [*(parameter.grad for parameter in model.parameters()), *model.buffers()]


@pytest.mark.parametrize("call", [once, nested, used_twice, two_batches])
def test_checkpointed_regions_have_the_gradients_and_histories_of_a_run_without(call: Any):
    expected = checkpointed(call, lambda function, x: function(x))
    repeated = checkpointed(call, lambda function, x: checkpoint(function, x, use_reentrant=False))
    for tensor, other in zip(repeated, expected, strict=True):
        assert torch.equal(tensor, other)


@pytest.mark.parametrize(
    ("call", "outer", "inner"),
    [
        (nested, False, False),
        (nested, False, True),
        (nested, True, False),
        (nested, True, True),
        (used_twice, False, False),
        (used_twice, True, True),
        (two_batches, True, True),
    ],
)
def test_repetition_computes_what_the_first_forward_did(call: Any, outer: bool, inner: bool):
    """Also with hooks between the regions, as for offloading."""
    seen: dict[bytes, list[bytes]] = {}

    class Spied:
        def __init__(self, block: Any) -> None:
            self.block = block

        def __call__(self, x: Tensor) -> Tensor:
            y = self.block(x)
            seen.setdefault(x.detach().numpy().tobytes(), []).append(y.detach().numpy().tobytes())
            return y

    def region(function: Any, x: Tensor) -> Tensor:
        with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor):
            return checkpoint(function, x, use_reentrant=inner if isinstance(function, Spied) else outer)

    with set_checkpoint_early_stop(False):
        checkpointed(lambda first, *rest: call(Spied(first), *rest), region)
    assert len(seen) == {nested: 3, used_twice: 6, two_batches: 6}[call]
    assert {len(results) for results in seen.values()} == {3 if call is nested else 2}
    assert all(len({*results}) == 1 for results in seen.values())


def test_backward_in_the_compiled_function_compiles_no_code_of_the_hooks():
    model, backend, counter = linear(), EagerBackend(policy=policy()), CompileCounter()

    def count(gm: Any, inputs: Any) -> Any:
        counter(gm, inputs)
        return backend(gm, inputs)

    def step(x: Tensor) -> Tensor:
        loss = model(x).square().mean()
        loss.backward()
        return loss

    torch._dynamo.reset()
    torch.compile(step, backend=count)(torch.ones(8, 40))
    assert counter.frame_count == 1
    assert model.weight_amax_history[:, 0].gt(0).all()
