"""A layer that a call does not run is told from one that runs outside of compiled code."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.reports import EVERYTHING
from test_left_to_python import OUTSIDE, WIDTH, batch, pending, raised, step
from test_nothing_compiled import Block
from torch import Tensor, nn
from ways import front_door, report_of_all, whole

from mxcompile.errors import UnsupportedError

pytestmark = pytest.mark.usefixtures("messages")


class Dropping(nn.Module):
    """LayerDrop: a call runs the layers in `kept`, with a graph break behind each if `broken`."""

    count = 6

    def __init__(self, *, broken: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(self.count))
        self.broken = broken

    def forward(self, x: Tensor, kept: tuple[int, ...]) -> Tensor:
        for number, layer in enumerate(self.layers):
            if number in kept:
                x = layer(x)
                if self.broken:
                    torch._dynamo.graph_break()
        return x


class Random(Dropping):
    """What is left out follows from random numbers, which no plan knows."""

    def forward(self, x: Tensor, kept: tuple[int, ...]) -> Tensor:
        for number, layer in enumerate(self.layers):
            if torch.rand([]) + 2 * (number not in kept) > 1.5:
                continue
            x = layer(x)
        return x


DROPS = {
    "front door": (Dropping, front_door),
    "whole": (Dropping, whole),
    "whole, broken": (lambda: Dropping(broken=True), whole),
    "random": (Random, front_door),
}


@pytest.mark.parametrize("drop", DROPS)
def test_skipped_layer_is_not_reported_as_run_outside(drop: str, messages: Any):
    make, way = DROPS[drop]
    call = way(make(), policy=EVERYTHING, strict=True)
    for kept in ((0, 1, 2, 4, 5), (0, 2, 3, 4, 5)):
        step(call, batch(), kept)
    assert messages() == []
    layers = {name.rpartition(".")[0] for name, _ in pending()}
    assert layers <= {"layers.3", "layers.1"}, "the other layers have run in compiled code"
    assert "outside of compiled code" not in str(report_of_all())


@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
def test_recompiled_calls_of_other_sizes_pass_strict_mode(way: Any, messages: Any):
    call = way(Dropping(broken=True), policy=EVERYTHING, strict=True)
    for rows, kept in ((4, (0, 1, 2)), (6, (0, 1, 2)), (9, (0, 2)), (1, (0, 1, 2, 3))):
        step(call, batch(rows), kept)
    assert messages() == []


class DroppingTail(Dropping):
    """The code that picks layers runs the last one by a method that is not compiled."""

    @torch._dynamo.disable
    def tail(self, x: Tensor) -> Tensor:
        return self.layers[5].forward(x)

    def forward(self, x: Tensor, kept: tuple[int, ...]) -> Tensor:
        return self.tail(super().forward(x, kept))


@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
def test_layer_run_outside_is_reported_without_skipped_layers(way: Any, messages: Any):
    with torch.no_grad():
        way(DroppingTail(), policy=EVERYTHING)(batch(), (0, 1))
    (message,) = messages()
    assert OUTSIDE in message
    assert message.endswith(": layers.5.up, layers.5.down")


class CutBlock(Made, first=(WIDTH, WIDTH, False), last=(WIDTH, WIDTH)):
    """Dynamo compiles its first layer, and the second one by another graph."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        torch._dynamo.graph_break()
        return self.last(x)


