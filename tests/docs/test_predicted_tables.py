"""Tables of predictions, from rows written by hand and from the committed ones."""

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


def test_a_ratio_by_hand(predicted):
    """Of the newest lines of a chip."""
    lines = [json.loads(line) for line in (BENCHMARKS / "results/predicted.jsonl").read_text().splitlines()]
    newest = {line["policy"]: line["us"] for line in lines if line["target"] == "sm_100"}
    (row,) = [row for row in predicted.ratios() if row["chip"] == "B200 (sm_100)"]
    assert row["MXFP8 step ÷ BF16's, predicted"] == f"{newest['nvidia'] / newest['bf16']:.2f}"
    assert row["MX GEMM"] == "native"


def test_every_chip_and_policy_is_there(predicted):
    found = predicted.newest(predicted.TOKENS)
    assert list(found) == [(chip, policy) for chip in predicted.CHIPS for policy in predicted.policies(chip)]
    assert not any(row["unclear"] for row in found.values())


def test_emulation_moves_little_more_than_its_casts_must(predicted):
    """Both values of each gradient, one value and FP8 of each activation, a value of each weight twice."""
    rows = predicted.newest(predicted.TOKENS)
    emulated = [chip for chip in predicted.CHIPS if not predicted.TARGETS[chip].native]
    for chip in emulated:
        mxfp8, bf16 = rows[chip, "nvidia"], rows[chip, "bf16"]
        assert mxfp8["mb"] <= 1.41 * bf16["mb"], chip
        assert mxfp8["spilling"] == 0, chip
        assert mxfp8["problems"] <= bf16["problems"], chip


def test_rows_by_hand(predicted, monkeypatch):
    """The newest line counts; where MXFP8 is emulated and slower, what is fastest stands beside it."""
    scaled, emulated = "aten._scaled_mm (channel scales)", "aten.mm (bfloat16, scaled after)"
    row = {"target": "sm_90", "tokens": 7, "cast_ratio": None, "by_kind": {}, "mb": 1}
    row |= {"kernels": {emulated: 21}, "mb_by_kind": {"product": 4000}}
    fp8 = {"kernels": {scaled: 20, emulated: 1}, "mb_by_kind": {"product": 3000, "cast": 1234}}
    rows = [
        {**row, "policy": "bf16", "us": 1000},
        {**row, "policy": "nvidia", "us": 1500},
        {**row, "policy": "fp8_rowwise", "us": 9},
        {**row, "policy": "fp8_rowwise", "us": 800, **fp8},
    ]
    monkeypatch.setattr(predicted.common, "read", lambda name: rows)
    bf16, mxfp8, rowwise = (list(row.values()) for row in predicted.formats(7))
    assert bf16 == ["H200 (sm_90)", "`bf16`", "BF16", "4,000", "0", "1,000", "1.00"]
    assert mxfp8[2] == "emulated"
    assert rowwise[1:] == ["`fp8_rowwise`", "20 × `_scaled_mm`, channel", "3,000", "1,234", "800", "0.80"]
    (chip,) = predicted.ratios(7)
    assert list(chip.values()) == ["H200 (sm_90)", "emulated", "1.50", "`fp8_rowwise`, 0.80"]
