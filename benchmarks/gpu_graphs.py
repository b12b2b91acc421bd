"""Small graphs whose generated code the GPU benchmarks time.

A graph is a function of tensors that Inductor compiles with mxcompile's lowerings, so that benchmarks time
the templates that models run, with their prologues.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
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
from mxcompile.formats import Copy, Format, ScaleLayout, elem_type
from mxcompile.lowering.choices import defaults
from mxcompile.lowering.targets import Target

BF16 = torch.bfloat16
TENSOR, CHANNEL, BLOCKS = (f"e4m3 {extent} nearest" for extent in ("tensor", "channel", "1x128"))
DELAYED = f"{TENSOR} delayed:1024:0"
"""FP8 formats; `DELAYED` takes its scale from the amax history (delayed scaling)."""

BOTH = ("-1 elements", "-1 scales", "-2 elements transposed", "-2 scales")
"""Results of a cast that FP8 products read: qdata and scales, rowwise and columnwise."""


class Module(nn.Module):
    """Wraps a function as a module."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        """Returns the result of the function."""
        return self.function(*inputs)


def code(function: Callable[..., Any], inputs: Sequence[Tensor], target: str) -> mxcompile.CodegenResult:
    """Returns the code of `function` for `target`. inputs: tensors on the meta device."""
    return mxcompile.codegen(Module(function), *inputs, target=target, training=False)


Cast = Callable[[Sequence[Tensor], Tensor], Iterable[Tensor]]
"""Casts one or two matrices to all copies. The tensor is an FP32 scale [1, 1] for delayed scaling."""


@dataclass(frozen=True, kw_only=True)
class Producer:
    """The prologue of a cast. compute: returns one or two matrices. shapes: shapes of its BF16 inputs."""

    compute: Callable[..., tuple[Tensor, ...]]
    shapes: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, kw_only=True)
class Graph:
    """A graph to time. exact: whether it is only a cast, whose eager result is equal bit by bit."""

    name: str
    producer: Producer
    cast: Cast
    exact: bool

    def compute(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the casts of the producer's results. inputs: inputs of the producer, then the scale."""
        results = self.cast(self.producer.compute(*inputs[:-1]), inputs[-1])
        return tuple(copied for copied in results if copied.numel())

    def plain(self, *inputs: Tensor) -> tuple[Tensor, ...]:
        """Returns the producer's results without casts; copies of them if the graph is only a cast."""
        results = self.producer.compute(*inputs[:-1])
        return tuple(map(torch.clone, results)) if self.exact else results

    def inputs(self) -> list[Tensor]:
        """Returns random matrices whose rows differ in magnitude by powers of two, and a scale."""
        tensors = [torch.randn(shape, device=DEVICE) for shape in self.producer.shapes]
        rows = [torch.randint(-6, 6, (*x.shape[:-1], 1), device=DEVICE) for x in tensors]
        sources = [(x * torch.exp2(row)).bfloat16() for x, row in zip(tensors, rows, strict=True)]
        return [*sources, torch.full((1, 1), 0.5, device=DEVICE)]

    def compiled(self) -> Callable[..., Any]:
        """Returns `compute` compiled by the backend."""
        compiled: Callable[..., Any] = torch.compile(Module(self.compute), backend="mxfp8", dynamic=False)
        return compiled

    def code(self, target: str) -> mxcompile.CodegenResult:
        """Returns the code of the graph for `target`."""
        inputs = [torch.empty(shape, dtype=BF16, device="meta") for shape in self.producer.shapes]
        return code(self.compute, [*inputs, torch.empty(1, 1, device="meta")], target)


def casts(m: int, n: int, target: Target) -> Iterator[Graph]:
    """Yields the casts of [m, n] that models run on `target`, alone and fused with their prologues."""
    before = _producers(m, n)
    alone, every = tuple(before)[:1], tuple(before)
    chosen: list[tuple[str, Cast, Sequence[str]]] = []
    if target.native:
        layout = str(target.scale_layout)
        chosen += [
            ("rows", _of_each_matrix(_mx((-1,), layout)), alone),
            ("columns", _of_each_matrix(_mx((-2,), layout)), alone),
        ]
        chosen += [("both", _of_each_matrix(_mx((-1, -2), layout)), every)]
    else:
        chosen += [("value in rows", _operands("values", "none"), alone)]
        chosen += [("value in columns", _operands("none", "values"), alone)]
        chosen += [("both values", _operands("values", "values"), (*alone, *every[-1:]))]
        chosen += [("value and codes", _operands("values", "codes"), every[:-1])]
    if target.fp8_tiles:
        chosen += [("FP8, largest", _of_each_matrix(_fp8(TENSOR, "-1 largest")), alone)]
        chosen += [
            ("FP8, a known scale", _of_each_matrix(_with_delayed_scale), every),
            ("FP8, channels", _of_each_matrix(_fp8(CHANNEL, *BOTH)), alone),
        ]
    if "1x128" in target.fp8_tiles:
        chosen += [("FP8, blocks", _of_each_matrix(_fp8(BLOCKS, *BOTH)), every)]
    for cast_name, cast, producers in chosen:
        for name in producers:
            full = f"{name}, {cast_name}" if name else cast_name
            yield Graph(name=full, producer=before[name], cast=cast, exact=not name)


