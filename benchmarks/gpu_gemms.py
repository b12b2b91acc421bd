"""Times the GEMMs of Llama's and Qwen's linear layers on this machine's GPU, with those of other libraries.

    products   operands cast in advance, in the layouts of fprop, dgrad and wgrad: torch.mm in BF16 (the
               baseline) and torch._scaled_mm in FP8; if the chip has an MX GEMM, also torch._scaled_mm in MX
               and the generated product: by default, in each of its forms, and autotuned. ``choices`` has
               the time of every kernel that autotuning tried
    linears    forward and backward of one compiled layer, casts included: BF16, mxcompile in MXFP8 and, where
               the chip multiplies it, FP8, torchao, Transformer Engine
    experts    forward and backward of grouped products, likewise

Products of few tokens are first compared with an FP64 reference. Times are medians of alternating rounds.
Without a GPU it prints a line and measures nothing.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import gpu_common
import gpu_graphs
import torch
from common import torchao_model, transformer_engine_linear
from gpu_common import LAYERS, Call, check_product, copies_for, quantized, rate, row, values
from gpu_predicted import CompiledProgram, Row
from torch import Tensor, nn
from torch._inductor.select_algorithm import add_feedback_saver
from torch.nn import functional

import mxcompile
from mxcompile.formats import Copy, Format, ScaleLayout
from mxcompile.lowering.choices import defaults
from mxcompile.lowering.targets import Target, of_chip
from mxcompile.offline import Rates

TOKENS = (1, 16, 128, 1024, 8192)
LINEAR_TOKENS = 8192
EXPERTS, EXPERT_SIZES = 8, ((14336, 4096), (4096, 14336))
_CHECKED = 256
"""Most tokens with a check: for more, the FP64 reference takes longer than all measurements."""
_LAYOUTS = {"fprop": (False, False), "dgrad": (False, True), "wgrad": (True, True)}
"""Whether a and b are stored with the contraction dimension outermost."""
_BF16, _OURS = "torch.mm (bfloat16)", "mxcompile"
_FORMS = (defaults.SPECIALIZED, defaults.PERSISTENT, defaults.POINTERS)
_FEW = 64
"""Most tokens for which the pointer form is the only form."""
Operands = tuple[Tensor, Tensor, Tensor, Tensor]
ALL: dict[str, Any] = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}


@dataclass(frozen=True, kw_only=True)
class GemmProgram(CompiledProgram):
    """A measurement of a layer. rows: measures on a target in n rounds. generated: returns the MXFP8 code."""

    rows: Callable[[Target, int], Iterator[Row]]
    generated: Callable[[str], mxcompile.CodegenResult]

    def code(self, target: str) -> mxcompile.CodegenResult:
        """Returns the code of the MXFP8 kernel for `target`."""
        return self.generated(target)

    def measure(self, rates: Rates, repeats: int) -> Iterator[Row]:
        """Yields a row for each kernel; mxcompile's layers have their estimate beside them."""
        for measured in self.rows(rates.target, repeats):
            has_rate = self.part != "products" and measured["kernel"] == _OURS
            yield measured | (self.expected(measured["time_us"], rates) if has_rate else {})


def products(n: int, k: int, target: Target, repeats: int) -> Iterator[Row]:
    """Yields a row for each kernel, number of tokens and layout; few tokens have only the layout of fprop."""
    dense, weights = quantized(n, k, copies_for(2 * n * k), target.scale_layout)
    for m in TOKENS:
        xs, sources = quantized(m, k, len(dense), target.scale_layout)
        for layout in _LAYOUTS if m >= LINEAR_TOKENS else ("fprop",):
            pairs = [
                (*_stored(a, layout, 0), *_turned(_stored(b, layout, 1)))
                for a, b in zip(sources, weights, strict=True)
            ]
            ours, tried = _generated(xs, pairs) if target.native else ({}, {})
            for name, run in ours.items() if m <= _CHECKED else ():
                check_product(run[0](), values(sources[0]), values(weights[0]), name)
            runs: dict[str, list[Call]] = {**ours, **_vendor(pairs, target)}
            runs["baseline"] = [lambda x=x, w=w: x @ w.t() for x, w in zip(xs, dense, strict=True)]
            times = gpu_common.graph_times(runs, repeats)
            for name in list(runs)[:-1]:
                about = {"part": "products", "kernel": name, "shape": f"{m}x{n}x{k}", "layout": layout}
                precision = "fp8" if "fp8" in name else "mxfp8"
                speed = rate(times[name], target.peak, flops=2 * m * n * k, precision=precision)
                choices = {"choices": tried} if "autotuned" in name else {}
                yield {**row(about, times, _BF16), **speed, **choices}


def _product_code(n: int, k: int, target: str) -> mxcompile.CodegenResult:
    chip = of_chip(target)
    with torch.device("meta"):
        sides = [torch.empty(rows, k, dtype=torch.bfloat16) for rows in (LINEAR_TOKENS, n)]
    copy = str(Copy(format=Format(), layout=chip.scale_layout))
    (a, scale_a), (b, scale_b) = (mxcompile.ops.cast(x, [copy]) for x in sides)
    return gpu_graphs.code(gpu_graphs.scaled_mm, [a, scale_a, *_turned((b, scale_b))], target)


