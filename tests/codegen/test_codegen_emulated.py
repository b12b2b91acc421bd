"""Code for a GPU without an MX GEMM: dequantized operands, the vendor's BF16 GEMM, the fused attention."""

from __future__ import annotations

import pytest

FLASH = "torch.ops.aten._scaled_dot_product_flash_attention"


def test_every_gemm_of_the_report_is_launched_once(generated):
    result = generated("sm_90", True)
    computed = [gemm for launch in result.launches for gemm in launch.gemms]
    linear = [f"{gemm.name} {gemm.gemm}" for gemm in result.report.gemms if gemm.precision == "mxfp8"]
    assert len(linear) == 3 * 7
    for gemm in linear:
        assert computed.count(gemm) == 1, gemm


def test_gemms_are_the_vendors(generated):
    result = generated("sm_90", True)
    launched = [launch for launch in result.launches if launch.kernel == "extern_kernels.mm"]
    assert len(launched) == 3 * 7
    assert not any("dot_scaled" in kernel.source for kernel in result.kernels)
    mxfp8 = [gemm for gemm in result.report.gemms if gemm.precision == "mxfp8"]
    assert {gemm.kernel for gemm in mxfp8} == {"aten.mm (bfloat16, dequantized)"}


def test_attention_is_the_one_a_gpu_runs(generated):
    result = generated("sm_90", True)
    kernels = [launch.kernel for launch in result.launches if "attention" in launch.kernel]
    assert kernels == [f"{FLASH}.default", f"{FLASH}_backward.default"]


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "sm_90", "gfx942"])
def test_kernels_are_compiled_for_the_target(generated, target):
    result = generated(target, target in ("sm_80", "sm_90"))
    assert not result.problems
    suffix = "hsaco" if target == "gfx942" else "cubin"
    for kernel in result.kernels:
        assert kernel.binary.image[suffix].startswith(b"\x7fELF")
        assert kernel.binary.registers > 0


@pytest.mark.parametrize("target", ["sm_80", "sm_89", "gfx942"])
def test_casts_round_once(generated, target):
    """Where Triton goes through FP16 to FP8, elements are rounded on their bits before."""
    result = generated(target, target == "sm_80")
    launches = [
        launch
        for launch in result.launches
        if any(name.startswith("mx.quantize") for name in launch.operators)
    ]
    casts = [kernel for kernel in map(result.kernel, launches) if "tl.store" in kernel.source]
    half = str((1 << 19) - 1)  # of a step of E4M3 in the bits of FP32, less one
    assert any(half in kernel.source for kernel in casts)
    for kernel in casts:
        if "float8" in kernel.source:
            assert target != "sm_80"
            assert half in kernel.source


def test_bytes_moved_are_those_of_the_tensors(generated):
    """The GEMM of a 512-wide layer on 1,024 tokens in BF16: operands and result."""
    result = generated("sm_90", False)
    (launch,) = (launch for launch in result.launches if launch.gemms == ("attention.q fprop",))
    assert launch.num_bytes == 2 * (1024 * 512 + 512 * 512 + 1024 * 512)


def test_result_prints_within_120_columns(generated):
    text = str(generated("sm_90", True))
    assert max(map(len, text.splitlines())) <= 120
    assert "roofline estimate (not measured)" in text


def test_files(generated, tmp_path):
    result = generated("sm_90", False)
    result.save(tmp_path / "out")
    assert (tmp_path / "out" / "inference.py").read_text() == result.wrappers["inference"]
    for kernel in result.kernels:
        for suffix in ("py", "ttgir", "ptx", "cubin"):
            assert (tmp_path / "out" / kernel.phase / f"{kernel.name}.{suffix}").stat().st_size > 0
