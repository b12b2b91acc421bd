"""Writes the table of presets in docs/formats.md, from the rows of `presets.py`.

A row of the table has the lowest SQNR of a layer's fprop, dgrad and wgrad; the gap of the demo's validation
loss to BF16's with its standard error over paired seeds; and the time of the CPU's training step ÷ BF16's.
The latest row of a measurement counts; for gaps, the rows of the longest runs.

Usage: python benchmarks/preset_table.py [--write]
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "presets.jsonl"
PAGE = ROOT / "docs" / "formats.md"
BEGIN, END = "<!-- presets: begin -->", "<!-- presets: end -->"
GEMMS = ("fprop", "dgrad", "wgrad")
HEADERS = ["preset", *(f"{gemm} ≥ dB" for gemm in GEMMS), "loss against BF16", "seeds × steps", "CPU step"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="put it into docs/formats.md")
    options = parser.parse_args()
    text = table(results())
    if options.write:
        before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
        _, _, after = rest.partition(END)
        PAGE.write_text(f"{before}{BEGIN}\n{text}\n{END}{after}", encoding="utf-8")
    print(text)


def results() -> list[dict[str, Any]]:
    """Returns the measured rows, oldest first."""
    return [json.loads(line) for line in RESULTS.read_text(encoding="utf-8").splitlines()]


def table(rows: list[dict[str, Any]]) -> str:
    """Returns the Markdown table, with a line for every measured preset."""
    presets = dict.fromkeys(row["preset"] for row in rows if row["preset"] != "bf16")
    lines = [HEADERS, ["---"] * len(HEADERS)]
    for preset in presets:
        mine = [row for row in rows if row["preset"] == preset]
        lines.append([f"`{preset}`", *_sqnr(mine), *_gap(mine), _step(mine)])
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _sqnr(rows: list[dict[str, Any]]) -> list[str]:
    last = {row["layer"]: row for row in rows if row["what"] == "sqnr"}
    least = [min((row[gemm] for row in last.values() if gemm in row), default=None) for gemm in GEMMS]
    return ["" if value is None else f"{value:.1f}" for value in least]


def _gap(rows: list[dict[str, Any]]) -> list[str]:
    matching = [row for row in rows if row["what"] == "gap"]
    if not matching:
        return ["", ""]
    steps = max(row["steps"] for row in matching)
    gaps = list({row["seed"]: row["gap"] for row in matching if row["steps"] == steps}.values())
    spread = f" ± {statistics.stdev(gaps) / len(gaps) ** 0.5:.2%}" if len(gaps) > 1 else ""
    return [f"{statistics.mean(gaps):+.2%}{spread}", f"{len(gaps)} × {steps}"]


def _step(rows: list[dict[str, Any]]) -> str:
    last = next((row for row in reversed(rows) if row["what"] == "step"), None)
    return "" if last is None else f"{last['ratio_to_bf16']:.2f}"


if __name__ == "__main__":
    main()
