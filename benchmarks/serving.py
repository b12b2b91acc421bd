"""Measures serving of models on this machine: stored MXFP8 and MXINT8 weights against BF16, int8 and Q8_0.

    quality   a small Llama trained on Python's source: perplexity per byte on held-out files, error of the
              logits, bytes of all weights; also with BF16 weights and an MXFP8 cache
    speed     two blocks of a Llama 3 8B, random weights: a prompt of 512 tokens, then single tokens

The measurements are the same as in `make demo ARGS=--serve`. llama.cpp's Q8_0 is measured only for quality:
weights are rounded to it (int8 in blocks of 32 with an FP16 scale, amax / 127), and arithmetic is BF16.

Usage: python benchmarks/serving.py quality|speed [--steps 500] [--rounds 3] [--dry]
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import common
import demo
import torch
from demo.serving import Way
from torch import Tensor, nn
from tqdm import tqdm

from mxcompile.cli.arguments import quiet
from mxcompile.serving import quantize_weights_

Q8_0 = "llama.cpp q8_0 (values)"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("quality", "speed"))
    parser.add_argument("--steps", type=int, default=500, help="of training, for quality")
    parser.add_argument("--rounds", type=int, default=3, help="turns of each way, for speed")
    parser.add_argument("--dry", action="store_true", help="write no results, and measure a small model")
    options = parser.parse_args()
    with quiet():
        rows = (
            quality(options.steps)
            if options.what == "quality"
            else speed(dry=options.dry, rounds=options.rounds)
        )
    common.show(rows)
    if not options.dry:
        common.write("serving", rows)


def quality(steps: int) -> list[dict[str, Any]]:
    """Returns a row for each way of serving."""
    settings = demo.quick_settings(steps=steps)
    text = demo.standard_library()
    bar = tqdm(total=steps, desc="training", leave=False)
    model = demo.trained(settings, text, lambda *_: bool(bar.update()), torch.compile)
    dense = _from(model, lambda _: None)
    ways = (
        *demo.ways(settings.dtype),
        Way(label="mxfp8 keys and values", prepare=dense, cached=True),
        *peers(model),
        Way(label=Q8_0, prepare=_from(model, _q8_0_values)),
    )
    rows = list(_barred(demo.quality(model, settings, text, ways, count=16), len(ways)))
    return [
        {
            "what": "quality",
            "baseline": rows[0].label,
            "model": f"llama {settings.layers}×{settings.width}, {steps} steps",
            "run": row.label,
            "perplexity": round(row.perplexity, 5),
            "over_bf16": round(row.perplexity / rows[0].perplexity - 1, 6),
            "logits_gap": round(row.logits_gap, 5),
            "weight_bytes": _q8_0_bytes(model) if row.label == Q8_0 else row.weight_bytes,
        }
        for row in rows
    ]


def speed(*, dry: bool, rounds: int) -> list[dict[str, Any]]:
    """Returns a row for each way of serving, with medians over rounds in which all ways take turns."""
    small = {"layers": 1, "width": 256, "feed_forward": 512, "heads": 2, "key_value_heads": 1, "tokens": 2}
    dtype = demo.quick_settings().dtype
    size = demo.Wide(dtype=dtype, **small) if dry else demo.Wide(dtype=dtype, prompt=512, tokens=32)
    model = demo.wide(size)
    ways = (*demo.ways(dtype), *_integers(model), *peers(model))
    ways = (replace(ways[0], prepare=_from(model, lambda _: None)), *ways[1:])  # a round begins with them
    measured = (demo.speed(model, size, ways) for _ in range(rounds))
    rows = list(_barred(chain.from_iterable(measured), rounds * len(ways)))
    return [
        {
            "what": "speed",
            "baseline": ways[0].label,
            "model": f"llama {size.layers}×{size.width}, {size.prompt} tokens given, {size.tokens} made",
            "run": way.label,
            "rounds": rounds,
            "prefill_ms": _median(timed, lambda row, _: row.prefill_ms, 1),
            "tokens_per_s": _median(timed, lambda row, _: row.tokens_per_s, 2),
            "bf16_prefill_over_this": _median(timed, lambda row, bf16: bf16.prefill_ms / row.prefill_ms, 3),
            "tokens_over_bf16": _median(timed, lambda row, bf16: row.tokens_per_s / bf16.tokens_per_s, 3),
            "weight_bytes": timed[0][0].weight_bytes,
        }
        for at, way in enumerate(ways)
        for timed in [[*zip(rows[at :: len(ways)], rows[:: len(ways)], strict=True)]]
    ]


def _median(
    timed: Sequence[tuple[demo.Speed, demo.Speed]], figure: Callable[[Any, Any], float], digits: int
) -> float:
    """Returns the median of `figure` over (row, row of the baseline) of each round."""
    return round(statistics.median(figure(*pair) for pair in timed), digits)


def _barred(measured: Iterator[Any], total: int) -> Iterator[Any]:
    return iter(tqdm(measured, total=total, desc="ways", leave=False))


def _integers(model: nn.Module) -> tuple[Way, ...]:
    """Returns the ways with weights stored in MXINT8: weights only, and activations in MXINT8 too."""
    restored = _from(model, lambda _: None)

    def prepare(served: nn.Module) -> None:
        restored(served)
        quantize_weights_(served, "mxint8", progress=False)

    return tuple(
        Way(label=label, backend="mxfp8", options={"policy": policy}, prepare=prepare)
        for label, policy in (
            ("mxint8 weights", "bf16"),
            ("mxint8 weights and activations", "mxint8"),
        )
    )


def peers(model: nn.Module) -> tuple[Way, ...]:
    """Returns the way of torchao, with the current weights of `model`."""
    return (Way(label="torchao int8", prepare=_from(model, _int8)),)


def _from(model: nn.Module, change: Callable[[nn.Linear], None]) -> Callable[[nn.Module], None]:
    """Returns a function that restores the current weights of the layers, then applies `change` to each."""
    now = {name: module.weight.detach() for name, module in _blocks_layers(model)}

    def prepare(served: nn.Module) -> None:
        for name, layer in _blocks_layers(served):
            layer.weight = nn.Parameter(now[name].clone(), requires_grad=False)
            change(layer)

    return prepare


def _blocks_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the linear layers of a Llama that mxcompile stores by default: all except the head."""
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and ".layers." in name:
            yield name, module


def _int8(layer: nn.Linear) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(layer, Int8WeightOnlyConfig())


def _q8_0_values(layer: nn.Linear) -> None:
    blocks = layer.weight.detach().float().unflatten(-1, (-1, 32))
    scale = blocks.abs().amax(-1, keepdim=True) / 127
    inverse = torch.where(scale > 0, 1 / scale, 0)
    values: Tensor = (blocks * inverse).round() * scale.half().float()
    layer.weight = nn.Parameter(values.flatten(-2).to(layer.weight.dtype), requires_grad=False)


def _q8_0_bytes(model: nn.Module) -> int:
    stored = {id(layer.weight) for _, layer in _blocks_layers(model)}
    return sum(p.numel() * 34 // 32 if id(p) in stored else p.nbytes for p in model.parameters())


if __name__ == "__main__":
    main()
