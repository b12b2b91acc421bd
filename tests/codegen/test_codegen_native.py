"""Code for GPUs with an MX GEMM: every product the policy chose on the chip's instruction, no spills."""

from __future__ import annotations

import pytest
import torch
from generating import assert_clean, generate
from helpers.casts import casts_both, multiplies_scaled
from helpers.needs import ADDED_RESIDUALS, PAIRS_OF_BF16
from helpers.paces import mostly_slow
from helpers.policies import every
from helpers.written import Written

from mxcompile.lowering.targets import TARGETS

HYBRID = every({"precision": "mxfp8", "grad_dtype": "e5m2"}, preset="hybrid")

MMA = {
    "sm_100": "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale",
    "sm_103": "tcgen05.mma.cta_group::1.kind::mxf8f6f4.block_scale",
    "sm_120": "mma.sync.aligned.m16n8k32.row.col.kind::mxf8f6f4.block_scale",
    "gfx950": "v_mfma_scale_f32",
}
GENERATED = mostly_slow(
    [("sm_100", True), ("sm_120", False), ("gfx950", False)], ("sm_100", True), ("gfx950", False), rows=True
)


def _products(result):
    return [launch for launch in result.launches if launch.gemms and "attention" not in launch.kernel]


@pytest.mark.parametrize(("target", "training"), GENERATED)
def test_every_chosen_gemm_is_on_the_native_instruction(generated, target, training):
    result = generated(target, training)
    chosen = [f"{gemm.name} {gemm.gemm}" for gemm in result.report.gemms if gemm.precision == "mxfp8"]
    assert len(chosen) == (3 * 7 if training else 7)
    launches = _products(result)
    assert sorted(gemm for launch in launches for gemm in launch.gemms) == sorted(chosen)
    for launch in launches:
        assert launch.generated
        instructions = result.kernel(launch).binary.mma
        assert instructions, launch.kernel
        assert all(name.startswith(MMA[target]) for name in instructions), (launch.kernel, instructions)


@pytest.mark.parametrize(("target", "training"), GENERATED)
def test_nothing_spills_and_everything_fits(generated, target, training):
    result = generated(target, training)
    assert result.problems == ()
    assert not [kernel.spill for kernel in result.spilling if kernel.binary.mma]


def test_casts_of_the_forward_are_in_their_producers(generated):
    """On their own are those of weights, and of what the attention of a library makes."""
    result = generated("sm_100", True)
    forward = result.phase("forward")
    alone = [launch.cast for launch in forward if launch.cast]
    assert sorted(alone) == ["input"] * 7 + ["library"]
    fused = [launch for launch in forward if casts_both(result, launch) and not launch.cast]
    norms = [launch for launch in fused if "aten.mul.Tensor" in launch.operators and not _gates(launch)]
    assert (len(norms), len(fused)) == (2, 3), "two norms and SwiGLU"


@ADDED_RESIDUALS
def test_forward_of_a_block_has_no_extra_launches(generated):
    """What a block needs: no transposition, no swizzle of scales, no BF16 copy; products add residuals."""
    result = generated("sm_100", True)
    forward = result.phase("forward")
    kinds = {
        "gemm": [launch for launch in forward if launch.gemms and launch.generated],
        "attention": [launch for launch in forward if "cudnn_attention" in launch.kernel],
        "cast alone": [launch for launch in forward if launch.cast],
        "cast": [launch for launch in forward if casts_both(result, launch) and not launch.cast],
        "statistic": [launch for launch in forward if "aten.mean.dim" in launch.operators],
        "heads repeated": [launch for launch in forward if not launch.operators and launch.generated],
    }
    counts = {kind: len(launches) for kind, launches in kinds.items()}
    assert counts == {
        "gemm": 7, "attention": 1, "cast alone": 8, "cast": 3, "statistic": 2, "heads repeated": 2,
    }  # fmt: skip
    assert sum(counts.values()) == len(forward)


