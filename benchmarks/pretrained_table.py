"""Writes the tables of docs/real-models.md from the newest rows of `pretrained.py` and related scripts.

Usage: python benchmarks/pretrained_table.py
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from typing import Any

import common

PAGE = common.ROOT / "docs" / "real-models.md"
COLUMNS = {
    "gemma": {
        "over FP32, %": "over_fp32_percent",
        "KL, mean": "kl_mean",
        "KL, 99th percentile": "kl_p99",
        "KL, worst": "kl_worst",
        "same top, %": "same_top_percent",
    },
    "minilm": {
        "cosine, mean": "cosine_mean",
        "cosine, worst": "cosine_worst",
        "ranks": "rank_correlation",
        "right first, %": "right_first_percent",
    },
}
"""Column headers and their fields, by model."""


FINE_TUNING = {
    "tuned": "tune",
    "way": "way",
    "loss before": "before",
    "loss after": "loss",
    "over FP32": "over_fp32",
    "cosine, mean": "cosine",
    "cosine, least": "cosine_least",
    "saved, MB": "saved_mb",
    "processor s": "processor_s",
}
GENERATION = {
    "way": "run",
    "start, s": "start_s",
    "weights, MB": "weight_mb",
    "peak, MB": "peak_mb",
    "prefill of 128": "prefill_128_per_s",
    "prefill of 512": "prefill_512_per_s",
    "decode": "decode_per_s",
}
"""Column headers and their fields, for the table of generation speeds."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.parse_args()
    PAGE.write_text(updated(PAGE.read_text(encoding="utf-8")), encoding="utf-8")


def updated(page: str) -> str:
    """Returns the text of the page with all tables replaced."""
    tables = {
        **{model: table(model) for model in COLUMNS},
        "fine-tuning": runs("pretrained_training", ("tune", "way"), FINE_TUNING),
        "generation": runs("pretrained_speed", ("run",), GENERATION),
    }
    for name, text in tables.items():
        begin, end = f"<!-- {name}: begin -->\n", f"<!-- {name}: end -->"
        before, _, rest = page.partition(begin)
        page = before + begin + text + end + rest.partition(end)[2]
    return page


def runs(benchmark: str, key: Sequence[str], columns: Mapping[str, str]) -> str:
    """Returns the Markdown of the newest row of a benchmark for each value of `key`, by class of CPU."""
    newest = {(row["cpu"], *(row[part] for part in key)): row for row in common.read(benchmark)}
    lines = [f"| CPU | {' | '.join(columns)} |", f"|---|{'---|' * len(columns)}"]
    for row in newest.values():
        cells = [row["cpu"], *(_cell(name, row[name]) for name in columns.values())]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def _cell(name: str, value: Any) -> str:
    """Returns the text of a figure. Losses of several seeds are a list."""
    if isinstance(value, str):
        return value
    return ", ".join(f"{item:g}" for item in value) if name == "loss" else _figure(value)


def table(model: str) -> str:
    """Returns the Markdown table of `model`: for each class of CPU the rows with the newest text."""
    rows = [row for row in common.read("pretrained") if row["model"] == model]
    texts = {row["cpu"]: row["text"] for row in rows}
    return "".join(_group(model, cpu, text, rows) for cpu, text in texts.items())


def _group(model: str, cpu: str, text: str, rows: list[dict[str, Any]]) -> str:
    columns = COLUMNS[model]
    ways = {
        (row["library"], row["way"], row["quantized"]): row
        for row in rows
        if (row["cpu"], row["text"]) == (cpu, text)
    }
    lines = [
        f"{cpu}, {text}:\n\n| library | way | quantized | {' | '.join(columns)} |",
        f"|---|---|---|{'---|' * len(columns)}",
    ]
    for row in ways.values():
        about = f"| {row['library']} | {row['way']} | {row['quantized']} |"
        cells = [row["left_out"]] if "left_out" in row else [_figure(row[key]) for key in columns.values()]
        lines.append(f"{about} {' | '.join(cells + [''] * (len(columns) - len(cells)))} |")
    return "\n".join(lines) + "\n\n"


def _figure(value: Any) -> str:
    return f"{value[0]:g} ± {value[1]:g}" if isinstance(value, list) else f"{value:g}"


if __name__ == "__main__":
    main()
