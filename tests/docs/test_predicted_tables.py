"""Tables of predictions, from rows written by hand and from the committed ones."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mxcompile.lowering.targets import TARGETS
from mxcompile.offline import Rates, Work

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.fixture
def predicted(benchmark):
    return benchmark("predicted")


def test_predicted_ratio_equals_newest_rows_at_current_rates(predicted):
    lines = [json.loads(line) for line in (BENCHMARKS / "results/predicted.jsonl").read_text().splitlines()]
    newest = {line["policy"]: line for line in lines if line["target"] == "sm_100"}
    rates = Rates.for_target(TARGETS["sm_100"])
    us = {
        policy: sum(Work(**work).estimate(rates).us for _, work in newest[policy]["works"])
        for policy in ("bf16", "nvidia")
    }
    (row,) = [row for row in predicted.ratios() if row["chip"] == "B200 (sm_100)"]
    assert row["MXFP8 step ÷ BF16's, predicted"].startswith(f"{us['nvidia'] / us['bf16']:.2f} (")
    assert row["MX GEMM"] == "native"


def test_every_chip_has_its_presets(predicted):
    """BF16, MXFP8, and delayed scales where a library multiplies FP8; nothing that the chip does not run."""
    rows = predicted.newest(predicted.TOKENS)
    for chip in predicted.CHIPS:
        policies = [policy for at, policy in rows if at == chip]
        wanted = ["bf16", "nvidia", *(["fp8_delayed"] if TARGETS[chip].fp8_tiles else [])]
        assert set(wanted) <= set(policies) <= set(predicted.policies(chip)), chip
    assert not any(row["unclear"] for row in rows.values())


def test_emulation_moves_little_more_than_its_casts_must(predicted):
    """Both values of each gradient, one value and FP8 of each activation, a value of each weight twice."""
    rows = predicted.newest(predicted.TOKENS)
    for chip in [chip for chip in predicted.CHIPS if not predicted.TARGETS[chip].native]:
        mxfp8, bf16 = rows[chip, "nvidia"], rows[chip, "bf16"]
        assert mxfp8["mb"] <= 1.41 * bf16["mb"], chip
        assert mxfp8["spilling"] == 0, chip
        assert mxfp8["problems"] <= bf16["problems"], chip


def test_predicted_table_shows_fastest_preset_and_its_equals(predicted, monkeypatch):
    """The newest line counts; the fastest preset stands with what the rates do not tell from it."""
    scaled, emulated = "aten._scaled_mm (channel scales)", "aten.mm (bfloat16, scaled after)"
    row = {"target": "sm_90", "tokens": 7, "mb": 1}
    row |= {"kernels": {emulated: 21}, "mb_by_kind": {"product": 4000}}
    fp8 = {"kernels": {scaled: 20, emulated: 1}, "mb_by_kind": {"product": 3000, "cast": 1234}}
    rows = [
        {**row, "policy": "bf16", "works": _works(product=1000)},
        {**row, "policy": "nvidia", "works": _works(product=1000, cast=500)},
        {**row, "policy": "fp8_rowwise", "works": _works(product=9)},
        {**row, "policy": "fp8_rowwise", "works": _works("fp8_channel", product=500, cast=300), **fp8},
        {**row, "policy": "fp8_tensor", "works": _works("fp8_tensor", product=505, cast=290), **fp8},
    ]
    monkeypatch.setattr(predicted.common, "read", lambda name: rows)
    bf16, mxfp8, tensor, rowwise = (list(row.values()) for row in predicted.formats(7))
    assert bf16 == ["H200 (sm_90)", "`bf16`", "BF16", "4,000", "0", "1,003", "1.00"]
    assert mxfp8[2] == "emulated"
    assert rowwise[1:6] == ["`fp8_rowwise`", "20 × `_scaled_mm`, channel", "3,000", "1,234", "806"]
    assert rowwise[6].startswith("0.80 (0.7")
    (chip,) = predicted.ratios(7)
    assert list(chip.values())[:2] == ["H200 (sm_90)", "emulated"]
    assert chip["MXFP8 step ÷ BF16's, predicted"].startswith("1.50 (")
    assert tensor[6] in chip["fastest by prediction"]
    assert chip["fastest by prediction"].endswith("; not distinguishable: `fp8_rowwise`")


def _works(kind="bf16", **us):
    """Launches of as many µs each: a library's products at a kind of rate, and casts bound by bytes."""
    rates = Rates.for_target(TARGETS["sm_90"])
    products = {"mma_us": us["product"] * rates[kind], "product": kind}
    casts = {"num_bytes": us.get("cast", 0) * rates["memory"] * 4800e3}
    return [["product", products], *([["cast", casts]] if "cast" in us else [])]
