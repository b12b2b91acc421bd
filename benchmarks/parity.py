"""Validation loss of the demo's model, MXFP8 against BF16, over paired seeds.

Each seed trains on the same data: in BF16; in BF16 from weights that are changed by about one rounding, which
shows the divergence that rounding alone causes; and in MXFP8, under one or several policies.
Usage: python benchmarks/parity.py [--seeds 3] [--steps 2000] [--policy nvidia --policy FILE]
"""

from __future__ import annotations

import argparse
import functools
import statistics
from collections.abc import Callable
from typing import Any

import common
import demo
import torch
from demo.training import build_model
from torch import nn
from tqdm import tqdm

_ROUNDING = 2.0**-9
"""Half the relative distance of neighbouring BF16 values."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=3, help="pairs, from seed 0 on")
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument(
        "--policy", action="append", help="preset or policy file; several are compared (default nvidia)"
    )
    parser.add_argument("--steps", type=int, default=demo.Settings().steps)
    options = parser.parse_args()
    text = demo.standard_library()
    policies = options.policy or ["nvidia"]
    seeds = range(options.first_seed, options.first_seed + options.seeds)
    rows = [row for seed in seeds for row in losses(seed, options, policies, text)]
    common.show(rows)
    conclude("rounding", [row["rounding_gap"] for row in rows if row["policy"] == policies[0]])
    for policy in policies:
        conclude(policy, [row["gap"] for row in rows if row["policy"] == policy])
    for policy in policies[1:]:
        gaps = [row["gap_to_first"] for row in rows if row["policy"] == policy]
        conclude(f"{policy}, from {policies[0]}", gaps)
    common.write("parity", rows)


def conclude(name: str, gaps: list[float]) -> None:
    """Prints the mean of `gaps` and its standard error."""
    error = statistics.stdev(gaps) / len(gaps) ** 0.5 if len(gaps) > 1 else float("nan")
    print(f"{name}: mean {statistics.mean(gaps):+.3%}, standard error {error:.3%}, {len(gaps)} seeds")


def losses(
    seed: int, options: argparse.Namespace, policies: list[str], text: demo.Text
) -> list[dict[str, Any]]:
    """Returns a row per policy with the final validation losses of a seed, in nats per byte, and gaps."""
    settings = demo.Settings(seed=seed, steps=options.steps)
    plans: dict[str, Callable[[nn.Module], Any]] = {
        "bf16": lambda model: torch.compile(model, backend="inductor"),
        "nudged": lambda model: torch.compile(model, backend="inductor"),
    }
    for policy in policies:
        plans[policy] = functools.partial(torch.compile, backend="mxfp8", options={"policy": policy})
    final = {}
    for name, compiled in plans.items():
        torch._dynamo.reset()
        with tqdm(total=settings.steps, desc=f"seed {seed} {name}", leave=False) as bar:
            run = demo.train(
                name,
                settings,
                text,
                compiled,
                lambda _, step, bar=bar: bar.update(step - bar.n),
                nudged if name == "nudged" else build_model,
            )
        final[name] = run.final
    return [
        {
            "model": f"llama {settings.layers}×{settings.width}",
            "steps": settings.steps,
            "policy": policy,
            "seed": seed,
            "bf16_loss": round(final["bf16"], 5),
            "mxfp8_loss": round(final[policy], 5),
            "rounding_gap": round(final["nudged"] / final["bf16"] - 1, 6),
            "gap": round(final[policy] / final["bf16"] - 1, 6),
            "gap_to_first": round(final[policy] / final[policies[0]] - 1, 6),
        }
        for policy in policies
    ]


def nudged(settings: demo.Settings) -> nn.Module:
    """Returns the demo's model with each weight changed at random by about one BF16 rounding."""
    model = build_model(settings)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            change = torch.randn(parameter.shape, generator=generator).to(parameter.device)
            parameter.mul_(1 + _ROUNDING * change)
    return model


if __name__ == "__main__":
    main()
