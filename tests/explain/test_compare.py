"""Policies side by side: each row is what `explain` says under that policy."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import mxcompile
from mxcompile.analysis.compare import estimates
from mxcompile.errors import OptionError, PolicyError


def model(width: int = 512) -> nn.Module:
    layers = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
    return nn.Sequential(*layers).to(torch.bfloat16)


def test_rows_are_those_of_explain():
    with torch.device("meta"):
        wide, x = model(4096), torch.empty(8192, 4096, dtype=torch.bfloat16)
    names = ["nvidia", "fp8_rowwise", "bf16"]
    comparison = estimates(wide, x, policies=names, target="sm_90")
    alone = [mxcompile.explain(wide, x, policy=name, target="sm_90").summary for name in names]
    summaries = [report.summary for report in comparison.reports]
    assert [s.estimate_us for s in summaries] == [s.estimate_us for s in alone]
    mx, fp8, plain = (s.estimate_us or 0 for s in summaries)
    assert fp8 < plain < mx  # an FP8 GEMM; the model's own; one that is emulated
    lines = str(comparison).splitlines()
    assert lines[0] == "target sm_90, estimated"
    assert [line.split()[:2] for line in lines[-3:]] == [
        ["nvidia", "100.0%"], ["fp8_rowwise", "100.0%"], ["bf16", "0.0%"]
    ]  # fmt: skip


def test_a_policy_that_is_none_is_an_error():
    with pytest.raises(PolicyError, match="fp8_row"):
        estimates(model(), torch.randn(4, 512), policies=["nvidia", "fp8_row"], target="sm_90")


def test_without_policies_there_is_nothing_to_compare():
    with pytest.raises(OptionError, match="at least one policy"):
        estimates(model(), torch.randn(4, 512), policies=[])