def _stored(operand: gpu_common.Operand, layout: str, side: int) -> gpu_common.Operand:
    """Returns the operand [rows, K] with qdata in the memory order of `layout`. side: 0 for a, 1 for b."""
    codes, scale = operand
    return (codes.t().contiguous().t() if _LAYOUTS[layout][side] else codes), scale


def _turned(operand: gpu_common.Operand) -> gpu_common.Operand:
    """Returns the operand transposed to [K, N], as operators take b."""
    codes, scale = operand
    return codes.t(), scale if scale.ndim == 1 else scale.t()


def _generated(xs: list[Tensor], pairs: list[Operands]) -> tuple[dict[str, list[Call]], dict[str, float]]:
    """Returns the generated products by name, and the µs of each kernel that autotuning tried."""
    tried: dict[str, float] = {}

    def keep(timings: Any, *_: Any) -> None:
        finite = {choice.name: time for choice, time in timings.items() if math.isfinite(time)}
        tried.update({name: round(milliseconds * 1e3, 2) for name, milliseconds in finite.items()})

    add_feedback_saver(keep)
    tuned = {"max_autotune_gemm": True, "autotune_in_subproc": False}
    product = gpu_graphs.scaled_mm
    forms = {
        "mx_scaled_mm": gpu_graphs.generated(product, *pairs[0]),
        "mx_scaled_mm autotuned": gpu_graphs.generated(product, *pairs[0], **tuned),
    }
    for form in _FORMS if xs[0].shape[0] > _FEW else ():
        with gpu_graphs.on_form(form):
            forms[f"mx_scaled_mm {form}"] = gpu_graphs.generated(product, *pairs[0])
    runs = {name: [lambda pair=pair, run=run: run(*pair) for pair in pairs] for name, run in forms.items()}
    if xs[0].shape[0] <= _CHECKED:
        fused = gpu_graphs.generated(gpu_graphs.quantize_mm, xs[0], *pairs[0][2:])
        sources = zip(xs, pairs, strict=True)
        runs["mx_quantize_mm"] = [lambda x=x, b=b: fused(x, *b[2:]) for x, b in sources]
    return runs, tried


def _vendor(pairs: list[Operands], target: Target) -> dict[str, list[Call]]:
    """Returns torch._scaled_mm on the same elements: FP8 with one scale per tensor, and MX if supported."""
    unit, e8m0 = torch.ones((), device=gpu_common.DEVICE), torch.float8_e8m0fnu
    candidates = {
        "torch._scaled_mm (fp8, a scale a tensor)": [(a, b, unit, unit) for a, _, b, _ in pairs],
    }
    if target.scale_layout is ScaleLayout.TILED_128X4:
        candidates["torch._scaled_mm (mxfp8)"] = [
            (a, b, sa.view(e8m0), sb.view(e8m0)) for a, sa, b, sb in pairs
        ]
    runs: dict[str, list[Call]] = {}
    for name, arguments in candidates.items():
        try:
            torch._scaled_mm(*arguments[0], out_dtype=torch.bfloat16)
        except (RuntimeError, ValueError) as error:
            print(f"{name}: left out for {tuple(arguments[0][0].shape)}: {str(error).splitlines()[0]}")
            continue
        runs[name] = [
            lambda pair=pair: torch._scaled_mm(*pair, out_dtype=torch.bfloat16) for pair in arguments
        ]
    return runs


