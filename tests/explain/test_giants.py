"""`explain` of models that do not fit on any machine: every layer found, with the role its name promises."""

from __future__ import annotations

import resource

import pytest
from helpers.giants import GIANTS, build
from helpers.paces import mostly_slow

import mxcompile
from mxcompile.policy import ATTENTION_PRODUCTS

PRODUCTS = {str(role) for role in ATTENTION_PRODUCTS}


@pytest.mark.parametrize("name", mostly_slow(GIANTS, "mixtral"))
def test_every_layer_has_its_role_and_reason(name):
    _, inputs, layers, roles = GIANTS[name]
    report = mxcompile.explain(build(name), target="sm_100", **inputs)
    linear = [gemm for gemm in report.gemms if gemm.role not in PRODUCTS]
    for gemm in linear:
        suffix = max((suffix for suffix in roles if f".{gemm.name}".endswith(f".{suffix}")), key=len)
        assert gemm.role == roles[suffix], gemm
        assert gemm.reason
        assert gemm.precision == ("mxfp8" if gemm.role not in ("head", "router", "other") else "bf16"), gemm
    outputs = [gemm for gemm in linear if gemm.role == "attn_out" and gemm.gemm == "fprop"]
    cross = {"t5": 24, "whisper": 32}.get(name, 0)
    assert (len(outputs), len({gemm.name for gemm in outputs})) == (layers + cross, len(outputs))
    products = [gemm for gemm in report.gemms if gemm.role in PRODUCTS and gemm.gemm == "fprop"]
    assert len(products) == 2 * len(outputs)


def test_a_model_of_405_billion_parameters_takes_no_memory():
    _, inputs, layers, _ = GIANTS["llama"]
    model = build("llama")
    assert sum(parameter.numel() for parameter in model.parameters()) > 4.05e11
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    report = mxcompile.explain(model, target="sm_100", **inputs)
    assert 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) < 2e9
    assert report.summary.num_gemms == 7 * 3 * layers + 6 * layers + 3
    parameters = sum(
        gemm.n * gemm.k for gemm in report.gemms if gemm.gemm == "fprop" and gemm.role not in PRODUCTS
    )
    assert report.summary.weight_bytes_bf16 == 2 * parameters
    assert 0.85 < report.summary.flop_share < 0.95
