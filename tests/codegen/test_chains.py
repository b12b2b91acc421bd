"""A product straight after another: what becomes of the result that only casts read."""

from __future__ import annotations

import pytest
from fake_timing import fastest
from generating import generate
from torch import nn


@pytest.mark.slow
@pytest.mark.parametrize(("target", "preset"), [("sm_100", "mxfp8"), ("sm_90", "fp8")])
def test_the_cast_of_a_products_result_is_a_kernel_of_its_own(target: str, preset: str):
    """It reads BF16 and writes codes and scales; the product before it stores nothing but BF16."""
    chain = nn.Sequential(*(nn.Linear(512, 512, bias=False) for _ in range(2)))
    result = generate(chain, (512, 512), target=target, use=preset)
    assert not result.problems
    first, second = (index for index, launch in enumerate(result.launches) if launch.kind == "product")
    between = result.launches[first + 1 : second]
    read = [launch for launch in between if launch.cast in ("generated", "library")]
    assert read
    assert all(not launch.gemms for launch in read)
    assert {gemm.precision for gemm in result.report.gemms} == {preset}


@pytest.mark.slow
def test_a_product_writes_fp8_where_the_scale_is_known_and_inductor_multiplies():
    """Serving with delayed scales, autotuned: activation and cast end Inductor's own product."""
    model = nn.Sequential(nn.Linear(512, 1024), nn.GELU(approximate="tanh"), nn.Linear(1024, 512, bias=False))
    use = {"precision": "fp8", "scaling": "delayed"}
    with fastest(lambda name, _: "scaled_mm" not in name):
        result = generate(model, (256, 512), target="sm_90", use=use)
    assert not result.problems
    up, _ = (launch for launch in result.launches if launch.kind == "product")
    assert "mx.cast.default" in up.operators
    assert up.num_bytes == pytest.approx(256 * 512 + 512 * 1024 + 256 * 1024, rel=0.01)  # a byte an element
    assert sum(launch.kind == "cast" for launch in result.launches) == 3  # of the input and the weights
    assert not any("mx.largest.default" in launch.operators for launch in result.launches)
