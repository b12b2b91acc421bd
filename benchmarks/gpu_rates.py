"""The rates that the GPU of this machine sustains, as a file that `mxcompile codegen --rates` reads.

It times copies of device memory, library products by format, attention by backend, and empty kernels, each
in several sizes. A rate is the least, median and largest share of the data sheet's peak. A kind that this
PyTorch or chip cannot run is omitted with the reason, and the built-in rate stays. The rates of instruction
issue, memory latency and generated products also stay, because no library kernel shows them. Each kind
rewrites the file ``rates_CHIP.json`` next to the rows. Without a GPU it prints a line and measures nothing.
Usage: python benchmarks/gpu_rates.py [--repeats 10]
"""

from __future__ import annotations

import functools
import json
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import common
import gpu_common
import torch
from gpu_predicted import Program, Row
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

from mxcompile import ops
from mxcompile.formats import Copy, Format, ScaleLayout, ScaleType
from mxcompile.lowering.chips.target import Peak
from mxcompile.lowering.targets import TARGETS, Target
from mxcompile.offline.rates import Rate, Rates, as_data

TOKENS, HEADS, HEAD = 8192, 32, 128
LAYERS = ((4096, 4096), (14336, 4096), (4096, 14336))
BLOCK = 128
COPIED = (1 << 26, 1 << 28, 1 << 30)
EMPTY = 100
SHAPES = [(TOKENS, n, k) for n, k in LAYERS]

Time = Callable[[Callable[[], Any]], float]
"""Median time of a call in µs."""


def memory(peak: Peak, time: Time) -> Iterator[float]:
    """Yields the bandwidth of copies as a share of the data sheet's, by size."""
    for num_bytes in COPIED:
        source = torch.empty(num_bytes, dtype=torch.uint8, device=gpu_common.DEVICE)
        into = torch.empty_like(source)
        us = time(functools.partial(into.copy_, source))
        yield 2 * num_bytes / us / 1e3 / peak.bandwidth_gbs


def unscaled(dtype: torch.dtype, peak: Peak, time: Time) -> Iterator[float]:
    """Yields the rate of `torch.mm` as a share of the peak, by shape; FP32 runs without TF32."""
    tflops = peak.tflops("fp32") if dtype is torch.float32 else peak.tflops("bf16")
    for m, n, k in SHAPES:
        a, b = _matrix(m, k).to(dtype), _matrix(n, k).to(dtype).t()
        yield _share(time(functools.partial(torch.mm, a, b)), (m, n, k), tflops)


