"""The table of presets, from rows written by hand."""

from __future__ import annotations


def test_preset_table_shows_newest_gap_and_lowest_sqnr(benchmark):
    gap = {"what": "gap", "preset": "p", "steps": 500}
    rows = [
        {"what": "gap", "preset": "p", "seed": 0, "steps": 250, "gap": 9.0},
        {**gap, "seed": 0, "gap": 0.5},
        {**gap, "seed": 0, "gap": 0.001},
        {**gap, "seed": 1, "gap": 0.003},
        {"what": "sqnr", "preset": "p", "layer": "a", "fprop": 28.0, "dgrad": 30.0},
        {"what": "sqnr", "preset": "p", "layer": "b", "fprop": 27.5},
        {"what": "step", "preset": "p", "ratio_to_bf16": 1.5},
        {"what": "step", "preset": "p", "ratio_to_bf16": 1.062},
        {"what": "step", "preset": "bf16", "ratio_to_bf16": 1.0},
    ]
    *_, row = benchmark("preset_table").table(rows).splitlines()
    assert row == "| `p` | 27.5 | 30.0 |  | +0.20% ± 0.10% | 2 × 500 | 1.06 |"
