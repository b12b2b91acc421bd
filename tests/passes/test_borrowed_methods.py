"""Layers of a module that only one of its methods leads to have the name of the attribute with the method."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.eager_backend import EagerBackend
from helpers.reports import EVERYTHING, all_gemms
from torch import Tensor, nn
from torch.nn import functional as F

import mxcompile

WIDTH = 64


class Mlp(nn.Module):
    """Two layers. broken: whether a graph break lies between them."""

    def __init__(self, broken: bool = False) -> None:
        super().__init__()
        self.up, self.down, self.broken = nn.Linear(WIDTH, 96), nn.Linear(96, WIDTH), broken

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        if self.broken:
            torch._dynamo.graph_break()
        return self.down(h)

    def hook(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + self.forward(args[0])


class Hook(Mlp):
    """A module that is itself a hook."""

    def forward(self, module: nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        return out + super().forward(args[0])


class Pair(nn.Module):
    """Runs the two functions that it is given, each of which is a method of another module."""

    def __init__(self, *functions: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.second = functions

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


def replaced(broken: bool) -> nn.Module:
    """Its forward is that of another module, and its own layers do not run."""
    model = Mlp()
    model.forward = Mlp(broken).forward  # type: ignore[method-assign]
    return model


def hooked(broken: bool) -> nn.Module:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU())
    for hook in (Mlp(broken).hook, Mlp(broken).hook, Hook(broken)):
        model[0].register_forward_hook(hook)
    return model


MODELS: dict[str, tuple[Callable[[bool], nn.Module], set[str]]] = {
    "forward": (replaced, {"forward"}),
    "attributes": (lambda broken: Pair(Mlp(broken).forward, Mlp(broken).forward), {"first", "second"}),
    "partials": (
        lambda broken: Pair(functools.partial(Mlp(broken).forward), Mlp(broken).forward),
        {"first", "second"},
    ),
    "hooks": (hooked, {"0.hook0", "0.hook1", "0.hook2"}),
}
"""By name, the model, and the names of the modules behind its methods."""


@pytest.mark.parametrize("broken", [False, True], ids=["whole", "broken"])
@pytest.mark.parametrize("name", MODELS)
def test_module_behind_a_method_has_the_name_of_the_attribute(name: str, broken: bool) -> None:
    make, modules = MODELS[name]
    model, kept = make(broken), max(modules)
    layers = {f"{module}.{layer}" for module in modules for layer in ("up", "down")}
    layers |= {"0"} if name == "hooks" else set()
    assert {gemm.name for gemm in mxcompile.explain(model, torch.randn(32, WIDTH)).gemms} == layers
    policy = {**EVERYTHING, "rules": [{"match": {"name": f"{kept}.up"}, "use": "bf16"}, *EVERYTHING["rules"]]}
    torch.compile(model, backend=EagerBackend(policy=policy))(torch.randn(32, WIDTH)).sum().backward()
    records = {(gemm.name, gemm.precision) for gemm in all_gemms()}
    assert records == {(layer, "bf16" if layer == f"{kept}.up" else "mxfp8") for layer in layers}


def test_function_of_two_methods_names_layers_by_its_variables() -> None:
    encode, decode = Mlp().forward, Mlp().forward

    @torch.compile(backend=EagerBackend(policy=EVERYTHING, strict=True))
    def step(x: Tensor) -> Any:
        return decode(encode(x))

    step(torch.randn(32, WIDTH))
    names = {gemm.name for gemm in all_gemms()}
    assert names == {f"{function}.{layer}" for function in ("encode", "decode") for layer in ("up", "down")}
