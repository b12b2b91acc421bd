"""Code for a Llama block that serves few tokens: casts that one product reads are in that product."""

from __future__ import annotations

import functools

import pytest
import torch
from helpers.paces import mostly_slow
from llama_block import WIDTH, block
from test_codegen_native import MMA

from mxcompile.offline import CodegenResult, codegen

FUSED = {"attention.o fprop", "ffn.down fprop"}


@functools.cache
def _generate(target: str) -> CodegenResult:
    model, _ = block()
    x = torch.empty(1, 16, WIDTH, device="meta", dtype=torch.bfloat16)
    return codegen(model, x, target=target, training=False)


TARGETS = ("sm_100", "sm_120", "gfx950")


@pytest.mark.parametrize("target", mostly_slow(TARGETS, "sm_100"))
def test_no_activation_is_cast_on_its_own(target):
    """Attention's output and SwiGLU's are cast where they are multiplied; QKV share a norm's, gate and up."""
    result = _generate(target)
    assert {launch.cast for launch in result.launches} == {"", "input"}
    assert sum(launch.cast == "input" for launch in result.launches) == 7, "the weights"
    fused = {gemm for launch in result.launches if _quantizes(launch) for gemm in launch.gemms}
    assert fused == FUSED
    shared = [launch for launch in result.launches if "mx.cast.default" in launch.operators]
    assert sum(not launch.cast for launch in shared) == 2, "of a norm each, with the norm in it"


@pytest.mark.parametrize("target", mostly_slow(TARGETS, "sm_100"))
def test_the_instruction_is_native_and_nothing_spills(target):
    result = _generate(target)
    assert result.problems == ()
    for binary in (result.kernel(launch).binary for launch in result.launches if _quantizes(launch)):
        assert binary.mma
        assert all(name.startswith(MMA[target]) for name in binary.mma)
        assert binary.spill_bytes == 0


def test_records_of_few_tokens_name_the_fused_kernel():
    kernels = {f"{gemm.name} {gemm.gemm}": gemm.kernel for gemm in _generate("sm_100").report.gemms}
    for name, kernel in kernels.items():
        if name in FUSED:
            assert kernel == "mx_quantize_mm 128x32x128 swapped (tcgen05.mma block_scale)"
        elif not name.startswith("attention fprop"):
            assert kernel.startswith("mx_scaled_mm ")


def test_epilogues_are_fused_into_products_of_few_tokens():
    """The residual is added by the kernel, and SwiGLU computed by the one before it."""
    result = _generate("sm_100")
    (down,) = (launch for launch in result.launches if launch.gemms == ("ffn.down fprop",))
    assert "aten.add.Tensor" in down.operators
    assert "tl.exp" not in result.kernel(down).source
    assert "libdevice.exp" not in result.kernel(down).source
    (up,) = (launch for launch in result.launches if launch.gemms == ("ffn.up fprop",))
    assert "aten.mul.Tensor" in up.operators


def _quantizes(launch):
    return "mx.quantize_mm.default" in launch.operators
