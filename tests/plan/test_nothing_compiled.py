"""Whatever the shape of a model, its first call has compiled it, or says what it has not and why."""

from __future__ import annotations

import copy
import logging
import re
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.made import Made
from helpers.paces import mostly_slow
from torch import Tensor, nn
from ways import front_door, pending, report_of_all, rows

import mxcompile
from mxcompile.errors import ModelError, UnsupportedError

WIDTH = 8
POLICY = {"version": 1, "rules": [{"match": {"min_m": 1}, "use": "mxfp8"}]}


class Block(Made, up=(WIDTH, 2 * WIDTH), down=(2 * WIDTH, WIDTH)):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).relu())

    def run(self, x: Tensor) -> Tensor:
        return self.forward(x)


class Gated(Block):
    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(self.up(x).sigmoid())


class Model(Made):
    """Runs its parts in turn: modules in lists, in dicts, in lists of lists."""

    def forward(self, x: Tensor) -> Tensor:
        for part in self.children():
            x = run(part, x)
        return x


def run(part: nn.Module, x: Tensor) -> Tensor:
    match part:
        case nn.ModuleList():
            members = list(part)
        case nn.ModuleDict():
            members = list(part.values())
        case _:
            return part(x)
    for member in members:
        x = run(member, x)
    return x


class Apart(Made, first=Block, second=Gated):
    """Only holds others, like a list."""


class OfApart(Made, layers=Apart, blocks=lambda: nn.ModuleList([Block(), Block()])):
    def forward(self, x: Tensor) -> Tensor:
        return run(self.blocks, self.layers.second(self.layers.first(x)))


class OwnMatrix(Made, weight=lambda: nn.Parameter(torch.randn(WIDTH, WIDTH))):
    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


SHAPES: dict[str, Callable[[], nn.Module]] = {
    "a linear layer": lambda: nn.Linear(WIDTH, WIDTH),
    "a Sequential": lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH)),
    "a block": Block,
    "a matrix of its own": OwnMatrix,
    "one block in a list": lambda: Model(blocks=nn.ModuleList([Block()])),
    "one block in a list, and a head": lambda: Model(
        blocks=nn.ModuleList([Block()]), head=nn.Linear(WIDTH, WIDTH)
    ),
    "one block in a dict": lambda: Model(blocks=nn.ModuleDict({"0": Block()})),
    "two blocks": lambda: Model(blocks=nn.ModuleList([Block(), Block()])),
    "two different blocks": lambda: Model(blocks=nn.ModuleList([Block(), Gated()])),
    "two equal blocks and another": lambda: Model(blocks=nn.ModuleList([Block(), Gated(), Block()])),
    "blocks as attributes": lambda: Model(block1=Block(), block2=Block()),
    "blocks in a dict": lambda: Model(blocks=nn.ModuleDict({"a": Block(), "b": Block()})),
    "lists of lists": lambda: Model(
        stages=nn.ModuleList([nn.ModuleList([Block(), Block()]), nn.ModuleList([Block(), Block()])])
    ),
    "lists of one": lambda: Model(
        stages=nn.ModuleList([nn.ModuleList([Block()]), nn.ModuleDict({"a": Gated()})])
    ),
    "a stack beside a list of one": lambda: Model(
        stem=nn.ModuleList([Gated()]), blocks=nn.ModuleList([Block(), Block()])
    ),
    "a stack beside linear layers in a list": lambda: Model(
        stem=nn.ModuleList([nn.Linear(WIDTH, WIDTH)]), blocks=nn.ModuleList([Block(), Block()])
    ),
    "a module that only holds": OfApart,
}


def step(call: Callable[..., Tensor]) -> Tensor:
    y = call(torch.linspace(-1, 1, 4 * WIDTH).view(4, WIDTH))
    y.sum().backward()
    return y.detach()


