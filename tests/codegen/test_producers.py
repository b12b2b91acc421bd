"""The rewrites of what Inductor writes for a cast's producer: what they change, and what they leave."""

from __future__ import annotations

import pytest
import torch
from helpers.rendered import rendered

from mxcompile import ops
from mxcompile.lowering.targets import TARGETS
from mxcompile.lowering.templates.producers import approximated, compared, narrowed

LOAD = (
    "tmp3 = tl.load(in_ptr5 + (tl.broadcast_to({}, [BLOCK_M, BLOCK_N])), mask, eviction_policy='evict_last')"
)
SILU = """    tmp2 = -tmp1
    tmp3 = libdevice.exp(tmp2)
    tmp4 = tl.full([1], 1.0, tl.float32)
    tmp5 = tmp3 + tmp4
    tmp6 = (tmp1 / {})
    tmp7 = tmp6 * tmp4
"""


ROWS, COLUMNS = "    mask_m = idx_m < M\n", "    mask_n = idx_n < N\n"


def test_load_varying_along_one_dimension_is_narrowed():
    source = narrowed(ROWS + LOAD.format("idx_m"))
    assert source == f"{ROWS}tmp3 = tl.load(in_ptr5 + (idx_m), mask_m, eviction_policy='evict_last')"
    assert "in_ptr5 + (2*idx_n + 7), mask_n," in narrowed(COLUMNS + LOAD.format("2*idx_n + 7"))


VARYING = ("xindex", "idx_n + 4096*idx_m", "ks0", "((xindex // 32) % 7)")


@pytest.mark.parametrize(
    ("masks", "index"),
    [*((ROWS + COLUMNS, index) for index in VARYING), (ROWS, "idx_n")],
    ids=[*VARYING, "without the mask of its dimension"],
)
def test_load_varying_along_both_dimensions_or_unmasked_stays(masks, index):
    assert narrowed(masks + LOAD.format(index)) == masks + LOAD.format(index)


def test_silu_has_another_last_line():
    """What else reads its parts still finds them."""
    source = approximated(SILU.format("tmp5"))
    assert source == SILU.format("tmp5").replace("(tmp1 / tmp5)", "tmp1 * packed.sigmoid(tmp1)")


def test_a_sigmoid_that_is_written_as_an_inverse_has_another_last_line():
    """As PyTorch 2.11 writes it in the gradient of SiLU."""
    written = SILU.format("tmp5").replace(
        "    tmp6 = (tmp1 / tmp5)\n    tmp7 = tmp6 * tmp4\n",
        "    tmp6 = tl.full([1], 1, tl.int32)\n    tmp7 = (tmp6 / tmp5)\n    tmp8 = tmp7 * tmp4\n",
    )
    assert approximated(written) == written.replace("tmp8 = tmp7 * tmp4", "tmp8 = packed.sigmoid(tmp1)")
    other = written.replace("tmp7 * tmp4", "tmp7 * tmp1")
    assert approximated(other) == other


def test_division_by_other_denominators_is_not_approximated():
    """Only a denominator of 1 and more is known to have an inverse that the chip approximates well."""
    assert approximated(SILU.format("tmp9")) == SILU.format("tmp9")


def test_operation_stored_behind_the_cast_is_not_approximated():
    """It may be FP32."""
    source = (
        "    tmp1 = tl.sigmoid(tmp0)\n    codes = packed.quantize_rowwise(x)\n    tmp2 = tl.sigmoid(tmp0)\n"
    )
    assert approximated(source) == source.replace("tmp1 = tl.", "tmp1 = packed.")


def test_rounding_to_bf16_becomes_rounding_of_pairs():
    line = "    x = tl.where(mask, tmp9, 0.0).to(tl.bfloat16).broadcast_to(xindex.shape)\n"
    expected = "    x = packed.rounded((tl.where(mask, tmp9, 0.0)).broadcast_to(xindex.shape))\n"
    assert approximated(line) == expected
    model = "    tmp7 = tmp6.to(tl.bfloat16)\n"
    cast = model + "    y = tmp7.broadcast_to(xindex.shape)\n"
    assert approximated(cast) == model + "    y = packed.rounded((tmp6).broadcast_to(xindex.shape))\n"
    assert approximated(line.replace("bfloat16", "float16")) == line.replace("bfloat16", "float16")


def test_maximum_with_nan_becomes_a_comparison():
    """Whichever of their forms an Inductor writes; what does not propagate NaN stays."""
    assert compared("tmp3 = tl.maximum(tmp1, tmp2, tl.PropagateNan.ALL)") == "tmp3 = tiles.larger(tmp1, tmp2)"
    assert compared("tmp3 = triton_helpers.minimum(tmp1, tmp2)") == "tmp3 = tiles.smaller(tmp1, tmp2)"
    assert compared("rows = tl.minimum(M - first, 128)") == "rows = tl.minimum(M - first, 128)"


@pytest.mark.parametrize(("function", "kernels"), [(torch.sin, 2), (torch.tanh, 1)])
def test_functions_of_angles_have_a_kernel_of_their_own(function, kernels):
    """Their code for large arguments takes many registers: with a cast it spills 776 bytes in Triton 3.6."""
    copies = [f"e4m3 1x32 rceil @{dim} bfloat16" for dim in (-1, -2)]
    x = torch.empty(256, 512, dtype=torch.bfloat16, device="meta")
    source = rendered(lambda x: ops.cast(function(x), copies), (x,), TARGETS["sm_90"])
    assert source.count("@triton.jit") == kernels
