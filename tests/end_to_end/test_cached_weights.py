"""`weights: cached` against casts in every call: bit-equal, whatever is done to a weight in between.

Every attack runs on two copies of a model, one with the option and one without, and has to change what the
model gives. Copies are those that training really used: the operator that keeps them runs here as it does in
compiled code.
"""

from __future__ import annotations

import copy
import ctypes
import gc
import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.paces import mostly_slow
from test_saved_mxfp8 import Block, frozen, model, tokens
from torch import Tensor, nn

import mxcompile
from mxcompile.lowering.cpu.copies import COPIES
from mxcompile.lowering.targets import TARGETS

ROLES = ["qkv", "attn_out", "ffn_in", "ffn_out"]
LINEARS, LAYOUTS = 7, 2


def small(recompute: bool = False, dtype: torch.dtype = torch.bfloat16) -> nn.Module:
    made = model(recompute, dtype)
    made.layers = made.layers[:1]
    return made


def policy(weights: str, **use: Any) -> dict[str, Any]:
    return {"version": 1, "rules": [{"match": {"role": ROLES}, "use": {"weights": weights, **use}}]}


class Pair:
    """Two equal models, one of which keeps copies: what is done to one is done to the other."""

    def __init__(self, build: Callable[[], nn.Module] = small, **how: Any) -> None:
        self.autocast = how.pop("autocast", False)
        use = how.pop("use", {})
        self.models = [build(), build()]
        self.backends = [EagerBackend(policy=policy(word, **use)) for word in ("cast", "cached")]
        self.compiled = [
            torch.compile(own, backend=backend, **how)
            for own, backend in zip(self.models, self.backends, strict=True)
        ]
        self.state = copy.deepcopy(self.models[0].state_dict())

    def step(self, *shape: int) -> list[Tensor]:
        """Loss and gradients of both, which are equal; how often the second casts weights is in `casts`."""
        found: list[list[Tensor]] = []
        for own, compiled in zip(self.models, self.compiled, strict=True):
            own.zero_grad(set_to_none=True)
            before = COPIES.casts
            with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
                loss = compiled(tokens(*(shape or (2, 24))))
            loss.backward()
            self.casts = COPIES.casts - before
            grads = [p.grad for p in own.parameters() if p.grad is not None]
            found.append([loss.detach(), *grads])
        cast, cached = found
        assert len(cast) == len(cached) > 1
        assert all(torch.equal(a, b) for a, b in zip(cast, cached, strict=True))
        return cached

    def attack(self, change: Callable[[nn.Module], None]) -> None:
        """Do `change` to both and step; without it nothing is cast, with it something is, and it shows."""
        for own in self.models:
            own.load_state_dict(self.state)
        before = self.step()
        again = self.step()
        assert self.casts == 0
        assert all(torch.equal(a, b) for a, b in zip(before, again, strict=True))
        for own in self.models:
            change(own)
        after = self.step()
        assert self.casts > 0, change
        assert any(not torch.equal(a, b) for a, b in zip(before, after, strict=False)), change


def weights(own: nn.Module) -> list[nn.Parameter]:
    return [p for name, p in own.named_parameters() if "layers" in name and p.ndim == 2]


def another(own: nn.Module) -> nn.Module:
    made = copy.deepcopy(own)
    with torch.no_grad():
        for p in made.parameters():
            p.mul_(1.25)
    return made


@torch.no_grad()
def in_place(own: nn.Module) -> None:
    for p in own.parameters():
        p.add_(0.25)


def through_data(own: nn.Module) -> None:
    for p in own.parameters():
        p.data.mul_(1.5)


def one_element(own: nn.Module) -> None:
    weights(own)[3].data[5, 7] += 1.0


def one_sign(own: nn.Module) -> None:
    weights(own)[0].data[0, 0].neg_()


def rows_swapped(own: nn.Module) -> None:
    data = weights(own)[1].data
    data[[2, 40]] = data[[40, 2]]


