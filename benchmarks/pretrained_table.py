"""The tables of docs/real-models.md, from the rows that `pretrained.py` wrote last.

Usage: python benchmarks/pretrained_table.py [--check]
"""

from __future__ import annotations

import argparse
import re
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
"""By model: the heads of the table's columns and the figures below them."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--check", action="store_true", help="fail if the page is not up to date")
    options = parser.parse_args()
    before = PAGE.read_text(encoding="utf-8")
    after = before
    for model in COLUMNS:
        after = re.sub(
            rf"(<!-- {model}: begin -->\n).*?(<!-- {model}: end -->)",
            lambda found, model=model: found[1] + table(model) + found[2],
            after,
            flags=re.DOTALL,
        )
    if options.check and after != before:
        raise SystemExit(f"{PAGE} is not what the rows say: run python benchmarks/pretrained_table.py")
    PAGE.write_text(after, encoding="utf-8")


def table(model: str) -> str:
    """Returns the Markdown of the newest row of each way, for each class of CPU and text."""
    rows = [row for row in common.read("pretrained") if row["model"] == model]
    groups: dict[tuple[str, str], dict[tuple[str, str, str], dict[str, Any]]] = {}
    for row in rows:
        way = row["library"], row["way"], row["quantized"]
        groups.setdefault((row["cpu"], row["text"]), {})[way] = row
    return "".join(_group(model, *key, [*group.values()]) for key, group in groups.items())


def _group(model: str, cpu: str, text: str, rows: list[dict[str, Any]]) -> str:
    columns = COLUMNS[model]
    lines = [
        f"{cpu}, {text}:\n\n| library | way | quantized | {' | '.join(columns)} |",
        f"|---|---|---|{'---|' * len(columns)}",
    ]
    for row in rows:
        about = f"| {row['library']} | {row['way']} | {row['quantized']} |"
        cells = [row["left_out"]] if "left_out" in row else [_figure(row[key]) for key in columns.values()]
        lines.append(f"{about} {' | '.join(cells + [''] * (len(columns) - len(cells)))} |")
    return "\n".join(lines) + "\n\n"


def _figure(value: Any) -> str:
    return f"{value[0]:g} ± {value[1]:g}" if isinstance(value, list) else f"{value:g}"


if __name__ == "__main__":
    main()
