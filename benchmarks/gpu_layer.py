"""Compares the kernels of a Llama-8B layer on this machine's GPU with their estimates.

Times forward and backward of 8,192 tokens under each preset, alternating with BF16. The profiler
then gives the time of each kernel. A generated kernel is compared with its estimate for this chip; kernels
whose names differ only in numbers are added up. All kernels of libraries are one row. Without a GPU it
prints a line and measures nothing. Usage: python benchmarks/gpu_layer.py [--policies bf16 nvidia]
"""

from __future__ import annotations

import functools
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import gpu_common
import predicted
import torch
from gpu_predicted import BF16, LAYER, CompiledProgram, LaunchWork, Row
from torch.autograd import DeviceType

import mxcompile
from mxcompile.lowering.targets import of_chip
from mxcompile.offline import Rates

LIBRARY = "libraries"
FP8 = ("fp8_delayed", "nvidia", "fp8_tensor", "fp8_rowwise", "fp8_block")
Call = Callable[[], Any]


def family(kernel: str) -> str:
    """Returns the name of a generated kernel without its number, `LIBRARY` for any other kernel."""
    return re.sub(r"_\d+$", "", kernel) if kernel.startswith("triton_") else LIBRARY


def compare(
    policy: str, works: Iterable[LaunchWork], measured: Mapping[str, float], rates: Rates
) -> list[Row]:
    """Returns a row for each family, longest first. measured: µs of one step by kernel name."""
    taken: defaultdict[str, float] = defaultdict(float)
    for kernel, us in measured.items():
        taken[family(kernel)] += us
    launches: defaultdict[str, list[LaunchWork]] = defaultdict(list)
    for launch in works:
        launches[family(launch.kernel)].append(launch)
    rows = []
    for name in sorted({*launches, *taken}, key=lambda name: -taken[name]):
        estimates = [launch.work.estimate(rates) for launch in launches[name]]
        us, num_bytes = (
            sum(estimate.us for estimate in estimates),
            sum(launch.work.num_bytes for launch in launches[name]),
        )
        rows.append(
            {
                "part": "kernels",
                "kernel": name,
                "shape": policy,
                "time_us": round(taken[name], 1),
                "predicted_us": round(us, 1),
                "over_predicted": round(taken[name] / us, 2) if us else None,
                "bound_by": max(estimates, key=lambda estimate: estimate.us).by if estimates else "",
                **(gpu_common.bandwidth(taken[name], rates.target.peak, num_bytes) if taken[name] else {}),
            }
        )
    return rows


@functools.lru_cache(maxsize=2)
def step(policy: str, tokens: int, small: bool) -> Call:
    """Returns a function that runs forward and backward of the compiled layer.

    It calls ``backward()``, which also updates the histories of delayed scales.
    """
    torch.manual_seed(0)
    layer = predicted.Layer(small).to(gpu_common.DEVICE, torch.bfloat16)
    x = torch.randn(1, tokens, layer.width, device=gpu_common.DEVICE, dtype=torch.bfloat16)
    x.requires_grad_()
    angles = torch.rand(1, tokens, layer.head, device=gpu_common.DEVICE)
    cos, sin, gradient = angles.cos().bfloat16(), angles.sin().bfloat16(), torch.randn_like(x)
    compiled: Any = torch.compile(layer, backend="mxfp8", dynamic=False, options={"policy": policy})

    def run() -> None:
        layer.zero_grad(set_to_none=True)
        x.grad = None
        compiled(x, cos, sin).backward(gradient)

    return run


def profiled(run: Call, steps: int = 5) -> dict[str, float]:
    """Returns the µs of each kernel in one step."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_type is DeviceType.CUDA]
    return {event.key: event.self_device_time_total / steps for event in events}


@dataclass(frozen=True, kw_only=True)
class LayerProgram(CompiledProgram):
    """The layer under the preset `kernel`, compared with the preset `base`."""

    base: str
    tokens: int
    small: bool

    def code(self, target: str) -> mxcompile.CodegenResult:
        """Returns the code of the layer for `target`."""
        return predicted.generated(target, self.kernel, self.tokens, small=self.small)

    def measure(self, rates: Rates, repeats: int) -> Iterator[Row]:
        """Yields a row for the step, then a row for each family of kernels."""
        runs = {"baseline": step(self.base, self.tokens, self.small)}
        runs[self.kernel] = run = step(self.kernel, self.tokens, self.small)
        times = gpu_common.alternate(runs, repeats)
        time = times[self.kernel]
        yield {**gpu_common.row(self.about, times, self.base), **self.expected(time, rates)}
        yield from compare(self.kernel, self.works(rates), profiled(run), rates)


def main() -> None:
    parser = gpu_common.parser(__doc__)
    parser.add_argument("--policies", nargs="+", help="presets; the first is the base (all of the chip)")
    parser.add_argument("--tokens", type=int, default=predicted.TOKENS)
    options = parser.parse_args()
    tokens = 256 if options.small else options.tokens
    torch._dynamo.config.recompile_limit = 64  # each policy compiles the code of one layer

    def programs(target: str) -> Iterator[LayerProgram]:
        fp8 = FP8 if of_chip(target).fp8_tiles else ("nvidia",)
        for policy in options.policies or (BF16, *fp8):
            base = (options.policies or [BF16])[0]
            yield LayerProgram(
                part=LAYER,
                kernel=policy,
                shape=f"{tokens} tokens",
                base=base,
                tokens=tokens,
                small=options.small,
            )

    gpu_common.run(options, programs)


if __name__ == "__main__":
    main()
