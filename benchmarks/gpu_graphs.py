"""Small graphs whose generated code the GPU benchmarks time, and what the model predicts of each.

A graph is a function of tensors that Inductor compiles with mxcompile's lowerings, so that what is timed are
the templates that models run, with their producers. The prediction is `mxcompile.codegen`'s, from machine
code, for the chip of this machine or any other: it needs no GPU.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import torch
from gpu_common import DEVICE
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn import functional

import mxcompile
from mxcompile import ops
from mxcompile.lowering.targets import Target
from mxcompile.lowering.templates import defaults

E4M3, ROUNDING, BF16 = torch.float8_e4m3fn, "rceil", torch.bfloat16


class Module(nn.Module):
    """A function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        """What the function gives."""
        return self.function(*inputs)


@dataclass(frozen=True, kw_only=True)
class Graph:
    """What is timed.

    compute: the function. plain: the same without casts, which Inductor compiles. shapes: of its inputs, in
    BF16. exact: whether `compute` run eagerly gives the same bits, as casts alone do.
    """

    name: str
    compute: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: tuple[tuple[int, ...], ...]
    exact: bool = False

    def inputs(self) -> list[Tensor]:
        """Random, rows of them binades apart."""
        made = [torch.randn(shape, device=DEVICE) for shape in self.shapes]
        rows = [torch.randint(-6, 6, (*shape[:-1], 1), device=DEVICE) for shape in self.shapes]
        return [(x * torch.exp2(row)).bfloat16() for x, row in zip(made, rows, strict=True)]

    def compiled(self) -> Callable[..., Any]:
        """As a model's code would be."""
        compiled: Callable[..., Any] = torch.compile(Module(self.compute), backend="mxfp8", dynamic=False)
        return compiled

    def predicted(self, target: Target) -> mxcompile.CodegenResult:
        """What `target` would launch; its `step` has the estimate."""
        inputs = [torch.empty(shape, dtype=BF16, device="meta") for shape in self.shapes]
        return mxcompile.codegen(Module(self.compute), *inputs, target=target.name, training=False)


def casts(m: int, n: int, target: Target) -> list[Graph]:
    """Casts of [m, n] alone and behind what stands before them in models."""
    scales = str(target.scale_layout)

    def both(x: Tensor) -> tuple[Tensor, ...]:
        made: tuple[Tensor, ...] = ops.quantize_both(x, E4M3, ROUNDING, scales)
        return made

    def one(dim: int) -> Callable[[Tensor], Any]:
        return lambda x: ops.quantize(x, dim, E4M3, ROUNDING, False, scales)

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return functional.rms_norm(x, (n,), weight, 1e-6)

    def swiglu(gate: Tensor, up: Tensor) -> Tensor:
        return functional.silu(gate) * up

    def gradients(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, Tensor]:
        s = torch.sigmoid(gate.float())
        slope = s * (1 + gate.float() * (1 - s))
        return (gradient * (gate * s)).bfloat16(), (gradient * up * slope).bfloat16()

    def four(*inputs: Tensor) -> tuple[Tensor, ...]:
        first, second = gradients(*inputs)
        return *both(first), *both(second)

    x = (m, n)
    return [
        Graph(name="rowwise", compute=one(-1), plain=torch.clone, shapes=(x,), exact=True),
        Graph(name="columnwise", compute=one(-2), plain=torch.clone, shapes=(x,), exact=True),
        Graph(name="both", compute=both, plain=torch.clone, shapes=(x,), exact=True),
        Graph(name="norm, both", compute=lambda *a: both(norm(*a)), plain=norm, shapes=(x, (n,))),
        Graph(name="swiglu, both", compute=lambda *a: both(swiglu(*a)), plain=swiglu, shapes=(x, x)),
        Graph(name="swiglu's gradients", compute=four, plain=gradients, shapes=(x, x, x)),
    ]


def scaled_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """The product of MX operands a [M, K], b [K, N], which Inductor makes the template of."""
    out: Tensor = ops.scaled_mm(a, scale_a, b, scale_b, None, BF16)
    return out


@contextmanager
def on_form(form: str) -> Iterator[None]:
    """While it lasts products of matrices get that form of `templates.defaults` where it can run them."""
    row = defaults.TableRow(
        kind=defaults.DENSE, when="all", holds=lambda *_: True, form=form, reason="to be timed"
    )
    with mock.patch.object(defaults, "TABLE", (row, *defaults.TABLE)):
        yield


def generated(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Callable[..., Tensor]:
    """Inductor's code for `function` of such tensors, made anew: no cache knows which form was asked for."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    made: Callable[..., Any] = torch._inductor.compile(
        graph, list(inputs), options={"force_disable_caches": True, **options}
    )
    return made


def quantize_mm(x: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """The same of an activation that the product's kernel casts."""
    out: Tensor = ops.quantize_mm(x, b, scale_b, None, E4M3, ROUNDING, BF16)
    return out


def weight_only(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """The same of an activation that stays as it is. qdata [N, K]."""
    out: Tensor = ops.weight_only_mm(x, qdata, scale, None, BF16)
    return out


class StoredLinear(nn.Module):
    """A linear layer [N, K] whose weight is stored in MXFP8."""

    def __init__(self, qdata: Tensor, scale: Tensor) -> None:
        super().__init__()
        self.register_buffer("qdata", qdata)
        self.register_buffer("scale", scale)

    def forward(self, x: Tensor) -> Tensor:
        """X [M, K] · Wᵀ."""
        return functional.linear(x, ops.dequantize(self.qdata, self.scale, -1, x.dtype))