def other_data(own: nn.Module) -> None:
    for p in weights(own):
        p.data = p.data * 0.5


def other_storage(own: nn.Module) -> None:
    with torch.no_grad():
        for p in weights(own):
            p.set_(p * 1.125)


def as_an_array(own: nn.Module) -> None:
    weights(own)[2].detach().view(torch.int16).numpy()[1, 1] ^= 0x0040


def raw_memory(own: nn.Module) -> None:
    p = weights(own)[4]
    source = (p.detach() * 2).contiguous()
    ctypes.memmove(p.data_ptr(), source.data_ptr(), p.nbytes)


def under_the_same_version(own: nn.Module) -> None:
    for p in weights(own):
        version = p._version
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
            p.mul_(0.75)
        assert p._version == version


def freed_and_filled(own: nn.Module) -> None:
    """What FSDP2 does to the weights it gathers: same tensor, same storage, other values."""
    for p in weights(own):
        values, storage = p.detach() * 1.25, p.untyped_storage()
        size = storage.nbytes()
        storage.resize_(0)
        storage.resize_(size)
        with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(p):
            p.copy_(values)


def swapped(own: nn.Module) -> None:
    for p, other in zip(weights(own), weights(another(own)), strict=True):
        torch._C._swap_tensor_impl(p, other)  # swap_tensors without its check: Dynamo's guards refer to p


def loaded(own: nn.Module) -> None:
    own.load_state_dict(another(own).state_dict())


def assigned(own: nn.Module) -> None:
    own.load_state_dict(another(own).state_dict(), assign=True)


def replaced(own: nn.Module) -> None:
    own.layers[0].gate.weight = nn.Parameter(own.layers[0].gate.weight.detach() * 1.5)


def averaged(own: nn.Module) -> None:
    """Trained weights go away for their mean, as evaluation with EMA does it."""
    mean = torch.optim.swa_utils.AveragedModel(
        own, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
    )
    mean.update_parameters(own)
    mean.update_parameters(another(own))
    for p, q in zip(own.parameters(), mean.module.parameters(), strict=True):
        p.data.copy_(q.data)


def moved_by_optimizer(own: nn.Module) -> None:
    torch.optim.SGD(own.parameters(), lr=2.0).step()


ATTACKS = [
    in_place, through_data, one_element, one_sign, rows_swapped, other_data, freed_and_filled, as_an_array,
    raw_memory, under_the_same_version, other_storage, swapped, loaded, assigned, averaged,
    moved_by_optimizer, replaced,
]  # fmt: skip


@pytest.mark.slow
def test_no_change_goes_unseen():
    subject = Pair()
    for attack in ATTACKS:
        try:
            subject.attack(attack)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{attack.__name__}: {error}") from error


def optimizers() -> Iterator[tuple[Any, dict[str, bool]]]:
    """Every optimizer of torch in each of its implementations that runs on dense CPU tensors."""
    for name in sorted(vars(torch.optim)):
        kind = getattr(torch.optim, name)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            continue
        if kind in (torch.optim.Optimizer, torch.optim.SparseAdam):  # the latter takes sparse gradients alone
            continue
        known = inspect.signature(kind).parameters
        ways = [{}, *({way: True} for way in ("foreach", "fused") if way in known)]
        yield from ((kind, way) for way in ways)


@pytest.mark.slow
def test_steps_of_every_optimizer_are_seen():
    """On FP32 weights: torch 2.13's fused SGD leaves BF16 ones as they are."""
    subject = Pair(lambda: small(dtype=torch.float32))
    kinds = [*optimizers()]
    assert len(kinds) > 25
    for kind, how in kinds:

        def step(own: nn.Module, kind: Any = kind, how: Any = how) -> None:
            given = weights(own) if kind.__name__ == "Muon" else list(own.parameters())
            optimizer = kind(given, lr=0.5, **how)
            losses = iter([torch.tensor(2.0), torch.tensor(1.0)])
            closure = (lambda: next(losses, torch.tensor(0.5)),) if kind is torch.optim.LBFGS else ()
            optimizer.step(*closure)

        try:
            subject.attack(step)
        except (AssertionError, RuntimeError) as error:
            raise AssertionError(f"{kind.__name__} {how}: {error}") from error