@pytest.mark.parametrize("shape", mostly_slow(SHAPES, *list(SHAPES)[::2]))
def test_a_model_of_any_shape_is_compiled(shape: str, caplog: pytest.LogCaptureFixture):
    model = SHAPES[shape]()
    expected = rows(mxcompile.explain(model, torch.randn(4, WIDTH), policy=POLICY, target="cpu"))
    plain = step(model)
    with caplog.at_level(logging.WARNING, "mxcompile"):
        output = step(front_door(model, policy=POLICY, strict=True))
    assert not torch.equal(output, plain), "the values are those of MXFP8"
    assert rows(report_of_all()) == expected
    assert not pending(report_of_all())
    assert not [record for record in caplog.records if record.name.startswith("mxcompile")]


class ByAnotherMethod(Model):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block.run(x)
        return x


class OneByAnotherMethod(Model):
    def forward(self, x: Tensor) -> Tensor:
        return self.blocks[1].run(self.blocks[0](x))


class Disabled(Block):
    @torch.compiler.disable
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x)


def _pair() -> nn.ModuleList:
    return nn.ModuleList([Block(), Block()])


LEFT: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "by another method": (
        lambda: ByAnotherMethod(blocks=_pair()), "nothing of ByAnotherMethod was compiled.*blocks.0, blocks.1"
    ),
    "disabled": (Disabled, "nothing of Disabled was compiled"),
    "one of two": (lambda: OneByAnotherMethod(blocks=_pair()), r"ran outside of compiled code.*blocks\.1\."),
}  # fmt: skip


@pytest.mark.parametrize("shape", LEFT)
def test_uncompiled_model_warns_once_and_raises_under_strict(shape: str, caplog: pytest.LogCaptureFixture):
    make, message = LEFT[shape]
    with pytest.raises(UnsupportedError, match=message):
        step(front_door(make(), policy=POLICY, strict=True))
    forget()
    call = front_door(make(), policy=POLICY)
    with caplog.at_level(logging.WARNING, "mxcompile"):
        step(call)
        step(call)
    warnings = [record.getMessage() for record in caplog.records if record.name.startswith("mxcompile")]
    assert len(warnings) == 1
    assert re.search(message, warnings[0])
    assert "not compiled yet" in report_of_all().summary.warnings[0]


@pytest.mark.parametrize("callable_", [lambda x: x, Block().forward], ids=["function", "method"])
def test_only_modules_are_compiled_in_place(callable_: Any):
    with pytest.raises(ModelError, match=r"compile takes a .*Module"):
        mxcompile.compile(callable_)


def test_functions_and_methods_are_compiled_by_torch_compile():
    block = Block()
    plain = step(block)
    for function in (block.forward, block.run, lambda x: block(x)):
        assert not torch.equal(step(torch.compile(function, backend=EagerBackend(policy=POLICY))), plain)
        assert {gemm.precision for gemm in report_of_all().gemms} == {"mxfp8"}
        forget()


@pytest.mark.parametrize("way", [front_door, torch.compile], ids=["mxcompile.compile", "torch.compile"])
@pytest.mark.parametrize("shared", [False, True], ids=["own parameters", "shared parameters"])
def test_the_second_model_of_a_class_has_a_report_of_its_own(way: Any, shared: bool):
    backend, compiles = EagerBackend(policy=POLICY), []
    backend.before = compiles.append

    def compiled(model: nn.Module) -> Any:
        if way is torch.compile:
            return torch.compile(model, backend=backend)
        with mock.patch("mxcompile.compiler.front.Backend", return_value=backend):
            return mxcompile.compile(model)

    model = SHAPES["two blocks"]()
    step(compiled(model))
    first = rows(report_of_all())
    mxcompile.clear_reports()
    graphs = len(compiles)
    second = compiled(copy.deepcopy(model, {id(p): p for p in model.parameters()} if shared else {}))
    step(second)
    assert len(compiles) == graphs, "Dynamo runs the code of the first"
    assert rows(report_of_all()) == first
    step(second)
    assert len(mxcompile.reports()) == 1
    step(compiled(SHAPES["two different blocks"]()))
    assert len(mxcompile.reports()) == 2
