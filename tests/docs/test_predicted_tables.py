"""The tables of predictions in README and docs/codegen.md are those of the committed results."""

from __future__ import annotations

import importlib
import json
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def predicted(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("predicted")


def test_the_pages_have_what_was_predicted(predicted):
    for page, made in predicted.PAGES.items():
        _, found, rest = page.read_text(encoding="utf-8").partition(predicted.BEGIN)
        assert found, page
        assert rest.partition(predicted.END)[0].strip() == made(), f"{page}: predicted.py --table --write"


def test_a_ratio_by_hand(predicted):
    """Of the newest lines of a chip."""
    lines = [json.loads(line) for line in (BENCHMARKS / "results/predicted.jsonl").read_text().splitlines()]
    newest = {line["policy"]: line["us"] for line in lines if line["target"] == "sm_100"}
    (row,) = [row for row in predicted.ratios() if row["chip"] == "B200 (sm_100)"]
    assert row["MXFP8 step ÷ BF16's, predicted"] == f"{newest['nvidia'] / newest['bf16']:.2f}"
    assert row["MX GEMM"] == "native"
