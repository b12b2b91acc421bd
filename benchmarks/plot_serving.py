"""Draws the latest results of decoding and serving: docs/images/serving.png.

They are rows of `decode_cpu.py`, `serving.py` and `pretrained_speed.py`, the newest of each measurement on
the chosen class of CPU. Speeds are relative to BF16 under
Inductor, except those of Gemma 3 270M.

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

GENERATION = {
    "bf16 inductor": ("BF16, Inductor", "#b8c4d6"),
    "bf16, mxfp8 stored, head too": ("MXFP8, compiled", "C0"),
    "bf16, mxint8 stored, head too": ("MXINT8, compiled", "C0"),
    "bf16, mxint8 stored, head too, activations": ("the same, activations too", "C0"),
    "bf16, mxint8 stored, head too, package": ("MXINT8, package", "C0"),
    "bf16, mxint8 stored, head too, activations, package": ("the same, activations too", "C0"),
    "llama.cpp q8_0": ("llama.cpp Q8_0", "#5b6068"),
}
"""Ways of generating text that are drawn, with label and colour."""

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
    generation = newest("pretrained_speed", ("run",), options.cpu)
    draw(layers, models, generation, output)
    print(f"written to {output}")


def newest(name: str, keys: Iterable[str], cpu: str) -> list[dict[str, Any]]:
    """Returns the newest row of each measurement of a benchmark on CPUs of the class `cpu`."""
    path = common.RESULTS / f"{name}.jsonl"
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    newest = {tuple(line[key] for key in keys): line for line in lines if line.get("cpu", FIRST_CLASS) == cpu}
    return [*newest.values()]


def draw(
    layers: list[dict[str, Any]],
    models: list[dict[str, Any]],
    generation: list[dict[str, Any]],
    output: Path,
) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 12), layout="constrained", dpi=120)
    (single, many), (decode, prefill), (speed, quality) = figure.subplots(3, 2)
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
    speed.set(title="Two blocks of a Llama 3 8B, `generate`", xlabel="speed over BF16")
    _generation(decode, generation, "decode_per_s")
    decode.set(title="Gemma 3 270M, decoding", xlabel="tokens a second")
    _generation(prefill, generation, "prefill_512_per_s")
    prefill.set(title="Gemma 3 270M, a prompt of 512 tokens", xlabel="tokens a second")
    _quality(quality, [m for m in models if m["what"] == "quality"])
    for axes, room in ((single, 0.5), (many, 0.05)):  # room for the legend
        axes.margins(y=room)
        axes.axhline(1, color="#8a8f98", linewidth=1)
        axes.legend(fontsize=8, ncols=2 if axes is single else 1)
    last = models[-1]
    figure.suptitle(f"{last['device']}, {last['cpu']}, {last['threads']} threads, torch {last['torch']}")
    output.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(output)


def _bars(axes: Any, models: list[dict[str, Any]], keys: tuple[str, str]) -> None:
    names = {"tokens_over_bf16": "decode", "bf16_prefill_over_this": "prefill of 512 tokens"}
    for index, key in enumerate(keys):
        places = [at + (index - 0.5) * 0.4 for at in range(len(models))]
        bars = axes.barh(places, [line[key] for line in models], 0.38, label=names[key], color=f"C{index}")
        axes.bar_label(bars, fmt="%.2f", fontsize=8, padding=2)
    axes.set_yticks(range(len(models)), [_wrapped(line["run"]) for line in models], fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.axvline(1, color="#8a8f98", linewidth=1)
    axes.legend(fontsize=8, loc="upper right")


def _generation(axes: Any, rows: list[dict[str, Any]], key: str) -> None:
    by_way = {row["run"]: row for row in rows}
    ways = [way for way in GENERATION if way in by_way]
    labels, colours = zip(*(GENERATION[way] for way in ways), strict=True)
    bars = axes.barh(range(len(ways)), [by_way[way][key] for way in ways], 0.7, color=colours)
    axes.bar_label(bars, fmt="%.0f", fontsize=8, padding=2)
    axes.set_yticks(range(len(ways)), labels, fontsize=8)
    axes.invert_yaxis()
    axes.margins(x=0.12)


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
    axes.margins(0.4, 0.3)
    axes.set(title=f"Quality: {base['model']}", xlabel="bytes of all weights over BF16")
    axes.set_ylabel("perplexity over BF16, %")


def _wrapped(label: str) -> str:
    return label.replace(", ", ",\n").replace(" and ", "\nand ")


def color(label: str, index: int) -> str:
    """Returns the colour of a run of a model."""
    return next((colour for word, colour in COLORS.items() if word in label), f"C{index}")


if __name__ == "__main__":
    main()