def test_a_norm_is_cast_without_being_stored(generated):
    """The cast reads the block's input, its statistic and the norm's weight, and writes MX copies."""
    result = generated("sm_100", True)
    forward = result.phase("forward")
    first = next(launch for launch in forward if casts_both(result, launch))
    tokens, width = 1024, 512
    read = 2 * tokens * width + 4 * tokens + 2 * width
    written = 2 * (tokens * width + tokens * width // 32)
    assert first.num_bytes == read + written


@PAIRS_OF_BF16
def test_gradients_are_read_once_for_both_layouts(generated):
    """Every activation gradient has casts along both dimensions in one kernel; SwiGLU's two share one."""
    result = generated("sm_100", True)
    backward = result.phase("backward")
    both = [launch for launch in backward if casts_both(result, launch)]
    two = [launch for launch in backward if casts_both(result, launch, 2)]
    assert (len(both), len(two)) == (5, 1)


def test_casts_of_the_backward_on_their_own(generated):
    """The residual's gradient, which a row's sum makes and others read too; the attention's, of a library."""
    result = generated("sm_100", True)
    backward = result.phase("backward")
    alone = [launch.cast for launch in backward if casts_both(result, launch) and launch.cast]
    assert sorted(alone) == ["generated", "input", "library"]
    single = [launch.cast for launch in backward if launch.cast and not casts_both(result, launch)]
    assert single == ["input"] * 8, "seven weights, and the attention's output, which it has saved for itself"


def _gates(launch):
    return "prims.convert_element_type.default" in launch.operators and any(
        name.startswith(("aten.exp", "aten.sigmoid", "aten.neg")) for name in launch.operators
    )


def test_a_training_step_without_rows():
    """Casts of nothing read nothing, and the record says why the FP8 GEMM does not run."""
    x = torch.empty(0, 64, device="meta", dtype=torch.bfloat16, requires_grad=True)
    use = {"precision": "fp8", "scaling": "channel"}
    result = generate(torch.nn.Linear(64, 96), x, target="sm_90", use=use, training=True)
    reason = "the FP8 GEMM takes multiples of 16 (empty)"
    assert {gemm.kernel for gemm in result.report.gemms} == {f"aten.mm (bfloat16, scaled after); {reason}"}


@pytest.mark.parametrize("target", mostly_slow(["sm_90", "sm_100"], "sm_90"))
def test_grouped_product_without_rows_is_dequantized_with_reason(target):
    weight = torch.nn.Parameter(torch.empty(2, 48, 32))
    experts = Written(lambda model, x, offs: torch._grouped_mm(x, model.weight, offs), weight=weight)
    x = torch.empty(0, 48, device="meta", dtype=torch.bfloat16, requires_grad=True)
    offs = torch.empty(2, device="meta", dtype=torch.int32)
    result = generate(experts, x, offs, target=target, training=True)
    kernel = "mx.grouped_mm (bfloat16, dequantized); a dimension is empty"
    assert {gemm.kernel for gemm in result.report.gemms} == {kernel}


@pytest.mark.parametrize(
    ("tokens", "features", "reason"), [(0, 96, "a dimension is empty"), (1, 1, "its result is one element")]
)
@pytest.mark.parametrize("precision", ["mxfp8", "mxfp4", "nvfp4"])
def test_empty_or_single_element_product_is_dequantized_with_reason(tokens, features, reason, precision):
    result = generate(torch.nn.Linear(64, features, bias=False), (tokens, 64), use=precision)
    (gemm,) = result.report.gemms
    way = "scaled after" if precision == "nvfp4" else "dequantized"
    assert (gemm.precision, gemm.kernel) == (precision, f"aten.mm (bfloat16, {way}); {reason}")
    assert not any(map(multiplies_scaled, result.kernels))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "widths", "tokens", "kernel"),
    [
        ("sm_100", (72, 100), 1, "mx_quantize_mm 128x32x128 swapped"),
        ("sm_100", (72, 100), 300, "mx_scaled_mm 128x128x128"),
        ("sm_100", (71, 101), 300, "mx_scaled_mm 128x64x64"),
        ("sm_120", (71, 101), 300, "mx_scaled_mm 64x64x64"),
    ],
)
def test_odd_sizes_stay_native(target, widths, tokens, kernel):
    """One token, widths of which 32 or 2 is no divisor, FP32 weights, E5M2 gradients."""
    narrow, wide = widths
    layers = torch.nn.Linear(narrow, wide), torch.nn.GELU(), torch.nn.Linear(wide, narrow)
    options = {"target": target, "training": True, "policy": HYBRID, "dtype": torch.float32}
    result = generate(torch.nn.Sequential(*layers), (tokens, narrow), **options)
    named = {gemm.kernel for gemm in result.report.gemms if gemm.gemm == "fprop"}
    assert named == {f"{kernel} ({TARGETS[target].mma})"}
    products = [launch for launch in result.launches if launch.gemms]
    assert len(products) == len(result.report.gemms) == 5
    for launch in products:
        assert all("block_scale" in name for name in result.kernel(launch).binary.mma)
    assert_clean(result)
