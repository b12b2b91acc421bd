"""FP8 with FP32 scales on chips with an FP8 GEMM: the vendor's `_scaled_mm`, in the layouts that it takes."""

from __future__ import annotations

import pytest
from fake_timing import fastest
from generating import generate
from helpers.blocks import FeedForward
from torch._inductor import config

SCALED = "extern_kernels._scaled_mm"


def generated(preset: str, target: str, width: int = 256, training: bool = False):
    policy = {"version": 1, "preset": preset}
    model = FeedForward(width, 512, biased_down=False)
    return generate(model, (128, width), target=target, training=training, policy=policy)


WORDS = {
    "fp8_tensor": {"tensor"},
    "fp8_delayed": {"tensor"},
    "fp8_rowwise": {"channel"},
    "fp8_block": {"1x128", "1x128 and 128x128"},
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("target", "preset"),
    [
        ("sm_90", "fp8_tensor"),
        ("sm_90", "fp8_block"),
        ("gfx942", "fp8_rowwise"),
        pytest.param("sm_90", "fp8_delayed", marks=pytest.mark.slow),
        pytest.param("sm_89", "fp8_tensor", marks=pytest.mark.slow),
        pytest.param("sm_100", "fp8_rowwise", marks=pytest.mark.slow),
        pytest.param("gfx950", "fp8_tensor", marks=pytest.mark.slow),
    ],
)
def test_every_product_is_the_vendors(target: str, preset: str):
    result = generated(preset, target, width=512, training=True)
    assert not result.problems
    launched = [launch for launch in result.launches if launch.kernel == SCALED]
    assert len(launched) == len(result.report.gemms) == 5  # the input needs no gradient
    words = {f"aten._scaled_mm ({word} scales)" for word in WORDS[preset]}
    assert {gemm.kernel for gemm in result.report.gemms} == words
    wrapper = "".join(result.wrappers.values())
    assert ("float8_e4m3fnuz" in wrapper) == (target == "gfx942")
    check_casts(result, target)
    reads = ["fp8_tiles.quotient" in kernel.source for kernel in result.kernels if kernel.is_template]
    assert all(reads) != (preset in ("fp8_tensor", "fp8_rowwise"))  # others read a matrix once
    assert not any(name.startswith("mx.largest.") for launch in result.launches for name in launch.operators)


MOST = {"sm_89": 60, "gfx942": 60}
"""Instructions of a cast for an element, where FP8 is rounded to with integers; 35 elsewhere."""


def check_casts(result, target: str) -> None:
    """All are templates, which store what products read; nothing is copied, no element is divided."""
    assert not any("*fp8" in kernel.source for kernel in result.kernels if not kernel.is_template)
    generated = [launch for launch in result.launches if launch.generated]
    casts = [name for name in generated if "fp8_tiles.quotient" in result.kernel(name).source]
    assert len(casts) >= 5  # of x, w and dy of two layers
    for launch in casts:
        assert launch.kind == "cast"
        assert result.kernel(launch).binary.spill_bytes == 0
        if launch.cast:  # nothing else
            assert launch.facts.per_element < MOST.get(target, 35)


def test_sizes_it_does_not_take_are_emulated_with_the_reason():
    result = generated("fp8_tensor", "sm_90", width=250)
    assert not result.problems
    kernels = {gemm.name: gemm.kernel for gemm in result.report.gemms}
    assert kernels == {
        "up": "aten.mm (bfloat16, scaled after); the FP8 GEMM takes multiples of 16 (k=250)",
        "down": "aten.mm (bfloat16, scaled after); the FP8 GEMM takes multiples of 16 (n=250)",
    }


@pytest.mark.slow
def test_scales_of_blocks_are_for_the_library_alone():
    """Inductor's template for them would read them where they do not lie."""
    with (
        config.patch({"triton.enable_persistent_tma_matmul": True}),
        fastest(lambda name, _: "_scaled_mm" not in name or "tma" in name) as seen,
    ):
        result = generated("fp8_block", "sm_90", width=512)
    assert not any("tma" in name for name in seen)
    assert {launch.kernel for launch in result.launches if launch.kind == "product"} == {SCALED}
