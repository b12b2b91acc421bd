"""Serves a model unchanged, with stored weights, and with stored weights and MXFP8 activations."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import demo
from demo import Quality, Speed, Way
from mxcompile.cli.arguments import device, quiet
from mxcompile.errors import OptionError
from mxcompile.report.forms.tables import drawn

_STEPS = 150


def _check(options: argparse.Namespace) -> None:
    for name in ("policy", "seeds"):
        if getattr(options, name) is not None:
            raise OptionError(f"--{name} is for training: --serve trains once in BF16, then serves")


def serve(options: argparse.Namespace, bar: Any) -> None:
    """Trains and serves a model, prints the results, and writes them."""
    _check(options)
    settings = demo.quick_settings(device(options.device), options.steps or _STEPS)
    size = demo.Wide(device=settings.device, dtype=settings.dtype)
    ways = demo.ways(settings.dtype)
    bar.reset(total=settings.steps)
    bar.set_description("reading text")
    text = demo.standard_library()
    bar.set_description(f"training in {settings.baseline}")

    def progress(step: int, loss: float) -> None:
        bar.set_description(f"training in {settings.baseline}", refresh=False)
        bar.set_postfix_str(f" loss {loss:.3f}", refresh=False)
        bar.update()

    if note := demo.why_fp32(settings):
        bar.clear()
        print(note, flush=True)

    with quiet():
        model = demo.trained(settings, text, progress)
        qualities = list(_shown(bar, "quality", ways, demo.quality(model, settings, text, ways)))
        fast = list(_shown(bar, "speed", ways, demo.speed(demo.wide(size), size, ways)))
    bar.close()
    _print_quality(qualities, settings)
    _print_speed(fast, size)
    _write(options.output, qualities, fast)


def _shown(bar: Any, stage: str, ways: Sequence[Way], measured: Iterator[Any]) -> Iterator[Any]:
    """Yields the measurements, with their progress: a step for each way of serving."""
    bar.reset(total=len(ways))
    bar.set_postfix_str("")
    for way in ways:
        bar.set_description(f"{stage}, {way.label}"[:30])
        yield next(measured)
        bar.update()


def _print_quality(qualities: list[Quality], settings: Any) -> None:
    print(
        "What ran with stored weights alone: weights are read from MXFP8 (`stored` below), products and"
        " activations stay in the model's dtype.\n"
    )
    print(qualities[1].report)
    print(
        f"\nQuality: a Llama of {settings.layers} layers, {settings.width} wide, after {settings.steps} steps"
        " on Python source; on files held out."
    )
    rows = [
        [way.label, f"{way.perplexity:.4f}", f"{way.logits_gap:.2%}", _bytes(way, qualities[0])]
        for way in qualities
    ]
    headers = ["served", "perplexity a byte", "logits' gap", "all weights"]
    print(drawn([headers, *rows]))


def _print_speed(speeds: list[Speed], size: Any) -> None:
    print(
        f"\nSpeed: {size.layers} blocks of a Llama 3 8B, {size.width} wide, random weights; `generate`, one"
        f" sequence, static cache, {size.prompt} tokens given, {size.tokens} made."
    )
    rows = [
        [
            speed.label,
            f"{speed.prefill_ms:.0f} ms",
            f"{speed.tokens_per_s:.1f}",
            f"{speed.tokens_per_s / speeds[0].tokens_per_s:.2f}×",
            _bytes(speed, speeds[0]),
        ]
        for speed in speeds
    ]
    headers = ["served", "prefill", "tokens/s", f"over {speeds[0].label}", "all weights"]
    print(drawn([headers, *rows]))


def _bytes(result: Any, first: Any) -> str:
    return f"{result.weight_bytes / 1e6:.1f} MB ({result.weight_bytes / first.weight_bytes:.0%})"


def _write(out: Path, qualities: list[Quality], fast: list[Speed]) -> None:
    rows = {"quality": [_row(result) for result in qualities], "speed": [_row(result) for result in fast]}
    out.mkdir(parents=True, exist_ok=True)
    (out / "serving.json").write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    written = ["serving.json"]
    report = qualities[1].report
    if report is not None:
        report.save(out / "serving.html")
        written.append("serving.html")
    print(f"\nwritten to {out}/: {', '.join(written)}")


def _row(result: Quality | Speed) -> dict[str, Any]:
    names = (field.name for field in dataclasses.fields(result) if field.name != "report")
    return {name: getattr(result, name) for name in names}
