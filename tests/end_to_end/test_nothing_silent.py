"""Each product of a layer that runs is quantized, or has a record with a reason, or strict mode raises."""

from __future__ import annotations

import functools
import logging

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.exc import BackendCompilerFailed
from torch.func import functional_call, grad
from torch.nn import functional as F

import mxcompile
from mxcompile.errors import UnsupportedError

pytestmark = pytest.mark.slow
REFUSED = (UnsupportedError, BackendCompilerFailed)
EVERYTHING = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Dropped(nn.Module):
    """Runs those of its layers that a call names."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Mlp() for _ in range(4))

    def forward(self, x: Tensor, kept: tuple[bool, ...]) -> Tensor:
        for layer, runs in zip(self.layers, kept, strict=True):
            if runs:
                x = layer(x)
        return x


def compiled(model: object, policy: object = EVERYTHING, *, strict: bool = True) -> object:
    mxcompile.clear_reports()
    return torch.compile(model, backend="mxfp8", options={"policy": policy, "strict": strict})


def gemms() -> list[mxcompile.report.GemmRecord]:
    return [gemm for report in mxcompile.reports() for gemm in report.gemms]


def text() -> str:
    return "\n".join(map(str, mxcompile.reports()))


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = (nn.Linear(64, 64) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        branches = (lambda y: self.first(y).relu()), (lambda y: self.second(y).tanh())
        return self.out(torch.cond(x.sum() > 0, *branches, (x,)))


def test_layers_in_branches_of_a_condition_are_an_error_in_strict_mode():
    with pytest.raises(REFUSED, match=r"(?s)first.*second"):
        compiled(Branches())(torch.randn(40, 64)).sum().backward()


def test_layers_in_branches_of_a_condition_have_records_with_the_cause():
    with torch.no_grad():
        compiled(Branches(), strict=False)(torch.randn(40, 64))
    reasons = {gemm.name: gemm.reason for gemm in gemms() if gemm.precision != "mxfp8"}
    assert reasons.keys() == {"first", "second"}
    assert all("cond" in reason for reason in reasons.values())
    assert 0 < mxcompile.reports()[-1].summary.flop_share < 1


def test_nested_regions_run_as_without_the_decorator():
    class Region(Mlp):
        forward = torch.compiler.nested_compile_region(Mlp.forward)

    model, x = nn.Sequential(*(Region() for _ in range(3))), torch.randn(40, 64)
    rules = [{"match": {"name": "1.*"}, "use": "bf16"}, *EVERYTHING["rules"]]
    with torch.no_grad():
        out = compiled(model, {"version": 1, "rules": rules})(x)
    precisions = {gemm.name: gemm.precision for gemm in gemms()}
    assert precisions == {
        f"{block}.{layer}": "bf16" if block == 1 else "mxfp8"
        for block in range(3)
        for layer in ("up", "down")
    }
    plain = nn.Sequential(*(Mlp() for _ in range(3)))
    plain.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(compiled(plain, {"version": 1, "rules": rules})(x), out)


def test_gradients_that_the_code_takes_itself_obey_the_policy_of_gradients():
    model, x = nn.Sequential(Mlp(), Mlp(), nn.Linear(64, 48)), torch.randn(40, 64)
    parameters = {name: value.detach() for name, value in model.named_parameters()}

    def loss(parameters: dict[str, Tensor], x: Tensor) -> Tensor:
        return functional_call(model, parameters, (x,)).square().mean()

    use = {"fprop": "mxfp8", "dgrad": "bf16", "wgrad": "bf16"}
    compiled(grad(loss), {"version": 1, "rules": [{"match": {"name": "*"}, "use": use}]})(parameters, x)
    assert {gemm.gemm for gemm in gemms() if gemm.precision == "mxfp8"} == {"fprop"}
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert {gemm.name for gemm in gemms()} == layers
    kinds = [gemm.gemm for gemm in gemms()]
    assert (kinds.count("fprop"), kinds.count("wgrad")) == (5, 5)


class Own(torch.autograd.Function):
    """A product with a derivative of its own, which Dynamo leaves to Python for its `jvp`."""

    @staticmethod
    def forward(x, w):
        return F.linear(x, w)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return dy @ w, dy.t() @ x

    @staticmethod
    def jvp(ctx, dx, dw):
        raise RuntimeError


class WithOwn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = (
            nn.Linear(64, 64),
            nn.Linear(64, 96, bias=False),
            nn.Linear(96, 64),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.relu(Own.apply(self.first(x), self.inner.weight)))


def test_gradients_that_ran_in_python_are_an_error_in_strict_mode():
    with pytest.raises(REFUSED, match="inner"):
        compiled(WithOwn())(torch.randn(40, 64)).square().mean().backward()


def test_gradients_that_ran_in_python_are_pending_in_the_report(caplog):
    with caplog.at_level(logging.WARNING, logger="mxcompile"):
        compiled(WithOwn(), strict=False)(torch.randn(40, 64)).square().mean().backward()
    assert "inner" in caplog.text
    kinds = {gemm.gemm for gemm in gemms() if gemm.name == "inner"}
    assert kinds == {"fprop", "dgrad", "wgrad"}
    assert mxcompile.reports()[-1].summary.flop_share < 1


@torch._dynamo.config.patch(recompile_limit=2)
def test_calls_past_dynamos_limit_are_in_the_report(caplog):
    call, x = compiled(Dropped().eval(), strict=False), torch.randn(40, 64)
    with torch.no_grad(), caplog.at_level(logging.WARNING, logger="mxcompile"):
        for index in range(4):
            call(x, tuple(number == index for number in range(4)))
    assert "recompile_limit" in text()


@torch._dynamo.config.patch(recompile_limit=2)
def test_a_call_past_dynamos_limit_is_an_error_in_strict_mode():
    call, x = compiled(Dropped().eval()), torch.randn(40, 64)
    kinds = [tuple(number == index for number in range(4)) for index in range(3)]
    with torch.no_grad():
        for kept in kinds[:2]:
            call(x, kept)
        with pytest.raises(REFUSED, match="recompile_limit"):
            call(x, kinds[2])


def test_skipped_layer_is_not_reported_as_run_outside(caplog):
    model = mxcompile.compile(Dropped().eval(), policy=EVERYTHING)
    with torch.no_grad(), caplog.at_level(logging.INFO, logger="mxcompile"):
        for kept in ((True, True, True, False), (True, False, True, True)):
            model(torch.randn(40, 64), kept)
    assert "ran outside of compiled code" not in caplog.text


class Ragged(nn.Module):
    """Attention over sequences of several lengths, of which no plan can be made."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.q, self.k, self.v, self.o, self.last = (nn.Linear(64, 64) for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q, k, v = (layer(h).unflatten(-1, (4, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        attended = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(-2)
        return self.last(x + self.o(attended))


def test_a_cut_model_without_a_plan_is_an_error_in_strict_mode():
    x = torch.nested.nested_tensor([torch.randn(n, 64) for n in (5, 9, 3)], layout=torch.jagged)
    with pytest.raises(REFUSED, match="plan"):
        compiled(Ragged())(x).values().square().sum().backward()


def decorated(forward):
    @functools.wraps(forward)
    def wrapper(*args, **kwargs):
        return forward(*args, **kwargs)

    return wrapper


def test_a_decorator_around_a_forward_changes_no_name():
    class Decorated(Mlp):
        forward = decorated(Mlp.forward)

    model, x = nn.Sequential(Decorated(), Decorated()), torch.randn(32, 64)
    planned = {gemm.name for gemm in mxcompile.explain(model, x).gemms}
    policy = {"version": 1, "rules": [{"match": {"name": "0.*"}, "use": "bf16"}]}
    compiled(model, policy, strict=False)(x).sum().backward()
    names = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert planned == {gemm.name for gemm in gemms()} == names
    assert {gemm.precision for gemm in gemms() if gemm.name == "0.up"} == {"bf16"}