CASES: dict[str, tuple[Callable[[], nn.Module], dict[str, Any]]] = {
    "square": (small, {"use": {"weight_block": "32x32"}}),
    "dynamic": (small, {"dynamic": True}),
    "checkpointing": (lambda: small(recompute=True), {}),
    "autocast": (lambda: small(dtype=torch.float32), {"autocast": True}),
    "fp32": (lambda: small(dtype=torch.float32), {}),
    "frozen": (lambda: frozen(model()), {}),
    "saved": (small, {"use": {"saved": "mxfp8"}}),
}


@pytest.mark.parametrize("case", mostly_slow(CASES, "square"))
def test_one_cast_a_step_over_micro_batches(case: str):
    build, how = CASES[case]
    subject = Pair(build, **how)
    shapes = [(2, 24), (3, 20), (2, 24)] if "dynamic" in how else [(2, 24)] * 3
    optimizers = [torch.optim.AdamW(own.parameters(), lr=0.05) for own in subject.models]
    expected = LINEARS if case == "square" else LINEARS * LAYOUTS
    for step in range(2):
        casts = 0
        for shape in shapes:
            subject.step(*shape)
            casts += subject.casts
        frozen_too = LINEARS if case == "frozen" and step == 0 else 0  # rowwise, once and for all
        assert casts == expected + frozen_too
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.slow
def test_evaluation_between_steps_uses_the_same_copies():
    pair = Pair()
    pair.step()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            cast, before = pair.compiled[0](tokens(2, 24)), COPIES.casts
            assert torch.equal(cast, pair.compiled[1](tokens(2, 24)))
            assert COPIES.casts == before
    pair.attack(in_place)
    with torch.inference_mode():
        assert torch.equal(*(compiled(tokens(2, 24)) for compiled in pair.compiled))


@pytest.mark.slow
def test_first_call_in_inference_mode_leaves_copies_fit_for_training():
    subject = Pair()
    with torch.inference_mode():
        assert torch.equal(*(compiled(tokens(2, 24)) for compiled in subject.compiled))
    subject.step()


@pytest.mark.slow
def test_averaged_weights_come_and_go():
    """Evaluated with the mean, then trained on: neither sees the copies of the other."""
    pair = Pair()
    means = [
        torch.optim.swa_utils.AveragedModel(
            another(own), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.5)
        )
        for own in pair.models
    ]
    before = pair.step()
    for mean, own in zip(means, pair.models, strict=True):
        mean.update_parameters(another(another(own)))
        mean.update_parameters(own)
    losses = []
    for _ in range(2):
        trained = [[p.detach().clone() for p in own.parameters()] for own in pair.models]
        for own, mean in zip(pair.models, means, strict=True):
            for p, q in zip(own.parameters(), mean.module.parameters(), strict=True):
                p.data.copy_(q)
        with torch.no_grad():
            found = [compiled(tokens(2, 24)) for compiled in pair.compiled]
        assert torch.equal(*found)
        losses.append(found[0])
        for own, values in zip(pair.models, trained, strict=True):
            for p, value in zip(own.parameters(), values, strict=True):
                p.data.copy_(value)
        after = pair.step()
        assert pair.casts == LINEARS  # along rows; backward never ran with the mean
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert torch.equal(*losses)
    assert not torch.equal(losses[0], before[0])


