"""Scales that follow from calls before: against casts by hand, saved, loaded, moved on when they should."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.one_linear import ByHand, run
from helpers.reference import sqnr_db
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import mxcompile
from mxcompile import ops
from mxcompile.compiler.calls import delayed_scales
from mxcompile.models.names import GraphInput
from mxcompile.models.tree import Tree


def policy(**use: Any) -> dict[str, Any]:
    use = {"precision": "fp8", "grad_dtype": "e5m2", **(use or {"scaling": "delayed", "history": 3})}
    return {"version": 1, "rules": [{"match": {"name": "*"}, "use": use}]}


def steps(count: int) -> list[tuple[Tensor, Tensor]]:
    """Inputs and output gradients that grow and shrink, so that every entry of a history counts once."""
    torch.manual_seed(1)
    sizes = [1.0, 8.0, 0.5, 0.25, 0.1, 4.0][:count]
    return [(torch.randn(24, 40) * size, torch.randn(24, 16) * size / 100) for size in sizes]


def compiled(model: nn.Module, options: dict[str, Any], backend: str = "eager") -> Any:
    torch._dynamo.reset()
    if backend == "eager":
        return torch.compile(model, backend=EagerBackend(policy=options))
    return torch.compile(model, backend=backend, options={"policy": options})


def linear() -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(40, 16, bias=False)


@pytest.mark.parametrize(
    ("backend", "use"),
    [
        ("eager", {"scaling": "delayed", "history": 3}),
        ("eager", {"scaling": "delayed", "history": 2, "margin": 1}),
        ("eager", {"scaling": "tensor", "amax": {"ema": 0.75}}),
        pytest.param("mxfp8", {"scaling": "delayed", "history": 2, "margin": 1}, id="inductor"),
        pytest.param(
            "mxfp8", {"scaling": "tensor", "amax": {"ema": 0.75}}, id="inductor-ema", marks=pytest.mark.slow
        ),
    ],
)
def test_six_steps_are_those_by_hand(backend: str, use: dict[str, Any]):
    model = linear()
    decay = use.get("amax", {}).get("ema")
    by_hand = ByHand(model.weight, use.get("history", 1), use.get("margin", 0), decay)
    call = compiled(model, policy(**use), backend)
    for x, dy in steps(6):
        results, expected = run(call, model.weight, x, dy), by_hand.step(x, dy)
        for tensor, other in zip(results, expected, strict=True):
            assert sqnr_db(other, tensor) > 100
    kept = model.weight_amax_history
    assert kept.shape == (3, use.get("history", 1))
    for row, name in zip(kept, ("x", "w", "dy"), strict=True):
        torch.testing.assert_close(row, torch.tensor(by_hand.seen[name]), rtol=1e-6, atol=0)


def test_a_saved_model_goes_on_where_it_was():
    model = linear()
    call = compiled(model, policy())
    for x, dy in steps(3):
        run(call, model.weight, x, dy)
    saved = copy.deepcopy(model.state_dict())
    assert saved["weight_amax_history"].any(dim=1).all()
    x, dy = steps(4)[3]
    expected = run(call, model.weight, x, dy)

    fresh = linear()
    backend = mxcompile.Backend(policy=policy(), root=fresh)
    fresh.load_state_dict(saved)  # strict: the model has no histories yet, and makes room
    assert torch.equal(fresh.weight_amax_history, saved["weight_amax_history"])
    assert backend.options.policy.rules
    for tensor, other in zip(run(compiled(fresh, policy()), fresh.weight, x, dy), expected, strict=True):
        assert torch.equal(tensor, other)
    cold = linear()
    assert not torch.equal(run(compiled(cold, policy()), cold.weight, x, dy)[0], expected[0])


@pytest.mark.parametrize("length", [2, 5])
def test_of_another_length_the_newest_stay(length: int):
    model, by_hand = linear(), ByHand(linear().weight, 3)
    call = compiled(model, policy())
    for x, dy in steps(3):
        run(call, model.weight, x, dy)
        by_hand.step(x, dy)
    by_hand.length = length
    by_hand.seen = {name: seen[:length] for name, seen in by_hand.seen.items()}
    call = compiled(model, policy(scaling="delayed", history=length))
    x, dy = steps(4)[3]
    for tensor, other in zip(run(call, model.weight, x, dy), by_hand.step(x, dy), strict=True):
        assert sqnr_db(other, tensor) > 100
    kept = [seen + [0.0] * (length - len(seen)) for seen in by_hand.seen.values()]
    torch.testing.assert_close(model.weight_amax_history, torch.tensor(kept), rtol=1e-6, atol=0)


def test_compile_registers_history_buffers_before_a_state_dict_loads():
    saved = {"0.weight": torch.ones(8, 8), "0.weight_amax_history": torch.ones(3, 1024)}
    model = nn.Sequential(nn.Linear(8, 8, bias=False))
    mxcompile.compile(model, policy="fp8_delayed", blocks=["0"])
    model.load_state_dict(saved)
    assert torch.equal(model[0].weight_amax_history, torch.ones(3, 1024))
    with pytest.raises(RuntimeError, match="Unexpected key"):
        model.load_state_dict({**saved, "0.nothing_amax_history": torch.ones(3, 1024)})


def test_only_calls_that_train_move_histories_on():
    model = linear()
    call = compiled(model, policy())
    (x, dy), (other, _) = steps(2)
    run(call, model.weight, x, dy)
    before = model.weight_amax_history.clone()
    with torch.no_grad():
        call(other)
    assert torch.equal(model.weight_amax_history, before)
    call(other)  # no backward: the gradient's stays
    assert torch.equal(model.weight_amax_history[2], before[2])
    assert not torch.equal(model.weight_amax_history[0], before[0])


def test_training_after_inference_mode_moves_histories_on():
    """Lightning validates in inference mode before it trains."""
    model = linear()
    call = compiled(model, policy())
    (x, dy), (other, _) = steps(2)
    with torch.inference_mode():
        call(other)
    run(call, model.weight, x, dy)
    assert model.weight_amax_history[:, 0].gt(0).all()


def test_histories_of_a_converted_model_are_in_fp32_again():
    model = linear()
    call = compiled(model, policy())
    x, dy = steps(1)[0]
    run(call, model.weight, x, dy)
    before = model.weight_amax_history[:, 0].bfloat16().float()
    model.bfloat16()
    run(call, model.weight, x.bfloat16(), dy.bfloat16())
    assert model.weight_amax_history.dtype is torch.float32
    assert torch.equal(model.weight_amax_history[:, 1], before)


def test_nonfinite_step_surfaces_and_leaves_the_history_finite():
    model = linear()
    call = compiled(model, policy())
    x, dy = steps(1)[0]
    run(call, model.weight, x, dy)
    x[3, 5] = torch.inf
    y, dx, dw = run(call, model.weight, x, dy)
    assert y[3].isnan().all()
    assert y[:3].isfinite().all()
    assert dw[:, 5].isnan().all()
    assert dx.isfinite().all()
    assert model.weight_amax_history[0, 0] == 0
    assert model.weight_amax_history.isfinite().all()


class Block(Made, up=(40, 64, False), down=(64, 40, False)):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x)))


class Blocks(nn.Module):
    def __init__(self, recompute: bool = False, reentrant: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.recompute, self.reentrant = recompute, reentrant

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = x + (checkpoint(block, x, use_reentrant=self.reentrant) if self.recompute else block(x))
        return x


def gradients(model: nn.Module, call: Any, count: int = 3) -> list[Tensor]:
    for x, _ in steps(count):
        model.zero_grad()
        call(x.requires_grad_()).square().mean().backward()
    return [parameter.grad for parameter in model.parameters()]


def test_blocks_that_share_code_have_histories_of_their_own():
    whole, parts = Blocks(), Blocks()
    expected = gradients(whole, compiled(whole, policy()))
    torch._dynamo.reset()
    backend = EagerBackend(policy=policy(), root=parts)
    for block in parts.blocks:
        block.compile(backend=backend)
    for gradient, other in zip(gradients(parts, parts), expected, strict=True):
        torch.testing.assert_close(gradient, other)
    for name, kept in whole.named_buffers():
        torch.testing.assert_close(parts.get_buffer(name), kept)
    first, second = (block.up.weight_amax_history for block in parts.blocks)
    assert not torch.equal(first, second)


@pytest.mark.parametrize("outside", [True, False], ids=["around code", "inside code"])
def test_recomputed_blocks_read_the_scales_of_the_first_forward(outside: bool):
    plain, model = Blocks(), Blocks(recompute=True, reentrant=outside)
    expected = gradients(plain, compiled(plain, policy()))
    if outside:
        torch._dynamo.reset()
        backend = EagerBackend(policy=policy(), root=model)
        for block in model.blocks:
            block.compile(backend=backend)
        computed = gradients(model, model)
    else:
        computed = gradients(model, compiled(model, policy()))
    for gradient, other in zip(computed, expected, strict=True):
        torch.testing.assert_close(gradient, other)
    for name, kept in plain.named_buffers():
        torch.testing.assert_close(model.get_buffer(name), kept)


def test_micro_batches_move_on_one_by_one_and_nothing_compiles_again():
    model, counter = linear(), CompileCounter()
    backend = EagerBackend(policy=policy())

    def count(gm: Any, inputs: Any) -> Any:
        counter.frame_count += 1
        return backend(gm, inputs)

    call = torch.compile(model, backend=count, dynamic=True, fullgraph=True)
    for tokens in (24, 7, 50):
        call(torch.full((tokens, 40), float(tokens), requires_grad=True)).sum().backward()
    assert counter.frame_count == 1
    assert model.weight_amax_history[0].tolist() == [50.0, 7.0, 24.0]
    assert model.weight_amax_history[2].tolist() == [1.0, 1.0, 1.0]


def test_layers_that_read_one_tensor_share_its_cast():
    class Shared(Made, q=(40, 16, False), k=(40, 16, False)):
        def forward(self, x: Tensor) -> Tensor:
            return self.q(x) * self.k(x)

    model, backend = Shared(), EagerBackend(policy=policy())
    torch.compile(model, backend=backend)(torch.randn(3, 8, 40)).sum().backward()
    forward = backend.graphs[0].graph.find_nodes(op="call_function", target=ops.cast)
    assert len(forward) == 3  # x and two weights
    assert torch.equal(model.q.weight_amax_history[0], model.k.weight_amax_history[0])
    assert model.q.weight_amax_history[0, 0] > 0


def test_computed_weight_uses_its_current_amax_with_recorded_reason():
    class Computed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Parameter(torch.randn(16, 40)), nn.Parameter(torch.randn(16, 40))

        def forward(self, x: Tensor) -> Tensor:
            return nn.functional.linear(x, self.a * self.b)

    model = Computed()
    compiled(model, policy())(torch.randn(8, 40)).sum().backward()
    assert not dict(model.named_buffers())
    assert {gemm.reason for gemm in mxcompile.reports()[0].gemms} == {
        "policy: rule 1; scales of current tensors, no history: the weight is not a parameter of the graph"
    }


class Kernels(TorchDispatchMode):
    """Counts calls of operators that are no views: what a GPU would launch."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def launches(weights: int) -> int:
    """What histories of so many weights take in a step, beside the compiled code."""
    kept = {index: torch.rand(3, 16) for index in range(weights)}
    seen = {index: torch.rand(3) for index in kept}
    with Kernels() as kernels:
        delayed_scales._largest(kept)
        delayed_scales._shift(seen, kept, rows=slice(0, 2))
        delayed_scales._shift(seen, kept, rows=slice(2, 3))
    for index, history in kept.items():
        assert torch.equal(history[:, 0], seen[index])
    return kernels.count


def test_histories_of_many_weights_take_as_many_kernels_as_those_of_one():
    assert launches(50) == launches(1)


def test_states_begin_where_inductor_takes_them_to_begin():
    """At multiples of 16 bytes: else each is copied in every call."""
    seen: list[Tensor] = []

    def compiled(*args: Tensor) -> Sequence[Tensor]:
        seen.extend(args)
        return [torch.zeros(3)] * 5

    example = torch.zeros(3)
    tapped = delayed_scales.Tapped(gm=None, states=(example,) * 5, positions=tuple(range(5)), outputs=0)
    model = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(5))
    tree, inputs = Tree({"": model}), [GraphInput(path=f"{index}.weight") for index in range(5)]
    capture: Any = SimpleNamespace(tree=tree, inputs=inputs, readers=())
    scales = delayed_scales.DelayedScales(tapped, dict.fromkeys(range(5), 4), capture)
    scales.run(compiled, [*model.parameters()])
    assert len(seen) == 10
    assert all(state.data_ptr() % 16 == 0 for state in seen[5:])
