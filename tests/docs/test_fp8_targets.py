"""The table of FP8 presets on chips is that of the committed results."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


def script():
    sys.path.insert(0, str(BENCHMARKS))
    try:
        spec = importlib.util.spec_from_file_location("fp8_targets", BENCHMARKS / "fp8_targets.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(BENCHMARKS))
    return module


def test_the_page_has_what_was_generated():
    made = script()
    _, found, rest = made.PAGE.read_text(encoding="utf-8").partition(made.BEGIN)
    assert found
    assert rest.partition(made.END)[0].strip() == made.table(made.common.read(made.NAME))


def test_rows_by_hand():
    scaled, emulated = "aten._scaled_mm (channel scales)", "aten.mm (bfloat16, scaled after)"
    row = {"target": "sm_90", "kernels": {emulated: 21}, "mb_by_kind": {"product": 4000}}
    rows = [
        {**row, "preset": "bf16", "us": 1000},
        {**row, "preset": "fp8_rowwise", "us": 9},
        {**row, "preset": "fp8_rowwise", "us": 800, "kernels": {scaled: 20, emulated: 1}},
    ]
    rows[2]["mb_by_kind"] = {"product": 3000, "cast": 1234}
    _, _, bf16, fp8 = script().table(rows).splitlines()
    assert bf16 == "| sm_90 | `bf16` | BF16 | 4,000 | 0 | 1,000 | 1.00 |"
    assert fp8 == "| sm_90 | `fp8_rowwise` | 20 × `_scaled_mm`, channel | 3,000 | 1,234 | 800 | 0.80 |"