def linears(n: int, k: int, target: Target, repeats: int) -> Iterator[Row]:
    """Yields rows for forward and backward of one compiled linear layer."""
    layer = nn.Sequential(nn.Linear(k, n, bias=False)).to(gpu_common.DEVICE, torch.bfloat16)
    x = torch.randn(LINEAR_TOKENS, k, device=gpu_common.DEVICE, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(LINEAR_TOKENS, n, device=gpu_common.DEVICE, dtype=torch.bfloat16)
    compiled = {**_compiled(layer, target), **_others(layer, target)}
    yield from _steps("linears", f"{LINEAR_TOKENS}x{n}x{k}", compiled, (x,), dy, target, repeats)


def _linear_code(n: int, k: int, target: str) -> mxcompile.CodegenResult:
    with torch.device("meta"):
        layer = nn.Sequential(nn.Linear(k, n, bias=False)).bfloat16()
        x = torch.empty(LINEAR_TOKENS, k, dtype=torch.bfloat16, requires_grad=True)
    return mxcompile.codegen(layer, x, target=target, policy=ALL)


def _compiled(layer: nn.Module, target: Target) -> dict[str, Callable[..., Tensor]]:
    """Returns `layer` compiled in BF16, in mxcompile's MXFP8, and in its FP8 if the chip multiplies FP8."""
    torch._dynamo.reset()
    uses = {_OURS: "mxfp8"}
    if target.fp8_tiles and not isinstance(layer, Experts):
        uses["mxcompile fp8"] = "fp8"
    compiled = {"baseline": torch.compile(layer)}
    for name, use in uses.items():
        policy = {**ALL, "rules": [{"match": {"name": "*"}, "use": use}]}
        compiled[name] = torch.compile(layer, backend="mxfp8", options={"policy": policy})
    return compiled


def _others(layer: nn.Module, target: Target) -> dict[str, Callable[..., Tensor]]:
    """Returns the layers of other libraries, by name, if these are installed."""
    functions: dict[str, Callable[..., Tensor]] = {}
    try:
        converted = torchao_model(layer, emulated=not target.native)
        functions["torchao" if target.native else "torchao (emulated)"] = torch.compile(converted)
    except ImportError as error:
        print(f"torchao left out: {error}")
    try:
        recipe = "mxfp8" if target.native else "fp8"
        functions[f"transformer engine {recipe}"] = transformer_engine_linear(layer[0], native=target.native)  # type: ignore[index]
    except ImportError as error:
        print(f"Transformer Engine left out: {error}")
    return functions


class Experts(nn.Module):
    """A grouped product: each group of rows has its own weight."""

    def __init__(self, groups: int, k: int, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(groups, n, k, dtype=torch.bfloat16) / k**0.5)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        """Returns the products [M, N] of `x` [M, K]. offs: ends of the groups."""
        return functional.grouped_mm(x, self.weight.mT, offs=offs)


def experts(n: int, k: int, target: Target, repeats: int) -> Iterator[Row]:
    """Yields rows for the grouped products of Mixtral's experts, with groups of random sizes."""
    layer = Experts(EXPERTS, k, n).to(gpu_common.DEVICE)
    x = torch.randn(LINEAR_TOKENS, k, device=gpu_common.DEVICE, dtype=torch.bfloat16, requires_grad=True)
    ends = (torch.rand(EXPERTS, device=gpu_common.DEVICE) + 0.5).cumsum(0)
    offs = (ends / ends[-1] * LINEAR_TOKENS).round().to(torch.int32)
    dy = torch.randn(LINEAR_TOKENS, n, device=gpu_common.DEVICE, dtype=torch.bfloat16)
    shape = f"{EXPERTS} groups of {LINEAR_TOKENS}x{n}x{k}"
    yield from _steps("experts", shape, _compiled(layer, target), (x, offs), dy, target, repeats)


def _experts_code(n: int, k: int, target: str) -> mxcompile.CodegenResult:
    with torch.device("meta"):
        layer = Experts(EXPERTS, k, n)
        x = torch.empty(LINEAR_TOKENS, k, dtype=torch.bfloat16, requires_grad=True)
        offs = torch.empty(EXPERTS, dtype=torch.int32)
    return mxcompile.codegen(layer, x, offs, target=target, policy=ALL)


def _steps(
    part: str,
    shape: str,
    compiled: dict[str, Callable[..., Tensor]],
    inputs: tuple[Tensor, ...],
    dy: Tensor,
    target: Target,
    repeats: int,
) -> Iterator[dict[str, Any]]:
    """Yields a row with the time of forward and backward of each layer in `compiled`, and its TFLOP/s."""

    def step(run: Callable[..., Tensor]) -> Call:
        wanted = [inputs[0], *run.parameters()]  # type: ignore[attr-defined]
        return lambda: torch.autograd.grad(run(*inputs), wanted, dy)

    times = gpu_common.alternate({name: step(run) for name, run in compiled.items()}, repeats)
    flops = 3 * 2 * dy.numel() * inputs[0].shape[1]
    for name, time in times.items():
        precision = (
            "bf16" if name == "baseline" else "fp8" if "fp8" in name and "mxfp8" not in name else "mxfp8"
        )
        speed = rate(time, target.peak, flops=flops, precision=precision)
        about = {"part": part, "kernel": name, "shape": shape}
        yield {**row(about, times, "compiled layer (bfloat16)"), **speed}


PARTS = {
    "products": (products, _product_code),
    "linears": (linears, _linear_code),
    "experts": (experts, _experts_code),
}


def main() -> None:
    parser = gpu_common.parser(__doc__)
    parser.add_argument("--part", choices=PARTS, nargs="+", default=list(PARTS), help="what to measure")
    parser.add_argument("--model", choices=LAYERS, nargs="+", default=["llama-8b"], help="whose layers")
    options = parser.parse_args()

    def programs(target: str) -> Iterator[GemmProgram]:
        for part in options.part:
            if options.compile and part == "products" and not of_chip(target).native:
                continue  # all products are torch's own
            sizes = (
                EXPERT_SIZES if part == "experts" else [n_k for name in options.model for n_k in LAYERS[name]]
            )
            for n, k in sizes[:1] if options.small else sizes:
                rows, code = (functools.partial(function, n, k) for function in PARTS[part])
                yield GemmProgram(part=part, kernel="mxfp8", shape=f"{n}x{k}", rows=rows, generated=code)

    gpu_common.run(options, programs)


if __name__ == "__main__":
    main()