def _producers(m: int, n: int) -> dict[str, Producer]:
    def norm(x: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        return (functional.rms_norm(x, (n,), weight, 1e-6),)

    def swiglu(gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        return (functional.silu(gate) * up,)

    def gradients(gradient: Tensor, gate: Tensor, up: Tensor) -> tuple[Tensor, ...]:
        s = torch.sigmoid(gate.float())
        slope = s * (1 + gate.float() * (1 - s))
        return (gradient * (gate * s)).bfloat16(), (gradient * up * slope).bfloat16()

    x = (m, n)
    return {
        "": Producer(compute=lambda x: (x,), shapes=(x,)),
        "norm": Producer(compute=norm, shapes=(x, (n,))),
        "SwiGLU": Producer(compute=swiglu, shapes=(x, x)),
        "SwiGLU's gradients": Producer(compute=gradients, shapes=(x, x, x)),
    }


def _of_each_matrix(cast: Callable[[Tensor, Tensor], Iterable[Tensor]]) -> Cast:
    return lambda matrices, scale: [copied for x in matrices for copied in cast(x, scale)]


def _mx(dims: Sequence[int], layout: str) -> Callable[[Tensor, Tensor], Iterable[Tensor]]:
    copies = [str(Copy(format=Format(), dim=dim, layout=ScaleLayout(layout))) for dim in dims]
    return lambda x, _: ops.cast(x, copies)


def _operands(rows: str, columns: str) -> Cast:
    """Returns the cast of both matrices for emulated products: "values", "codes" or "none" per layout."""
    forms = (form for form in zip((-1, -2), (rows, columns), strict=True) if form[1] != "none")
    dtypes = {"values": BF16, "codes": None}
    copies = [str(Copy(format=Format(), dim=dim, dtype=dtypes[form])) for dim, form in forms]

    def cast(matrices: Sequence[Tensor], _: Tensor) -> Iterable[Tensor]:
        x, y = (*matrices, None)[:2]
        copies_of_x: list[Tensor] = ops.cast(x, copies, None, 0, None, None, y)
        return copies_of_x

    return cast


def _fp8(form: str, *copies: str) -> Callable[[Tensor, Tensor], Iterable[Tensor]]:
    words = [f"{form} @{copy}" for copy in copies]
    return lambda x, _: ops.cast(x, words)


def _with_delayed_scale(x: Tensor, scale: Tensor) -> Iterable[Tensor]:
    copies = [f"{DELAYED} @{copy}" for copy in (BOTH[0], BOTH[2], "-1 largest")]
    results: list[Tensor] = ops.cast(x, copies, None, 0, [scale, scale, None])
    return results


def scaled_mm(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """Returns the BF16 product of MX operands a [M, K] and b [K, N]; Inductor lowers it to the template."""
    words = (str(Format.mx(elem_type(side.dtype))) for side in (a, b))
    out: Tensor = ops.matmul(a, scale_a, b, scale_b, None, BF16, *words)
    return out


@contextmanager
def on_form(form: str) -> Iterator[None]:
    """Makes `form` the default of all dense products that it can run, in this context."""
    row = defaults.TableRow(
        kind=defaults.DENSE, when="all", holds=lambda *_: True, form=form, reason="to be timed"
    )
    with mock.patch.object(defaults, "TABLE", (row, *defaults.TABLE)):
        yield


def generated(function: Callable[..., Tensor], *inputs: Tensor, **options: Any) -> Callable[..., Tensor]:
    """Returns Inductor's code for `function`, compiled without caches, because cache keys omit the form."""
    graph = make_fx(function, tracing_mode="fake")(*inputs)
    compiled: Callable[..., Any] = torch._inductor.compile(
        graph, list(inputs), options={"force_disable_caches": True, **options}
    )
    return compiled


def quantize_mm(x: Tensor, b: Tensor, scale_b: Tensor) -> Tensor:
    """Returns the BF16 product of `x`, which the kernel of the product casts, and an MX operand b [K, N]."""
    out: Tensor = ops.quantize_mm(x, b, scale_b, None, BF16, str(Format()), str(Format()))
    return out


def weight_only(x: Tensor, qdata: Tensor, scale: Tensor) -> Tensor:
    """Returns the BF16 product of an unquantized `x` and a stored weight, qdata [N, K]."""
    out: Tensor = ops.weight_only_mm(x, qdata, scale, None, BF16, "e4m3 1x32 rceil")
    return out
