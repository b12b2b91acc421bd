"""Models that are not in BF16: what stays in their own dtype is called so, and estimated at its rate."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.made import Made
from torch import nn

import mxcompile
from mxcompile.analysis.audit import audit
from mxcompile.cli import main
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.rates import Rates

EVERYTHING = {"version": 1, "rules": [{"match": {"name": "0"}, "use": "mxfp8"}]}
PEAK, RATES = TARGETS["sm_100"].peak, Rates.for_target(TARGETS["sm_100"])


def product_us(gemm: mxcompile.report.GemmRecord, tflops: float, kind: str) -> float:
    """Returns the time of a product that its FLOPs bound, after its launch."""
    return gemm.flops / (tflops * 1e6 * RATES[kind]) + RATES["launch_us"]


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(512, 512, bias=False), nn.GELU(), nn.Linear(512, 2048, bias=False))


def network():
    return model(), (torch.randn(4096, 512),), {}


def explained(dtype: torch.dtype, target: str = "sm_100") -> mxcompile.Report:
    x = torch.randn(4096, 512, dtype=dtype)
    return mxcompile.explain(model().to(dtype), x, policy=EVERYTHING, target=target)


def test_fp32_is_called_fp32_and_takes_its_time():
    report = explained(torch.float32)
    assert {gemm.dtype for gemm in report.gemms} == {"float32"}
    for gemm in [gemm for gemm in report.gemms if gemm.name == "2"]:
        assert gemm.estimate_us == pytest.approx(product_us(gemm, PEAK.dense_tflops["fp32"], "fp32"))
        assert gemm.estimate_us == gemm.estimate_bf16_us
    text = " ".join(str(report).split())
    assert "policy policy, model in FP32)" in text
    assert "% of the FLOPs stay in FP32: " in text
    assert re.search(r"matmuls and casts \S+ .s, \S+ .s in FP32 ", text)
    assert "warning: this model is FP32: its products are estimated at the 75 TFLOP/s of FP32" in text
    assert not re.search(r"\bbf16 +(policy|role|other)", text)


def test_estimate_of_a_bf16_model_uses_bf16_rates():
    report = explained(torch.bfloat16)
    assert {gemm.dtype for gemm in report.gemms} == {"bfloat16"}
    for gemm in report.gemms:
        if gemm.name == "2":
            assert gemm.estimate_us == pytest.approx(product_us(gemm, PEAK.dense_tflops["bf16"], "bf16"))
    assert "FP32" not in str(report)


def test_dtype_of_products_is_the_dtype_of_autocast():
    with torch.autocast("cpu", dtype=torch.bfloat16):
        report = mxcompile.explain(model(), torch.randn(64, 512), target="sm_100")
    assert {gemm.dtype for gemm in report.gemms if gemm.gemm == "fprop"} == {"bfloat16"}


class Autocasting(Made, a=(64, 64), b=(64, 64), c=(64, 64)):
    """Layers a and b under a GPU's autocast, and layer c between them, where it is turned off."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            y = self.a(x)
            with torch.autocast("cuda", enabled=False):
                y = self.c(y.float())
            with torch.autocast("cuda"):
                return self.b(y)


def test_autocast_of_a_gpu_acts_on_a_model_that_is_explained_for_it():
    report = mxcompile.explain(Autocasting(), torch.randn(64, 64), target="sm_100", policy="bf16")
    dtypes = {(gemm.name, gemm.dtype) for gemm in report.gemms}
    assert dtypes == {("a", "bfloat16"), ("b", "bfloat16"), ("c", "float32")}
    assert not torch.is_autocast_enabled("cpu")


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_audit_names_the_dtype_of_its_reference(dtype: str):
    wide = getattr(torch, dtype)
    net = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64)).to(wide)
    result = audit(net, torch.randn(32, 64, dtype=wide), policy=EVERYTHING)
    word = {"float32": "FP32", "float16": "FP16"}[dtype]
    assert f"main output against {word}: SQNR" in str(result)


def test_the_command_line_looks_at_another_dtype(capsys: pytest.CaptureFixture[str]):
    command = ["explain", f"{__name__}:network", "--target", "b200"]
    assert main(command) == 0
    assert "this model is FP32" in " ".join(capsys.readouterr().out.split())
    assert main([*command, "--dtype", "bf16"]) == 0
    assert "FP32" not in capsys.readouterr().out


def test_advice_names_a_policy_only_if_estimated_faster():
    """Few tokens: no policy helps, so none is named. Many tokens, wide layers: one does."""

    def warned(tokens: int, width: int) -> str:
        net = nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).to(torch.bfloat16)
        policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}
        x = torch.empty(tokens, width, dtype=torch.bfloat16, device="meta")
        (warning,) = mxcompile.explain(net.to("meta"), x, policy=policy, target="sm_90").summary.warnings
        return warning

    assert "fp8_rowwise" not in warned(64, 256)
    advice = re.search(r"the policy fp8_rowwise, .*, is estimated at (\S+)×", warned(8192, 4096))
    assert advice
    assert float(advice[1]) > 1