class CutBlocks(nn.Module):
    """Its blocks run the same codes. tied: they share a weight, which tells no block from another."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(CutBlock() for _ in range(3))
        for block in self.blocks if tied else ():
            block.first.weight = self.blocks[0].first.weight

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("tied", [False, True], ids=["", "tied"])
@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
def test_blocks_that_share_codes_pass_strict_mode(way: Any, tied: bool, messages: Any):
    call = way(CutBlocks(tied=tied), policy=EVERYTHING, strict=True)
    for rows in (4, 6):
        step(call, batch(rows))
    assert pending() == set()
    assert messages() == []


def half(*, strict: bool = False) -> nn.Module:
    """Its last three blocks have the code of the first three, but nothing compiles them."""
    model = Dropping()
    for layer in model.layers[:3]:
        layer.compile(backend=EagerBackend(policy=EVERYTHING, strict=strict))
    return model


def test_blocks_that_are_not_compiled_are_pending_and_in_a_warning(messages: Any):
    model = half()
    with torch.no_grad():
        model(batch(), range(6))
        assert {name.rpartition(".")[0] for name, _ in pending()} == {f"layers.{n}" for n in (3, 4, 5)}
        model(batch(), range(6))
    (message,) = messages()
    assert message.endswith(f"{OUTSIDE} (see TORCH_LOGS=graph_breaks): layers.3-5.up, layers.3-5.down")


def test_blocks_that_are_not_compiled_raise_under_strict_in_the_second_call():
    model = half(strict=True)
    with torch.no_grad():
        model(batch(), range(6))
        with pytest.raises(UnsupportedError, match=r"layers\.3-5\.up"):
            model(batch(), range(6))
        model(batch(), range(6))


class Repeated(Dropping):
    """Its layers run in a loop, as in ALBERT, and the first runs once more. broken: after a graph break."""

    count = 2

    def tail(self, x: Tensor) -> Tensor:
        return self.layers[0](x)

    def forward(self, x: Tensor, kept: tuple[int, ...]) -> Tensor:
        for _ in range(3):
            x = super().forward(x, kept)
        return self.tail(x)


class RepeatedOutside(Repeated):
    @torch._dynamo.disable
    def tail(self, x: Tensor) -> Tensor:
        return self.layers[0].forward(x)


@pytest.mark.parametrize("grad", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
def test_layer_run_in_compiled_code_and_outside_is_reported(way: Any, grad: bool, messages: Any):
    with torch.set_grad_enabled(grad):
        call = way(RepeatedOutside(), policy=EVERYTHING)
        for _ in range(2):
            call(batch(), range(2))
    (message,) = messages()
    assert "in compiled code and outside of it" in message, messages()
    assert message.endswith(": layers.0.up, layers.0.down")
    assert any(message in warning for warning in report_of_all().summary.warnings)
    assert "layers.0.up" in raised(RepeatedOutside(), batch(), range(2), way=way, train=grad)


@pytest.mark.parametrize("broken", [True, False], ids=["broken", "one_graph"])
@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
def test_repeated_layers_in_compiled_code_pass_strict_mode(way: Any, broken: bool, messages: Any):
    call = way(Repeated(broken=broken), policy=EVERYTHING, strict=True)
    for rows in (4, 6):
        step(call, batch(rows), range(2))
    assert messages() == []


class Probed(Made, body=(WIDTH, WIDTH), probe=(WIDTH, WIDTH), last=(WIDTH, WIDTH)):
    """A model whose probe has no part in the result: a compile leaves it out."""

    def watch(self, x: Tensor) -> None:
        self.probe(x)

    def forward(self, x: Tensor) -> Tensor:
        x = self.body(x)
        self.watch(x)
        torch._dynamo.graph_break()
        return self.last(x)


class ProbedTwice(Probed):
    """A layer of the result runs once more without a part in it."""

    def watch(self, x: Tensor) -> None:
        self.body(x)


@pytest.mark.parametrize("way", [whole, front_door], ids=lambda way: way.__name__)
@pytest.mark.parametrize("model", [Probed, ProbedTwice])
def test_layer_whose_result_nothing_reads_is_left_out_of_the_report(model: Any, way: Any, messages: Any):
    step(way(model(), policy=EVERYTHING, strict=True), batch())
    assert messages() == []
    assert {gemm.name for gemm in report_of_all().gemms} == {"body", "last"}


class ProbedAttribute(Probed):
    @torch._dynamo.disable
    def watch(self, x: Tensor) -> None:
        self.seen = self.probe.forward(x).relu()


class ProbedList(Probed):
    @torch._dynamo.disable
    def watch(self, x: Tensor) -> None:
        self.seen = [{"probe": self.probe.forward(x.detach())}]


class ProbedBuffer(Probed, state=lambda: nn.Buffer(torch.zeros(4, WIDTH))):
    @torch._dynamo.disable
    def watch(self, x: Tensor) -> None:
        self.state.copy_(self.probe.forward(x).detach())


class ProbedArgument(Probed):
    @torch._dynamo.disable
    def watch(self, x: Tensor) -> None:
        x.data.add_(self.probe.forward(x).detach())


@pytest.mark.parametrize("model", [ProbedAttribute, ProbedList, ProbedBuffer, ProbedArgument])
def test_layer_whose_result_outlives_the_call_is_in_the_report(model: Any, messages: Any):
    step(whole(model(), policy=EVERYTHING), batch())
    assert ("probe", "fprop") in pending()
    (message,) = messages()
    assert message.endswith(": probe")
