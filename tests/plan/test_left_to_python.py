"""Products that Dynamo leaves to Python are in the report with the cause, and an error in strict mode."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.made import Made
from helpers.reports import EVERYTHING
from test_gradients import Multiply
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from ways import Call, front_door, report_of_all, whole

from mxcompile.errors import UnsupportedError
from mxcompile.report.data.record import NOT_COMPILED

WIDTH = 8
OUTSIDE = "ran outside of compiled code"

pytestmark = pytest.mark.usefixtures("messages")


def batch(rows: int = 4) -> Tensor:
    return torch.linspace(-1, 1, rows * WIDTH).view(rows, WIDTH)


def step(call: Call, *inputs: Any) -> None:
    call(*inputs).square().mean().backward()


def pending() -> set[tuple[str, str]]:
    """Name and GEMM of each record without compiled code."""
    return {(gemm.name, gemm.gemm) for gemm in report_of_all().gemms if gemm.kernel == NOT_COMPILED}


def raised(model: nn.Module, *inputs: Any, way: Any = whole, train: bool = False) -> str:
    """Returns the message of the error that strict mode raises for a call of `model`."""
    forget()
    call = way(model, policy=EVERYTHING, strict=True)
    with torch.set_grad_enabled(train), pytest.raises(UnsupportedError) as error:
        call(*inputs)
    return str(error.value)


class WithJvp(Multiply):
    """Dynamo leaves a Function with a `jvp` to Python, and compiles its forward alone."""

    @staticmethod
    def jvp(ctx: Any, *tangents: Tensor) -> Tensor:
        raise NotImplementedError


class DisabledBackward(Multiply):
    backward = staticmethod(torch._dynamo.disable(Multiply.backward))


class Around(Made, first=(WIDTH, WIDTH), inner=(WIDTH, 2 * WIDTH, False), last=(2 * WIDTH, WIDTH)):
    """The product of an autograd.Function `function` between two layers."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.function.apply(self.first(x), self.inner.weight).relu())


class Alone(Around):
    def forward(self, x: Tensor) -> Tensor:
        return self.function.apply(x, self.inner.weight)


@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
@pytest.mark.parametrize("function", [WithJvp, DisabledBackward])
def test_own_backward_left_to_python_is_in_the_report(function: Any, way: Any, messages: Any):
    step(way(Around(function=function), policy=EVERYTHING), batch())
    assert pending() == {("inner", "dgrad"), ("inner", "wgrad")}
    products = {("first", 2), ("inner", 3), ("last", 3)}
    sizes = {"first": WIDTH, "inner": 2 * WIDTH, "last": 2 * WIDTH}
    flops = {name: number * sizes[name] for name, number in products}
    assert report_of_all().summary.flop_share == pytest.approx(1 - 2 * sizes["inner"] / sum(flops.values()))
    assert any("inner (dgrad, wgrad)" in warning for warning in report_of_all().summary.warnings)
    assert [message.endswith(": inner") for message in messages()] == [True]
    assert "gradients" in raised(Around(function=function), batch(), way=way, train=True)


class Shared(Around, inner=(WIDTH, WIDTH, False), last=(WIDTH, WIDTH)):
    """A layer has the weight of the product, so compiled code computes some of its gradients."""

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.inner(self.function.apply(self.first(x), self.inner.weight)).relu())


@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
def test_gradient_computed_in_compiled_code_and_outside_is_reported(way: Any, messages: Any):
    step(way(Shared(function=WithJvp), policy=EVERYTHING), batch())
    (message,) = messages()
    assert "gradients computed in compiled code and outside of it" in message
    assert message.endswith(": inner")
    assert any(message in warning for warning in report_of_all().summary.warnings)
    assert "gradients computed" in raised(Shared(function=WithJvp), batch(), way=way, train=True)
    with torch.no_grad():
        way(Shared(function=WithJvp), policy=EVERYTHING, strict=True)(batch())  # there is no backward


def test_backward_of_a_function_alone_raises_under_strict():
    model = Alone(function=WithJvp)
    assert "gradients that no compiled graph contains" in raised(model, batch(), train=True)
    with torch.no_grad():
        whole(Alone(function=WithJvp), policy=EVERYTHING, strict=True)(batch())  # there is no backward


@pytest.mark.parametrize("first", [torch.no_grad, torch.inference_mode])
def test_training_after_a_call_without_gradients_has_its_backward(first: Any):
    call = whole(Around(function=WithJvp), policy=EVERYTHING)
    with first():
        call(batch())
    assert pending() == set()
    step(call, batch())
    assert pending() == {("inner", "dgrad"), ("inner", "wgrad")}


class Loop(Shared, function=lambda: Multiply):
    """Its inner layer runs with gradients, without, and for an input that needs none."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.inner(x)
        torch._dynamo.graph_break()
        x = self.inner(x)
        for _ in range(2):
            x = self.inner(self.first(x)) + self.function.apply(x, self.inner.weight)
        torch._dynamo.graph_break()
        return self.last(self.inner(x.detach())) + self.last(x)


class Teacher(Around):
    """Its first layer runs without gradients."""

    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.inner(self.first(x))
        torch._dynamo.graph_break()
        return self.last(x)


class Again(
    Around, layers=lambda: nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU()) for _ in range(3))
):
    """Its layers run in reentrant checkpoints."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=True)
        return x