@pytest.mark.slow
def test_replays_on_static_storages():
    """Called again and again with the same memory, refilled in between: what CUDA graphs do."""
    pair = Pair()
    states = [{k: v * (1 + i / 4) for k, v in pair.models[0].state_dict().items()} for i in range(3)]
    seen = []
    for state in (*states, *states):
        for own in pair.models:
            for name, p in own.named_parameters():
                p.data.copy_(state[name])
        seen.append(pair.step())
        assert pair.casts == LINEARS * LAYOUTS
    for first, second in zip(seen[:3], seen[3:], strict=True):
        assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert not torch.equal(seen[0][0], seen[1][0])


@pytest.mark.slow
@pytest.mark.parametrize("apart", ["blocks", "models"])
def test_equal_blocks_share_code_and_no_copies(apart: str):
    """Blocks compiled one by one, of one model or of two: Dynamo has one code for all."""
    torch.manual_seed(0)
    plain = [Block().bfloat16() for _ in range(3)]
    cached = copy.deepcopy(plain)
    backends = []
    for own, word in ((plain, "cast"), (cached, "cached")):
        backend = EagerBackend(policy=policy(word))
        backends.append(backend)
        for block in own:
            block.compile(backend=backend)
    x = torch.randn(2, 24, 64).bfloat16().requires_grad_()
    for _ in range(2):
        results = []
        for own in (plain, cached):
            if apart == "models":
                with torch.no_grad():
                    results.append([block(x) for block in own])
            else:
                y = x
                for block in own:
                    y = block(y)
                y.float().square().mean().backward()
                results.append([y.detach(), *(p.grad for block in own for p in block.parameters())])
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        for own in (plain, cached):
            through_data(own[1])
    once = 1 if apart == "models" else 2  # forward and, where it runs, backward
    assert all(len(backend.graphs) < 3 * once for backend in backends)


@pytest.mark.slow
def test_a_copied_model_has_copies_of_its_own():
    pair = Pair()
    pair.step()
    copies = [copy.deepcopy(own) for own in pair.models]
    with torch.no_grad():
        for made in copies:
            made.layers[0].q.weight.mul_(2)
    twins = Pair(lambda: copies.pop(0))
    first, second = pair.step(), twins.step()
    assert not torch.equal(first[0], second[0])
    pair.step()
    assert pair.casts == 0


def test_copies_go_with_their_weights():
    gc.collect()
    before = COPIES.num_bytes
    subject = Pair()
    subject.step()
    held = COPIES.num_bytes - before
    quantized = sum(p.numel() for p in weights(subject.models[1]))
    assert quantized * LAYOUTS < held < quantized * LAYOUTS * 1.05  # codes, and scales of short blocks
    del subject
    torch._dynamo.reset()
    mxcompile.clear_reports()
    gc.collect()
    assert COPIES.num_bytes == before


@pytest.mark.slow
def test_compiled_by_inductor_it_is_the_same():
    """Through code generation, whose memory planning must not write to a copy; counted as the report says."""
    found: list[list[Tensor]] = []
    for word in ("cast", "cached"):
        torch._dynamo.reset()
        mxcompile.clear_reports()
        own = small()
        compiled = torch.compile(own, backend="mxfp8", options={"policy": policy(word)})
        optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
        found.append([])
        for _ in range(2):
            optimizer.zero_grad()
            before = COPIES.casts
            for _ in range(3):
                loss = compiled(tokens(2, 24))
                loss.backward()
                found[-1].append(loss.detach())
            found[-1] += [p.grad.clone() for p in own.parameters()]
            summary = mxcompile.reports()[0].summary
            assert COPIES.casts - before == summary.cached_casts == (word == "cached") * LINEARS * LAYOUTS
            with torch.no_grad():
                found[-1].append(compiled(tokens(2, 24)))
            optimizer.step()
        quantized = sum(p.numel() for p in weights(own))
        element_bytes = 4 if TARGETS["cpu"].slow_dtypes else 2  # copies are in the dtype of the products
        assert summary.cached_bytes == (word == "cached") * LAYOUTS * element_bytes * quantized
    assert len(found[0]) == len(found[1])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
