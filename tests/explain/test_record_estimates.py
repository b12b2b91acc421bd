"""Estimates of records: products and casts at the rates of a chip, checked by hand."""

from __future__ import annotations

import dataclasses

import pytest

from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.rates import Rates
from mxcompile.offline.record_work import estimate
from mxcompile.report import GemmRecord, OperandFormat, Part, Report

TOKENS, WIDTH = 8192, 4096
TARGET = TARGETS["sm_100"]
PEAK, RATES = TARGET.peak, Rates.for_target(TARGET)
assert PEAK is not None


def gemm(name: str = "layers.0.up", **fields: object) -> GemmRecord:
    """Returns the record of a square layer's forward GEMM in MXFP8."""
    formats = tuple(
        OperandFormat(operand=operand, elem="e4m3", block="1x32", rounding="rceil") for operand in ("x", "w")
    )
    plain = GemmRecord(
        name=name,
        role="ffn_in",
        gemm="fprop",
        m=TOKENS,
        n=WIDTH,
        k=WIDTH,
        precision="mxfp8",
        reason="",
        dtype="bfloat16",
        formats=formats,
    )
    return dataclasses.replace(plain, **fields)  # type: ignore[arg-type]


def estimated(*gemms: GemmRecord) -> tuple[GemmRecord, ...]:
    return estimate(Report.from_parts([Part(gemms=gemms)], target=TARGET.name, policy="")).gemms


def streamed(num_bytes: float) -> float:
    """Returns the time of a launch that moves bytes and computes nothing that takes longer."""
    return num_bytes / (PEAK.bandwidth_gbs * 1e3 * RATES["memory"]) + RATES["launch_us"]


def multiplied(kind: str) -> float:
    """Returns the time of the product, which its FLOPs bound."""
    return 2 * TOKENS * WIDTH * WIDTH / (PEAK.dense_tflops[kind] * 1e6 * RATES[kind]) + RATES["launch_us"]


def test_forward_alone_casts_each_operand_once():
    (record_estimate,) = estimated(gemm())
    casts = sum(streamed((2 + 33 / 32) * numel) for numel in (TOKENS * WIDTH, WIDTH * WIDTH))
    assert record_estimate.estimate_bf16_us == pytest.approx(multiplied("bf16"))
    assert record_estimate.estimate_us == pytest.approx(multiplied("mxfp8") + casts)


def test_a_training_step_shares_the_cast_of_an_operand():
    forward, backward = gemm(), gemm(gemm="wgrad", precision="bf16", formats=())
    record_estimate, _ = estimated(forward, backward)
    casts = sum(streamed((2 + 2 * 33 / 32) * numel) / 2 for numel in (TOKENS * WIDTH, WIDTH * WIDTH))
    assert record_estimate.estimate_us == pytest.approx(multiplied("mxfp8") + casts)


def test_siblings_share_the_cast_of_their_input():
    (alone,) = estimated(gemm())
    gate, up = estimated(gemm("layers.0.gate"), gemm("layers.0.up"))
    assert gate.estimate_us == up.estimate_us
    assert alone.estimate_us is not None
    assert gate.estimate_us == pytest.approx(alone.estimate_us - streamed((2 + 33 / 32) * TOKENS * WIDTH) / 2)


def test_attention_keeps_its_scores_on_the_chip():
    """At 8192 tokens the scores take 16 times the bytes of q and k, and attention is bound by its FLOPs."""
    scores = gemm(
        "attention",
        role="attn_scores",
        batch=32,
        m=TOKENS,
        n=TOKENS,
        k=128,
        precision="bf16",
        formats=(),
    )
    (record_estimate,) = estimated(scores)
    flops = 2 * 32 * TOKENS * TOKENS * 128
    backend = "cudnn" if TARGET.prefers_cudnn else "flash"
    expected = flops / (PEAK.dense_tflops["bf16"] * 1e6 * RATES[backend]) + RATES["launch_us"]
    assert record_estimate.estimate_us == record_estimate.estimate_bf16_us == pytest.approx(expected)
