"""Validation loss of the demo's model, MXFP8 against BF16, over paired seeds.

Each seed trains three times on the same data: in BF16; in BF16 from weights changed by about one rounding,
which shows how far runs come apart by that alone; in MXFP8. Usage: python benchmarks/parity.py [--seeds 3]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import common
import torch
from torch import nn
from tqdm import tqdm

from mxcompile import demo

_ROUNDING = 2.0**-9
"""Relative: half the distance of BF16 values."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="pairs, from seed 0 on")
    parser.add_argument("--policy", default="nvidia", help="preset or policy file")
    parser.add_argument("--steps", type=int, default=demo.Settings().steps)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    options = parser.parse_args()
    if options.device == "cuda" and not torch.cuda.is_available():
        print("parity: skipped, no CUDA or ROCm device")
        return
    text = demo.standard_library()
    rows = [pair(seed, options, text) for seed in range(options.seeds)]
    common.show(rows)
    for column in ("rounding_gap", "gap"):
        gaps = [row[column] for row in rows]
        error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
        print(f"{column}: mean {statistics.mean(gaps):+.3%}, standard error {error:.3%}, {len(gaps)} seeds")
    common.write("parity", rows)


def pair(seed: int, options: argparse.Namespace, text: demo.Text) -> dict[str, Any]:
    """Final validation losses of one seed, in nats a byte, and how far they lie from BF16's."""
    settings = demo.Settings(seed=seed, steps=options.steps, device=options.device)
    plans: dict[str, Callable[[nn.Module], Any]] = {
        "bf16": lambda model: torch.compile(model, backend="inductor"),
        "nudged": lambda model: torch.compile(nudged(model), backend="inductor"),
        "mxfp8": lambda model: torch.compile(model, backend="mxfp8", options={"policy": options.policy}),
    }
    final = {}
    for name, compiled in plans.items():
        torch._dynamo.reset()
        with tqdm(total=settings.steps, desc=f"seed {seed} {name}", leave=False) as bar:
            run = demo.train(
                name, settings, text, compiled, lambda _, step, bar=bar: bar.update(step - bar.n)
            )
        final[name] = run.final
    return {
        "model": f"llama {settings.layers}×{settings.width}",
        "steps": settings.steps,
        "policy": options.policy,
        "seed": seed,
        "bf16_loss": round(final["bf16"], 5),
        "mxfp8_loss": round(final["mxfp8"], 5),
        "rounding_gap": round(final["nudged"] / final["bf16"] - 1, 6),
        "gap": round(final["mxfp8"] / final["bf16"] - 1, 6),
    }


def nudged(model: nn.Module) -> nn.Module:
    """`model` with every weight changed at random by about one rounding to BF16, in place."""
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            change = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.mul_(1 + _ROUNDING * change)
    return model


if __name__ == "__main__":
    main()