def fp8(extent: str, peak: Peak, time: Time) -> Iterator[float]:
    """Yields the rate of FP8 `torch._scaled_mm`. extent: "tensor", "channel" or "block" (1×128, 128×128)."""
    for m, n, k in SHAPES:
        a, b = (_matrix(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
        blocks = (k // BLOCK, m), (n // BLOCK, k // BLOCK)
        sizes = {"tensor": ((), ()), "channel": ((1, m), (n, 1)), "block": blocks}[extent]
        scales = [torch.ones(size, device=gpu_common.DEVICE).mT if size else _unit_scale() for size in sizes]
        call = functools.partial(torch._scaled_mm, a, b.t(), *scales, out_dtype=torch.bfloat16)
        yield _share(time(call), (m, n, k), peak.tflops("fp8"))


def mxfp8(peak: Peak, time: Time) -> Iterator[float]:
    """Yields the rate of `torch._scaled_mm` with MX scales (1×32)."""
    for m, n, k in SHAPES:
        copy = str(Copy(format=Format(), layout=ScaleLayout.TILED_128X4))
        (a, scale_a), (b, scale_b) = (ops.cast(_matrix(rows, k), [copy]) for rows in (m, n))
        scales = (scale.view(torch.float8_e8m0fnu) for scale in (scale_a, scale_b))
        call = functools.partial(torch._scaled_mm, a, b.t(), *scales, out_dtype=torch.bfloat16)
        yield _share(time(call), (m, n, k), peak.tflops("mxfp8"))


def fp4(peak: Peak, time: Time) -> Iterator[float]:
    """Yields the rate of the library's product of packed NVFP4 operands with two-level scales."""
    from mxcompile.lowering.templates.vendor import mx_vendor_nvfp4_mm  # needs Triton

    form, unit = Format.parse("e2m1 1x16 two-level"), torch.ones(1, device=gpu_common.DEVICE)
    copy = str(Copy.packed(form, -1, ScaleLayout.TILED_128X4))
    for m, n, k in SHAPES:
        matrices = [_matrix(rows, k) for rows in (m, n)]
        a, (b, scale) = (ops.cast(x, [copy], None, 0, None, [ops.largest(x)]) for x in matrices)
        call = functools.partial(mx_vendor_nvfp4_mm, *a, b.t(), scale, unit, unit, out_dtype=torch.bfloat16)
        yield _share(time(call), (m, n, k), peak.tflops("fp4"))


def attention(backend: SDPBackend, backward: bool, peak: Peak, time: Time) -> Iterator[float]:
    """Yields the rate of causal attention: half of two products in forward, half of five in backward."""
    for length in (4096, TOKENS):
        shape = (1, HEADS, length, HEAD)
        q, k, v = (_matrix(*shape).requires_grad_(backward) for _ in range(3))
        gradient = _matrix(*shape)

        def forward(q: Any = q, k: Any = k, v: Any = v) -> torch.Tensor:
            with sdpa_kernel(backend):
                return F.scaled_dot_product_attention(q, k, v, is_causal=True)

        call: Callable[[], Any] = forward
        if backward:
            out = forward()
            call = functools.partial(torch.autograd.grad, out, (q, k, v), gradient, retain_graph=True)
        products = HEADS * (5 if backward else 2) / 2
        yield _share(time(call), (length, length, HEAD), peak.tflops("bf16") / products)


def launch(_: Peak, time: Time) -> Iterator[float]:
    """Yields the µs of a kernel with almost no work in a CUDA graph of such kernels."""
    x = torch.zeros(1, device=gpu_common.DEVICE)

    def run() -> None:
        for _ in range(EMPTY):
            x.add_(1)

    yield time(_captured(run)) / EMPTY


def _captured(run: Callable[[], None]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph.replay


def _unit_scale() -> torch.Tensor:
    return torch.ones((), device=gpu_common.DEVICE)


def _matrix(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=gpu_common.DEVICE, dtype=torch.bfloat16)


def _share(us: float, shape: tuple[int, int, int], tflops: float) -> float:
    m, n, k = shape
    return 2 * m * n * k / us / 1e6 / tflops


BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}

KINDS: dict[str, Callable[[Peak, Time], Iterator[float]]] = {
    "memory": memory,
    "bf16": functools.partial(unscaled, torch.bfloat16),
    "fp32": functools.partial(unscaled, torch.float32),
    **{f"fp8_{extent}": functools.partial(fp8, extent) for extent in ("tensor", "channel", "block")},
    "mxfp8": mxfp8,
    "fp4": fp4,
    **{name: functools.partial(attention, backend, False) for name, backend in BACKENDS.items()},
    **{f"{name}_backward": functools.partial(attention, backend, True) for name, backend in BACKENDS.items()},
    "launch_us": launch,
}
"""Functions that measure a rate, by its kind."""


def runs_on(kind: str, target: Target) -> bool:
    """Whether the chip multiplies the formats of `kind`."""
    match kind.partition("_"):
        case "fp4", *_:
            return ScaleType.E4M3 in target.fp4_scales
        case "mxfp8", *_:
            return target.native
        case "fp8", _, extent:
            return {"block": "1x128"}.get(extent, extent) in target.fp8_tiles
    return True


@dataclass(frozen=True, kw_only=True)
class RateProgram(Program):
    """Measures one kind of rate. measured: all rates measured so far, by kind."""

    measured: dict[str, Rate]

    def measure(self, rates: Rates, repeats: int) -> Iterator[Row]:
        """Yields a row with the rate and the built-in rate. Adds the rate to the file of rates."""
        target = rates.target
        assert target.peak is not None, f"{target.name} has no peaks"
        kind = self.kernel
        try:
            values = sorted(KINDS[kind](target.peak, timer(repeats)))
        except (RuntimeError, ValueError) as error:
            yield {**self.about, "left_out": str(error).strip().splitlines()[0]}
            return
        ends = values[::-1] if kind.endswith("_us") else values
        centre, source = statistics.median(values), "measured by gpu_rates.py"
        self.measured[kind] = rate = Rate(low=ends[0], centre=centre, high=ends[-1], source=source)
        save(target, self.measured)
        table = rates.table[kind]
        yield {
            **self.about,
            "rate": round(rate.centre, 3),
            "range": [round(rate.low, 3), round(rate.high, 3)],
            "predicted": table.centre,
            "predicted_range": [table.low, table.high],
        }


def timer(repeats: int) -> Time:
    """Returns a function that measures the median device time of a call, in µs."""
    return lambda run: gpu_common.alternate({"run": run}, repeats)["run"]


def save(target: Target, rates: dict[str, Rate]) -> None:
    """Writes `rates` as a file for ``--rates``."""
    path = common.folder() / f"rates_{target.name}.json"
    data = as_data(target.name, rates, **gpu_common.device(), **common.environment())
    path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")


def main() -> None:
    options = gpu_common.parser(__doc__).parse_args()
    if options.compile:
        print("gpu_rates: skipped, nothing of it is compiled")
        return

    def programs(name: str) -> Iterator[RateProgram]:
        rates: dict[str, Rate] = {}
        for kind in KINDS:
            if runs_on(kind, TARGETS[name]):
                yield RateProgram(part="rates", kernel=kind, shape="", measured=rates)

    gpu_common.run(options, programs)


if __name__ == "__main__":
    main()
