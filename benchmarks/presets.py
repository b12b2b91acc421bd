"""The costs of presets and of `mxfp4`: SQNR of each layer's GEMMs, the demo's gap to BF16, the CPU's step.

    sqnr   audit of the demo's model: fprop, dgrad and wgrad of every layer against FP32
    gap    validation loss against BF16's after training the demo's model, seeds, data and schedule paired
    step   forward and backward of a small Llama over BF16 Inductor's, alternating in one process

Usage: python benchmarks/presets.py sqnr|gap|step [--presets …] [--seeds 2] [--steps 500] [--repeats 15]
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import common
import demo
import torch
import training_step
from demo.training import batches, build_model
from torch import nn
from tqdm import tqdm

import mxcompile
from mxcompile.policy.presets import PRESETS

MODEL = "llama 2×512"

ROLES = ["qkv", "attn_out", "ffn_in", "ffn_out"]


def preset_with(preset: str, **keys: Any) -> dict[str, Any]:
    """Returns the policy of `preset` with `keys` for the layers that it quantizes."""
    return {"version": 1, "preset": preset, "rules": [{"match": {"role": ROLES}, "use": keys}]}


POLICIES = {name: name for name in PRESETS if name not in ("bf16", "inference")} | {
    "mxint8, E4M3 gradients": preset_with("mxint8", precision="mxint8", grad_dtype="e4m3"),
    "mxfp4": demo.MXFP4_POLICY,
    "nvfp4, 4 over 6": preset_with("nvfp4", four_over_six={"x": 256, "w": 256}),
    "nvfp4, row-scaled": preset_with("nvfp4", row_scaled="x"),
    "nvfp4, dequantized backward": preset_with("nvfp4", backward="dequantized"),
}
"""Measured policies by name; the last five are not presets."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["sqnr", "gap", "step"])
    parser.add_argument("--presets", nargs="*", choices=POLICIES, default=[*POLICIES])
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--steps", type=int, default=demo.Settings().steps)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    measure = {"sqnr": sqnr, "gap": gaps, "step": steps}[options.what]
    results = []
    for row in measure(options):
        common.write("presets", [{"what": options.what, **row}])
        results.append({key: value for key, value in row.items() if key != "times_ms"})
    common.show(results)


def sqnr(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row per preset and layer with the SQNR of each GEMM in dB."""
    settings = demo.Settings()
    window = next(batches(demo.standard_library().train, settings, seed=0))
    tokens = {"input_ids": window[:, :-1], "labels": window[:, :-1]}
    for preset in options.presets:
        torch._dynamo.reset()
        audit = mxcompile.audit(build_model(settings), policy=POLICIES[preset], **tokens)
        layers: dict[str, dict[str, Any]] = {}
        for gemm in audit.numerics.gemms:
            layers.setdefault(gemm.name, {})[gemm.gemm] = round(gemm.sqnr_db, 1)
        for layer, measured in layers.items():
            yield {"preset": preset, "layer": layer, **measured}


def gaps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row per seed and preset with the final losses and their gap."""
    text = demo.standard_library()
    for seed in range(options.seeds):
        settings = demo.Settings(seed=seed, steps=options.steps)
        bf16 = _final("bf16", settings, text, lambda model: torch.compile(model))
        for preset in options.presets:
            chosen = {"policy": POLICIES[preset]}
            loss = _final(
                preset,
                settings,
                text,
                lambda model, chosen=chosen: torch.compile(model, backend="mxfp8", options=chosen),
            )
            yield {
                "preset": preset,
                "seed": seed,
                "steps": options.steps,
                "bf16_loss": round(bf16, 5),
                "loss": round(loss, 5),
                "gap": round(loss / bf16 - 1, 6),
            }


def _final(
    name: str, settings: demo.Settings, text: demo.Text, compiled: Callable[[nn.Module], Any]
) -> float:
    torch._dynamo.reset()
    with tqdm(total=settings.steps, desc=f"seed {settings.seed} {name}", leave=False) as bar:
        run = demo.train(name, settings, text, compiled, lambda _, step: bar.update(step - bar.n))
    return run.final


def steps(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row per preset. ratio_to_bf16: median over rounds of its time ÷ BF16's in that round."""
    sizes = training_step.MODELS[MODEL]
    model = common.llama(**sizes)
    tokens = torch.randint(sizes["vocabulary"], (training_step.BATCH, training_step.LENGTH))
    torch._dynamo.config.recompile_limit = len(options.presets) + 2  # above this limit Dynamo runs eagerly
    runs = {"bf16": training_step.step(torch.compile(copy.deepcopy(model)), tokens)}
    for preset in options.presets:
        compiled = torch.compile(copy.deepcopy(model), backend="mxfp8", options={"policy": POLICIES[preset]})
        runs[preset] = training_step.step(compiled, tokens)
    times = common.alternate(runs, repeats=options.repeats)
    for run, taken in times.items():
        yield {
            "preset": run,
            "model": MODEL,
            "batch": f"{training_step.BATCH}×{training_step.LENGTH}",
            "median_ms": round(statistics.median(taken), 2),
            "ratio_to_bf16": round(common.median_ratio(times, run, "bf16"), 3),
            "times_ms": [round(t, 2) for t in taken],
        }


if __name__ == "__main__":
    main()
