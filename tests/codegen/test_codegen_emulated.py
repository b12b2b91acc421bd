"""Code for a GPU without an MX GEMM: dequantized operands, the vendor's BF16 GEMM, the fused attention."""

from __future__ import annotations

import dataclasses

import pytest
import torch
from generating import generate
from helpers.casts import multiplies_scaled
from helpers.paces import mostly_slow
from helpers.written import Written
from torch import nn

from mxcompile.lowering.targets import TARGETS

CASTS = "mx.cast.default"
ATTENTION = "torch.ops.aten._scaled_dot_product_cudnn_attention"


def test_every_gemm_of_the_report_is_launched_once(generated):
    result = generated("sm_90", True)
    computed = [gemm for launch in result.launches for gemm in launch.gemms]
    linear = [f"{gemm.name} {gemm.gemm}" for gemm in result.report.gemms if gemm.precision == "mxfp8"]
    assert [computed.count(gemm) for gemm in linear] == [1] * (3 * 7)


def test_emulated_products_run_on_the_vendor_gemm(generated):
    result = generated("sm_90", True)
    launched = [launch for launch in result.launches if launch.kernel == "extern_kernels.mm"]
    assert len(launched) == 3 * 7
    assert not any(map(multiplies_scaled, result.kernels))
    mxfp8 = [gemm for gemm in result.report.gemms if gemm.precision == "mxfp8"]
    assert {gemm.kernel for gemm in mxfp8} == {"aten.mm (bfloat16, dequantized)"}


def test_attention_is_the_one_a_gpu_runs(generated):
    result = generated("sm_90", True)
    kernels = [launch.kernel for launch in result.launches if "attention" in launch.kernel]
    assert kernels == [f"{ATTENTION}.default", f"{ATTENTION}_backward.default"]


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "gfx942"])
def test_kernels_are_compiled_for_the_target(generated, target):
    result = generated(target, target in ("sm_80", "sm_90"))
    assert not result.problems
    suffix = "hsaco" if target == "gfx942" else "cubin"
    for kernel in result.kernels:
        assert kernel.binary.image[suffix].startswith(b"\x7fELF")
        assert kernel.binary.registers > 0


@pytest.mark.parametrize("target", mostly_slow(["sm_80", "sm_89", "gfx942"], "gfx942"))
def test_emulated_casts_round_on_bits_without_fp16(generated, target):
    """Where Triton goes through FP16 to FP8, elements are rounded on their bits instead."""
    result = generated(target, target == "sm_80")
    casts = [result.kernel(launch) for launch in result.launches if CASTS in launch.operators]
    assert casts
    for kernel in casts:
        assert "NATIVE : tl.constexpr = False" in kernel.source
        assert "STORES_FP8 : tl.constexpr = " + str(target != "sm_80") in kernel.source
        assert ".to(tl.float8" not in kernel.source


def test_one_read_makes_all_that_is_made_of_a_tensor(generated):
    """Each activation and gradient is cast by one kernel, its producer in it; values never become FP8."""
    result = generated("sm_90", True)
    casts = [launch for launch in result.launches if CASTS in launch.operators]
    forward = [launch for launch in casts if launch.phase == "forward"]
    assert len(forward) == 4 + 7, "norm, attention, norm, SwiGLU; weights"
    backward = [launch for launch in casts if launch.phase == "backward"]
    gradients = 6  # two of SwiGLU in one, those of q, k and v, and of both outputs
    assert len(backward) == gradients + 1 + 7, "the attention's result, kept for its own backward; weights"
    assert all(
        "tl.float8e4nv" not in result.kernel(launch).source.partition("packed.")[0] for launch in casts
    )
    (two,) = [launch for launch in backward if "aten.neg.default" in launch.operators]
    elements = 1024 * 1024
    assert two.num_bytes <= elements * 2 * (3 + 4) * 1.01


def test_emulated_casts_spend_few_instructions_per_element(generated):
    """In instructions; an H200's memory leaves 17 to one value, 26 to both, 62 to SwiGLU's gradients."""
    result = generated("sm_90", True)
    casts = [launch for launch in result.launches if CASTS in launch.operators]
    assert not any(result.kernel(launch).binary.spill_bytes for launch in casts)
    alone = sorted(launch.facts.per_element for launch in casts if launch.cast == "input")
    assert 6 < alone[0] <= alone[-2] <= 8.6, "weights, and the attention's result"
    assert alone[-1] <= 14.5, "the gradient that comes in, both values"
    assert max(launch.facts.per_element for launch in casts) <= 46


def test_bytes_moved_are_those_of_the_tensors(generated):
    """The GEMM of a 512-wide layer on 1,024 tokens in BF16: operands and result."""
    result = generated("sm_90", False)
    (launch,) = (launch for launch in result.launches if launch.gemms == ("attention.q fprop",))
    assert launch.num_bytes == 2 * (1024 * 512 + 512 * 512 + 1024 * 512)


def test_result_prints_within_120_columns(generated):
    text = str(generated("sm_90", True))
    assert max(map(len, text.splitlines())) <= 120
    assert "estimate without machine code (not measured)" in text


def test_save_writes_code_of_every_kernel(generated, tmp_path):
    result = generated("sm_90", False)
    result.save(tmp_path / "out")
    assert (tmp_path / "out" / "inference.py").read_text() == result.wrappers["inference"]
    for kernel in result.kernels:
        for suffix in ("py", "ttgir", "ptx", "cubin"):
            assert (tmp_path / "out" / kernel.phase / f"{kernel.name}.{suffix}").stat().st_size > 0


@pytest.mark.slow
def test_a_kernel_is_not_pipelined_where_the_chip_has_no_room_for_it(monkeypatch: pytest.MonkeyPatch):
    """As Inductor does when a launch lacks shared memory: it compiles the kernel again."""
    small = dataclasses.replace(TARGETS["sm_89"], shared_bytes=40 * 1024)
    monkeypatch.setitem(TARGETS, "sm_89", small)
    model = Written(lambda model, x: x + model.norm(x), norm=nn.RMSNorm(4096, eps=1e-6))
    x = torch.empty(8192, 4096, dtype=torch.bfloat16, device="meta", requires_grad=True)
    result = generate(model, x, target="sm_89", training=True, policy="bf16")
    assert result.problems == ()
    assert {kernel.binary.settings.get("NUM_STAGES") for kernel in result.kernels} == {None, 1}
