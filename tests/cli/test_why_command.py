"""``mxcompile explain MODEL --why LAYER``: what is printed, and the exit status."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from mxcompile.cli import main

MODEL = Path(__file__).parents[1] / "explain" / "why_model.py"


def why(
    arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str, str]:
    shutil.copy(MODEL, tmp_path / "reasoned.py")
    monkeypatch.chdir(tmp_path)
    status = main(["explain", "reasoned:make", "--inference", "--target", "cpu", *arguments])
    streams = capsys.readouterr()
    return status, streams.out, streams.err


def test_why_flag_prints_decision_and_evidence_of_layers(tmp_path, monkeypatch, capsys):
    status, out, _ = why(["--why", "*.experts.*"], tmp_path, monkeypatch, capsys)
    assert status == 0
    lines = out.splitlines()
    assert "blocks.0-1.experts.up ×2: expert_in, mxfp8 (preset nvidia: role expert_in)" in lines
    assert "blocks.0-1.experts.router ×2: router, bf16 (role router)" in lines
    assert sum(line.startswith("  because  ") for line in lines) == 3
    assert "attn" not in "".join(line for line in lines if not line.startswith("  "))


def test_a_layer_that_does_not_exist(tmp_path, monkeypatch, capsys):
    status, out, err = why(["--why", "blocks.0.attn.qvk"], tmp_path, monkeypatch, capsys)
    assert (status, out) == (2, "")
    assert err.startswith(
        "mxcompile: no layer of the report matches 'blocks.0.attn.qvk'; nearest: 'blocks.0.attn.qkv', "
    )


@pytest.mark.parametrize(
    "other", [["--output", "report.txt"], ["--compare", "nvidia,ocp"]], ids=lambda o: o[0]
)
def test_reasons_are_all_that_is_printed(other, tmp_path, monkeypatch, capsys):
    status, _, err = why(["--why", "head", *other], tmp_path, monkeypatch, capsys)
    assert status == 2
    assert f"leave out {other[0]}" in err
    assert not (tmp_path / "report.txt").exists()
