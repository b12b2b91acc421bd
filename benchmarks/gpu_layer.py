"""Model against measurement: a Llama-8B layer's kernels on the GPU of this machine beside their estimates.

Forward and backward of 8,192 tokens, compiled in BF16 and in MXFP8. Steps are timed in alternating rounds;
the profiler then tells the kernels apart. A generated kernel is compared with what `mxcompile.codegen`
predicts of it for this chip, summed over kernels whose names differ in their numbers alone; the kernels of
libraries, which have other names, are one row.
Without a GPU it says so and measures nothing. Usage: python benchmarks/gpu_layer.py [--policies bf16 nvidia]
"""

from __future__ import annotations

import argparse
import re
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import common
import gpu_common
import predicted
import torch
from torch.autograd import DeviceType

import mxcompile
from mxcompile.lowering import targets
from mxcompile.lowering.targets import Target
from mxcompile.offline import Launch

LIBRARY = "libraries"
Call = Callable[[], Any]


def family(kernel: str) -> str:
    """The name of a generated kernel without its number, `LIBRARY` of any other."""
    return re.sub(r"_\d+$", "", kernel) if kernel.startswith("triton_") else LIBRARY


def estimates(launches: Iterable[Launch]) -> dict[str, tuple[float, float, str]]:
    """By family: the sum of the estimates in µs, the bytes moved at least, what binds its longest launch."""
    sums: defaultdict[str, float] = defaultdict(float)
    moved: defaultdict[str, float] = defaultdict(float)
    longest: dict[str, tuple[float, str]] = {}
    for launch in launches:
        if launch.estimate is not None:
            name = family(launch.kernel)
            sums[name] += launch.estimate.us
            moved[name] += launch.num_bytes
            longest[name] = max(longest.get(name, (0.0, "")), (launch.estimate.us, launch.estimate.by))
    return {name: (us, moved[name], longest[name][1]) for name, us in sums.items()}


def compare(
    policy: str, launches: Iterable[Launch], measured: Mapping[str, float], target: Target
) -> list[dict[str, Any]]:
    """A row for each family, longest first. measured: µs of one step by the kernel's name."""
    found, taken = estimates(launches), defaultdict(float)
    for kernel, us in measured.items():
        taken[family(kernel)] += us
    rows = []
    for name in sorted({*found, *taken}, key=lambda name: -taken[name]):
        us, num_bytes, by = found.get(name, (0.0, 0.0, ""))
        rows.append(
            {
                "part": "kernels",
                "policy": policy,
                "kernel": name,
                "time_us": round(taken[name], 1),
                "predicted_us": round(us, 1),
                "over_predicted": round(taken[name] / us, 2) if us else None,
                "bound_by": by,
                **(gpu_common.bandwidth(taken[name], target.peak, num_bytes) if taken[name] else {}),
            }
        )
    return rows


def step(policy: str, tokens: int) -> Call:
    """Forward and backward of the layer, compiled by Inductor or by mxcompile's backend."""
    torch._dynamo.reset()
    layer = predicted.Layer().to(gpu_common.DEVICE, torch.bfloat16)
    x = torch.randn(1, tokens, 4096, device=gpu_common.DEVICE, dtype=torch.bfloat16, requires_grad=True)
    angles = torch.rand(1, tokens, 128, device=gpu_common.DEVICE)
    cos, sin, gradient = angles.cos().bfloat16(), angles.sin().bfloat16(), torch.randn_like(x)
    compiled: Any = torch.compile(layer, backend="mxfp8", dynamic=False, options={"policy": policy})
    wanted = [x, *layer.parameters()]
    return lambda: torch.autograd.grad(compiled(x, cos, sin), wanted, gradient)


def profiled(run: Call, steps: int = 5) -> dict[str, float]:
    """µs of one step by kernel."""
    run()
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run()
        torch.cuda.synchronize()
    events = [event for event in profiler.key_averages() if event.device_type is DeviceType.CUDA]
    return {event.key: event.self_device_time_total / steps for event in events}


def measure(target: Target, policies: list[str], tokens: int, repeats: int) -> list[dict[str, Any]]:
    """The steps, then the kernels of each."""
    runs = {policy: step(policy, tokens) for policy in policies}
    times, last = gpu_common.alternate(runs, repeats), policies[0]
    rows: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    for policy, run in runs.items():
        result = predicted.generated(target.name, policy, tokens)
        rows.append(
            {
                "part": "step",
                "policy": policy,
                "time_us": round(times[policy], 1),
                "predicted_us": round(result.step.us, 1),
                "over_predicted": round(times[policy] / result.step.us, 3) if result.step.us else None,
                "baseline": last,
                "ratio": round(times[last] / times[policy], 3),
            }
        )
        kernels += compare(policy, result.launches, profiled(run), target)
    return rows + kernels


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    both = [predicted.BF16, predicted.MXFP8]
    parser.add_argument("--policies", nargs="+", default=both, help="presets; the first is the base")
    parser.add_argument("--tokens", type=int, default=predicted.TOKENS)
    parser.add_argument("--repeats", type=int, default=10, help="timed rounds")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("gpu_layer: skipped, no CUDA or ROCm device here; nothing was measured")
        return
    target = targets.of_device(torch.device("cuda"))
    rows = measure(target, options.policies, options.tokens, options.repeats)
    common.show(rows)
    print(mxcompile.reports()[-1])
    common.write("gpu_layer", [row | gpu_common.device() for row in rows])


if __name__ == "__main__":
    main()
