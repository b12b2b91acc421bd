"""Decoding with stored MXFP8 weights on the GPU of this machine, against the reference casts."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers.policies import every
from helpers.reference import sqnr_db
from helpers.stored_weights import LEAST_DB, FeedForward, binades, expected, with_stored_weights

import mxcompile
from mxcompile.lowering.targets import of_device

pytestmark = pytest.mark.gpu


def compiled(model, **keywords):
    backend = mxcompile.Backend(policy=every("mxfp8"), **keywords)
    return torch.compile(copy.deepcopy(model).to("cuda"), backend=backend, fullgraph=True)


@pytest.mark.parametrize("mode", [None, "max-autotune-no-cudagraphs"])
@pytest.mark.parametrize("tokens", [1, 5, 24, 64])
def test_a_step_equals_the_reference(tokens, mode):
    """Few tokens on the weight-only kernel where there is no MX GEMM, K whole and split; odd sizes."""
    model = with_stored_weights(FeedForward(1112, 4650).to(torch.bfloat16))
    x = binades(tokens, 1112).to(torch.bfloat16)
    with torch.no_grad():
        out = compiled(model, mode=mode)(x.to("cuda")).cpu()
    (report,) = mxcompile.reports()
    on_kernel = ["mx_weight_only_mm" in gemm.kernel for gemm in report.gemms]
    few = tokens <= 32 and not of_device(torch.device("cuda")).native
    assert on_kernel == [few] * 3, [gemm.kernel for gemm in report.gemms]
    assert sqnr_db(expected(model, x), out) > LEAST_DB


def test_a_step_gives_the_same_bits_every_time():
    model = with_stored_weights(FeedForward(1024, 4096).to(torch.bfloat16))
    x = torch.randn(3, 1024, dtype=torch.bfloat16, device="cuda")
    step = compiled(model)
    with torch.no_grad():
        first = step(x)
        assert all(torch.equal(first, step(x)) for _ in range(20))


def test_another_number_of_tokens_stays_right():
    model = with_stored_weights(FeedForward(512, 1024).to(torch.bfloat16))
    step = compiled(model)
    for tokens in (3, 8, 100):
        x = torch.randn(tokens, 512).to(torch.bfloat16)
        with torch.no_grad():
            assert sqnr_db(expected(model, x), step(x.to("cuda")).cpu()) > LEAST_DB
