"""Code for GPUs with an MX GEMM: every product the policy chose on the chip's instruction, no spills."""

from __future__ import annotations

import pytest

MMA = {
    "sm_100": "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale",
    "sm_103": "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale",
    "sm_120": "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale",
    "gfx950": "v_mfma_scale_f32",
}


def _products(result):
    return [launch for launch in result.launches if launch.gemms and "attention" not in launch.kernel]


@pytest.mark.parametrize(("target", "training"), [("sm_100", True), ("sm_120", False), ("gfx950", False)])
def test_every_chosen_gemm_is_on_the_native_instruction(generated, target, training):
    result = generated(target, training)
    chosen = [f"{gemm.name} {gemm.gemm}" for gemm in result.report.gemms if gemm.precision == "mxfp8"]
    assert len(chosen) == (3 * 7 if training else 7)
    launches = _products(result)
    assert sorted(gemm for launch in launches for gemm in launch.gemms) == sorted(chosen)
    for launch in launches:
        assert launch.generated
        instructions = result.kernel(launch.kernel).binary.mma
        assert instructions, launch.kernel
        assert all(name.startswith(MMA[target]) for name in instructions), (launch.kernel, instructions)


@pytest.mark.parametrize(("target", "training"), [("sm_100", True), ("sm_120", False), ("gfx950", False)])
def test_nothing_spills_and_everything_fits(generated, target, training):
    result = generated(target, training)
    assert result.problems == ()
    spilling = {k.name: k.binary.spill_bytes for k in result.kernels if k.binary.mma and k.binary.spill_bytes}
    assert spilling == {}


def test_a_product_that_cannot_is_dequantized_and_says_so(generated):
    """A batched product: the record names the kernel it runs instead."""
    import torch

    import mxcompile

    class Experts(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.empty(4, 64, 96, device="meta", dtype=torch.bfloat16))

        def forward(self, x):
            return torch.bmm(x, self.weight)

    x = torch.empty(4, 128, 64, device="meta", dtype=torch.bfloat16)
    policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}
    result = mxcompile.codegen(Experts(), x, target="sm_100", training=False, policy=policy)
    (gemm,) = result.report.gemms
    assert (gemm.precision, gemm.kernel) == ("mxfp8", "aten.bmm (bfloat16, dequantized)")
    assert [launch.kernel for launch in result.launches if launch.gemms] == ["extern_kernels.bmm"]
