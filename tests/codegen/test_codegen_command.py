"""``mxcompile codegen``."""

from __future__ import annotations

import json

import pytest
import torch

from mxcompile.cli.main import main


def factory():
    """A model for the command line."""
    return torch.nn.Linear(64, 96), (torch.empty(32, 64),), {}


def test_codegen_command_takes_a_factory_of_models(capsys, tmp_path):
    status = main(["codegen", f"{__name__}:factory", "--target", "sm_90", "--inference", "-o", str(tmp_path)])
    assert status == 0
    assert "code for sm_90, generated and compiled without it" in capsys.readouterr().out
    summary = json.loads((tmp_path / "summary.json").read_text())
    assert summary["target"] == "sm_90"
    assert [launch["phase"] for launch in summary["launches"]] == ["inference"] * len(summary["launches"])


@pytest.mark.parametrize("target", ["cpu", "sm_42"])
def test_codegen_command_refuses_unknown_targets(capsys, target):
    assert main(["codegen", f"{__name__}:factory", "--target", target]) == 2
    assert "target" in capsys.readouterr().err