@pytest.mark.parametrize(
    ("make", "way"),
    [(Teacher, whole), (Again, front_door), (Loop, whole), (Loop, front_door)],
)
def test_compiled_or_unused_backwards_pass_strict_mode(make: Any, way: Any, messages: Any):
    step(way(make(), policy=EVERYTHING, strict=True), batch())
    assert pending() == set()
    assert messages() == []


class Tail(Made, body=(WIDTH, WIDTH), head=(WIDTH, WIDTH)):
    """Its last layer is in code that Dynamo does not compile."""

    @torch._dynamo.disable
    def tail(self, x: Tensor) -> Tensor:
        return self.head(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.body(x))


def in_place(model: nn.Module, **options: Any) -> Call:
    model.compile(backend=EagerBackend(**options))
    return model


def forward_alone(model: nn.Module, **options: Any) -> Call:
    model.forward = torch.compile(model.forward, backend=EagerBackend(**options))
    return model


@pytest.mark.parametrize("way", [whole, in_place, forward_alone], ids=lambda way: way.__name__)
def test_layers_that_ran_outside_raise_without_a_backward(way: Any, messages: Any):
    with torch.no_grad():
        way(Tail(), policy=EVERYTHING)(batch())
    assert pending() == {("head", "fprop")}
    assert len(messages()) == 1
    assert messages()[0].endswith(": head")
    assert OUTSIDE in messages()[0]
    assert OUTSIDE in raised(Tail(), batch(), way=way)


class Modes(Made, layer=(WIDTH, WIDTH)):
    """A layer that Dynamo compiles in one mode, and whose frame it gives up in another."""

    def forward(self, x: Tensor, steps: int = 0) -> Tensor:
        for _ in range(steps):
            x = self.layer(x)
            torch._dynamo.graph_break()
        return self.layer(x)


def test_model_without_compiled_code_warns_and_raises_under_strict(messages: Any, tmp_path: Path):
    with torch.no_grad():
        whole(Modes(), policy=EVERYTHING, report=tmp_path / "report.txt")(batch(), 2)
    assert NOT_COMPILED in (tmp_path / "report.txt").read_text()
    assert pending() == {("layer", "fprop")}
    assert report_of_all().summary.flop_share == 0
    assert [message.startswith("nothing of Modes was compiled") for message in messages()] == [True]
    assert "nothing of Modes was compiled" in raised(Modes(), batch(), 2)


class Debugged(Made, layers=lambda: nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))):
    """A flag sends one of its layers where Dynamo compiles nothing."""

    @torch._dynamo.disable
    def traced(self, x: Tensor) -> Tensor:
        return self.layers[1](x)

    def forward(self, x: Tensor, debug: bool = False) -> Tensor:
        x = self.layers[0](x)
        x = self.traced(x) if debug else self.layers[1](x)
        return self.layers[2](x)


@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
@pytest.mark.parametrize(
    ("make", "other", "cause"),
    [
        (Modes, {"steps": 2}, r"left Modes\.forward"),
        (Debugged, {"debug": True}, r"outside of compiled code.*: layers\.1$"),
    ],
    ids=["frame given up", "layer run outside"],
)
def test_what_a_later_call_leaves_to_python_is_in_the_report(
    make: Any, other: dict[str, Any], cause: str, way: Any, messages: Any
):
    call = way(make(), policy=EVERYTHING)
    with torch.no_grad():
        call(batch())
        assert report_of_all().summary.warnings == ()
        for _ in range(2):
            call(batch(), **other)
    (warning,) = report_of_all().summary.warnings
    assert re.search(cause, warning)
    assert messages() == [warning]
    torch._dynamo.reset()
    strict = way(make(), policy=EVERYTHING, strict=True)
    with torch.no_grad():
        strict(batch())
        with pytest.raises(UnsupportedError, match=cause):
            strict(batch(), **other)


class Broken(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        torch._dynamo.graph_break()
        return x


def test_graph_break_in_a_container_of_torch_raises():
    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), Broken(), nn.Linear(WIDTH, WIDTH))
    assert "nothing of Sequential was compiled" in raised(layers, batch())


def test_code_without_graphs_around_a_recurrent_layer_raises():
    layers = nn.Sequential(nn.GRU(WIDTH, WIDTH))
    with torch.no_grad():
        whole(layers, policy=EVERYTHING)(batch())
    assert {gemm.kernel for gemm in report_of_all().gemms} == {NOT_COMPILED}
    assert "nothing of Sequential was compiled" in raised(layers, batch())


class FailingBackend(EagerBackend):
    def __call__(self, *_: Any) -> Any:
        raise RuntimeError


def test_suppressed_errors_of_a_backend_raise():
    call = torch.compile(nn.Linear(WIDTH, WIDTH), backend=FailingBackend(policy=EVERYTHING, strict=True))
    with torch._dynamo.config.patch(suppress_errors=True), pytest.raises(UnsupportedError, match="nothing"):
        call(batch())
