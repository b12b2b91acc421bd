"""Policies side by side on a batch: what is compared is what `audit` says of each alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.one_linear import policy as everything
from torch import Tensor, nn

import mxcompile
from mxcompile.analysis.audit import audit
from mxcompile.analysis.compare import compare
from mxcompile.cli import main
from mxcompile.errors import OptionError, PolicyError


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)
        with torch.no_grad():  # a channel that one scale for the whole tensor does not suit
            self.down.weight[:, 5] *= 3000

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        return (self.down(nn.functional.gelu(self.up(x))) - target).square().mean()


def example() -> tuple[nn.Module, tuple[Tensor, Tensor], dict[str, Any]]:
    torch.manual_seed(0)
    return Net(), (torch.randn(32, 64), torch.randn(32, 64)), {}


def test_rows_are_those_of_audit():
    model, args, _ = example()
    policies = [everything("mxfp8"), everything("mxfp4"), everything("bf16")]
    comparison = compare(model, *args, policies=policies)
    alone = [audit(model, *args, policy=policy).numerics for policy in policies]
    assert [result.numerics.gemms for result in comparison.audits] == [result.gemms for result in alone]
    policies_said, gemms_said = str(comparison).split("SQNR of GEMMs against FP32")
    rows = [line.split() for line in policies_said.splitlines()[2:5]]
    assert [row[1] for row in rows] == ["100.0%", "100.0%", "0.0%"]
    assert [row[2] for row in rows[:2]] == ["mxfp8", "mxfp4"]
    for row, numerics in zip(rows[:2], alone, strict=False):
        of_kind = {kind: [g.sqnr_db for g in numerics.gemms if g.gemm == kind] for kind in ("fprop", "wgrad")}
        assert (row[3], row[5]) == (f"{min(of_kind['fprop']):.2f}", f"{min(of_kind['wgrad']):.2f}")
        assert row[-1] == f"{numerics.loss_gap:+.4%}"
    table = [line.split() for line in gemms_said.splitlines()[4:] if not line.startswith("note")]
    assert "note, policy: policy quantizes no GEMM of this model" in gemms_said
    assert len(table) == 5  # the first layer's input needs no gradient
    lowest = [float(row[3]) for row in table]
    assert lowest == sorted(lowest)
    assert all(float(row[2]) > float(row[3]) for row in table)  # eight bits lose less than four


def test_audit_command_compares_several_policies(capsys: pytest.CaptureFixture[str]):
    assert main(["audit", f"{__name__}:example", "--compare", "nvidia, fp8_tensor"]) == 0
    output = capsys.readouterr().out
    assert [line.split()[0] for line in output.splitlines()[2:4]] == ["nvidia", "fp8_tensor"]
    assert main(["audit", f"{__name__}:example", "--compare", "nvidia,fp8", "--seed", "1"]) == 2
    assert "unknown preset 'fp8'" in capsys.readouterr().err
    assert main(["audit", f"{__name__}:example", "--compare", "nvidia", "--by", "role"]) == 2
    assert "leave out --by" in capsys.readouterr().err


class NoLoss(Net):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return self.down(nn.functional.gelu(self.up(x)))


def test_comparison_without_loss_omits_empty_columns_and_adds_a_note():
    comparison = compare(NoLoss(), torch.randn(32, 64), policies=[everything("mxfp8"), everything("bf16")])
    lines = str(comparison).splitlines()
    assert lines[0].split("  ")[-1].strip() == "output dB"
    assert lines[0].split() == ["policy", "quantized", "fprop", "≥", "dB", "output", "dB"]
    logits = [result.numerics.logits_sqnr_db for result in comparison.audits]
    assert [line.split()[-1] for line in lines[2:4]] == [f"{logits[0]:.2f}", "exact"]
    text = " ".join(str(comparison).split())
    assert text.count("gradients were not audited") == 1
    assert "note: gradients were not audited" in text
    assert "note, policy: policy quantizes no GEMM of this model" in text


def test_compare_with_invalid_policies_raises():
    model, args, _ = example()
    with pytest.raises(OptionError, match=r"policies must be a list, found 'nvidia': write \['nvidia'\]"):
        mxcompile.compare(model, *args, policies="nvidia")
    with pytest.raises(PolicyError, match="fp8_row"):
        compare(model, *args, policies=["nvidia", "fp8_row"])
    with pytest.raises(OptionError, match="at least one policy"):
        compare(model, *args, policies=[])
