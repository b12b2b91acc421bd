"""The table of single layers in docs/serving.md is that of the committed results."""

from __future__ import annotations

import json
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUNS = ("mxcompile mxfp8", "torchao int8", "llama.cpp q8_0")
ROW = re.compile(r"^\| (\d+)×(\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", re.MULTILINE)


def test_the_page_has_what_was_measured():
    lines = (ROOT / "benchmarks/results/decode_cpu.jsonl").read_text(encoding="utf-8").splitlines()
    rows = map(json.loads, lines)
    newest = {(row["weight"], row["rows"], row["run"]): row["bf16_over_this"] for row in rows}
    page = ROW.findall((ROOT / "docs/serving.md").read_text(encoding="utf-8"))
    assert len(page) == 6
    for n, k, rows, *ratios in page:
        measured = [newest[f"{n}x{k}", int(rows), run] for run in RUNS]
        assert ratios == [f"{ratio:.2f}" for ratio in measured]
