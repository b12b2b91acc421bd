"""Draws the latest results of `decode_cpu.py` and `serving.py`: docs/images/serving.png.

The newest row of each measurement on the chosen class of CPU counts. Speeds are relative to BF16 under
Inductor.

Usage: python benchmarks/plot_serving.py [--cpu "AVX-512 BF16"] [-o docs/images/serving.png]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import common

LAYERS = {
    "mxcompile mxfp8": "C0", "mxcompile mxfp4": "#5ba3d9", "mxcompile nvfp4": "#a6cdea", "torchao int8": "C1",
    "llama.cpp q8_0": "#5b6068", "llama.cpp q4_0 repack": "#8a8f98", "llama.cpp mxfp4 repack": "#bfc4cc",
}  # fmt: skip
"""Colours of the runs of one layer that are drawn; each project has a hue."""

COLORS = {"mxfp8": "C0", "stored weights": "C0", "int8": "C1", "q8_0": "#5b6068", "bf16": "#b8c4d6"}
"""Colours of the runs of a model. The first key that the label contains decides."""

FIRST_CLASS = "AVX-512 BF16"
"""Class of CPU of rows without the field."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("-o", "--output", type=Path, default=common.ROOT / "docs" / "images" / "serving.png")
    parser.add_argument("--cpu", default=FIRST_CLASS, help="class of CPU, such as AVX2")
    options = parser.parse_args()
    output = options.output
    layers = newest("decode_cpu", ("weight", "rows", "run"), options.cpu)
    models = newest("serving", ("what", "run"), options.cpu)
    draw(layers, models, output)
    print(f"written to {output}")


def newest(name: str, keys: Iterable[str], cpu: str) -> list[dict[str, Any]]:
    """Returns the newest row of each measurement of a benchmark on CPUs of the class `cpu`."""
    path = common.RESULTS / f"{name}.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    newest = {tuple(line[key] for key in keys): line for line in lines if line.get("cpu", FIRST_CLASS) == cpu}
    return [*newest.values()]


def draw(layers: list[dict[str, Any]], models: list[dict[str, Any]], output: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 8), layout="constrained", dpi=120)
    (single, many), (speed, quality) = figure.subplots(2, 2)
    shapes = list(dict.fromkeys(line["weight"] for line in layers))
    for index, (run, colour) in enumerate(LAYERS.items()):
        width, style = 0.84 / len(LAYERS), {"color": colour, "label": run}
        ratios = {
            (line["weight"], line["rows"]): line["bf16_over_this"] for line in layers if line["run"] == run
        }
        heights = [ratios.get((shape, 1), 0) for shape in shapes]
        places = [at + (index - (len(LAYERS) - 1) / 2) * width for at in range(len(shapes))]
        single.bar_label(single.bar(places, heights, width * 0.9, **style), fmt="%.1f", fontsize=8)
        rows = sorted(m for shape, m in ratios if shape == shapes[0])
        if len(rows) > 1:
            many.plot(rows, [ratios[shapes[0], m] for m in rows], marker="o", **style)
    single.set_xticks(range(len(shapes)), shapes)
    single.set(title="One row times a weight (N×K)", ylabel="speed over BF16")
    many.set(title=f"Rows times a weight of {shapes[0]}", xlabel="rows", ylabel="speed over BF16")
    many.set_xscale("log", base=2)
    many.xaxis.set_major_formatter("{x:g}")
    _bars(speed, [m for m in models if m["what"] == "speed"], ("tokens_over_bf16", "bf16_prefill_over_this"))
    speed.set(title="Two blocks of a Llama 3 8B, `generate`", ylabel="speed over BF16")
    _quality(quality, [m for m in models if m["what"] == "quality"])
    for axes, room in ((single, 0.5), (many, 0.05), (speed, 0.3)):  # room for the legend
        axes.margins(y=room)
        axes.axhline(1, color="#8a8f98", linewidth=1)
        axes.legend(fontsize=8, ncols=2 if axes is single else 1)
    last = layers[-1]
    figure.suptitle(f"{last['device']}, {last['threads']} threads, torch {last['torch']}, {last['date']}")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)


def _bars(axes: Any, models: list[dict[str, Any]], keys: tuple[str, str]) -> None:
    names = {"tokens_over_bf16": "decode", "bf16_prefill_over_this": "prefill of 512 tokens"}
    for index, key in enumerate(keys):
        places = [at + (index - 0.5) * 0.4 for at in range(len(models))]
        bars = axes.bar(places, [line[key] for line in models], 0.38, label=names[key], color=f"C{index}")
        axes.bar_label(bars, fmt="%.2f", fontsize=8)
    axes.set_xticks(range(len(models)), [_wrapped(line["run"]) for line in models])


def _quality(axes: Any, models: list[dict[str, Any]]) -> None:
    base = next(line for line in models if line["run"] == "bf16")
    for index, line in enumerate(models):
        share = line["weight_bytes"] / base["weight_bytes"]
        axes.scatter(share, 100 * line["over_bf16"], color=color(line["run"], index), s=40)
        axes.annotate(
            line["run"],
            (share, 100 * line["over_bf16"]),
            xytext=(0, 6 if index % 2 else -12),
            textcoords="offset points",
            ha="center",
            fontsize=8,
        )
    axes.axhline(0, color="#8a8f98", linewidth=1)
    axes.margins(0.3)
    axes.set(title=f"Quality: {base['model']}", xlabel="bytes of all weights over BF16")
    axes.set_ylabel("perplexity over BF16, %")


def _wrapped(label: str) -> str:
    return label.replace(", ", ",\n")


def color(label: str, index: int) -> str:
    """Returns the colour of a run of a model."""
    return next((colour for word, colour in COLORS.items() if word in label), f"C{index}")


if __name__ == "__main__":
    main()
