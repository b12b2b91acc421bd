"""`mxcompile diff` of two audits: errors that moved, conditions, and what cannot be compared."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

import pytest

from mxcompile.analysis.audit import Audit
from mxcompile.analysis.audit.diff import compare_audits
from mxcompile.cli import main
from mxcompile.report import GemmNumerics, GemmRecord, Numerics, Report, TensorNumerics
from mxcompile.report.data.record import Part


def gemm(name: str, sqnr_db: float) -> GemmNumerics:
    return GemmNumerics(
        name=name, role="qkv", gemm="fprop", m=8, n=8, k=32,
        sqnr_db=sqnr_db, cosine=1.0, mse=0.0, rel_error=0.0,
    )  # fmt: skip


def cast(name: str, underflow: float) -> TensorNumerics:
    return TensorNumerics(
        name=name, role="qkv", operand="x", layout="rowwise", gemms=("fprop",), elem="e4m3", rounding="rceil",
        numel=64, amax=1.0, sqnr_db=30.0, cosine=1.0, mse=0.0, rel_error=0.0, underflow=underflow,
        saturation=0.0,
    )  # fmt: skip


def audit(gemms: dict[str, float], casts: dict[str, float], precision: str = "mxfp8") -> Audit:
    records = tuple(
        GemmRecord(name=n, role="qkv", gemm="fprop", m=8, n=8, k=32, precision=precision, reason="r")
        for n in gemms
    )
    numerics = Numerics(
        gemms=tuple(gemm(*row) for row in gemms.items()),
        tensors=tuple(cast(*row) for row in casts.items()),
        loss_gap=0.01 * len(casts),
    )
    return Audit(report=Report.from_parts([Part(gemms=records)], target="cpu", policy="p"), numerics=numerics)


OLD = audit({"a": 28.0, "b": 28.0, "c": 20.0, "d": 28.0}, {"a": 0.0, "b": 0.1})


def test_audit_diff_lists_changed_layers_worst_first():
    diff = compare_audits(OLD, audit({"a": 27.7, "b": 25.0, "c": 24.0, "d": math.nan}, {"a": 0.2, "b": 0.1}))
    assert [(layer.name, layer.before, layer.after) for layer in diff.moved] == [
        ("d", 28.0, pytest.approx(math.nan, nan_ok=True)),
        ("a", 0.0, 0.2),
        ("b", 28.0, 25.0),
        ("c", 20.0, 24.0),
    ]
    assert diff.sqnr_drop == math.inf
    text = str(diff)
    assert "numerics: 3 worse, 1 better" in text
    assert max(map(len, text.splitlines())) <= 120
    assert "| b" in diff.to_markdown()


def test_comparison_of_equal_audits_has_no_moved_layers():
    diff = compare_audits(OLD, OLD)
    assert diff.moved == ()
    assert str(diff) == "the same for every layer\n\nnumerics: no change is larger than chance"


def saved(folder: Path, **audits: Audit | Report) -> list[str]:
    for name, result in audits.items():
        result.save(folder / f"{name}.json")
    return [str(folder / f"{name}.json") for name in audits]


@pytest.mark.parametrize(("condition", "status"), [("sqnr-drop=2dB", 1), ("sqnr-drop=4", 0), ("fallback", 0)])
def test_fail_on_condition_sets_exit_status(condition: str, status: int, tmp_path: Path):
    new = audit({"a": 28.0, "b": 25.0, "c": 20.0, "d": 28.0}, {"a": 0.0, "b": 0.1})
    assert main(["diff", *saved(tmp_path, old=OLD, new=new), "--fail-on", condition]) == status


def test_layers_that_fell_back_fail_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    new = replace(OLD, report=audit({"a": 1.0, "b": 1.0, "c": 1.0, "d": 1.0}, {}, "bf16").report)
    assert main(["diff", *saved(tmp_path, old=OLD, new=new)]) == 1
    assert "4 layers fell back from MXFP8" in capsys.readouterr().out


def test_audits_without_a_layer_in_common(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["diff", *saved(tmp_path, old=OLD, new=audit({"x": 28.0, "y": 28.0}, {"x": 0.0}))]) == 1
    output = capsys.readouterr().out
    assert output.startswith("no layer in common: ")
    assert "numerics: not compared, as the audits have no layer in common" in output


def test_an_audit_and_a_report_are_not_compared(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    paths = saved(tmp_path, old=OLD, new=OLD.report)
    assert main(["diff", *paths]) == 2
    assert "old.json is of kind audit, " in (error := capsys.readouterr().err)
    assert "new.json of kind report: compare two reports or two audits" in error
    assert main(["merge", paths[0]]) == 2
    assert "this is an mxcompile audit, where an mxcompile report was expected" in capsys.readouterr().err


def test_saved_audit_loads_with_equal_values(tmp_path: Path):
    (path,) = saved(tmp_path, old=OLD)
    assert Audit.load(path) == OLD
