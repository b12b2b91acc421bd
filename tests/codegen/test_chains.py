"""A product straight after another: what becomes of the result that only casts read."""

from __future__ import annotations

import pytest
import torch
from fake_timing import fastest
from torch import Tensor, nn

import mxcompile


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(512, 512, bias=False, dtype=torch.bfloat16) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x))


@pytest.mark.slow
@pytest.mark.parametrize(("target", "preset"), [("sm_100", "mxfp8"), ("sm_90", "fp8")])
def test_the_cast_of_a_products_result_is_a_kernel_of_its_own(target: str, preset: str):
    """It reads BF16 and writes codes and scales; the product before it stores nothing but BF16."""
    policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": preset}]}
    x = torch.randn(512, 512, dtype=torch.bfloat16)
    result = mxcompile.codegen(Chain(), x, target=target, policy=policy, training=False)
    assert not result.problems
    first, second = (index for index, launch in enumerate(result.launches) if launch.kind == "product")
    between = result.launches[first + 1 : second]
    read = [launch for launch in between if launch.cast in ("generated", "library")]
    assert read
    assert all(not launch.gemms for launch in read)
    assert {gemm.precision for gemm in result.report.gemms} == {preset}


class Ffn(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(512, 1024, dtype=torch.bfloat16)
        self.down = nn.Linear(1024, 512, bias=False, dtype=torch.bfloat16)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(nn.functional.gelu(self.up(x), approximate="tanh"))


@pytest.mark.slow
def test_a_product_writes_fp8_where_the_scale_is_known_and_inductor_multiplies():
    """Serving with delayed scales, autotuned: activation and cast end Inductor's own product."""
    x = torch.randn(256, 512, dtype=torch.bfloat16)
    use = {"precision": "fp8", "scaling": "delayed"}
    policy = {"version": 1, "rules": [{"match": {"name": "*"}, "use": use}]}
    with fastest(lambda name, _: "scaled_mm" not in name):
        result = mxcompile.codegen(Ffn(), x, target="sm_90", policy=policy, training=False)
    assert not result.problems
    up, _ = (launch for launch in result.launches if launch.kind == "product")
    assert "mx.cast.default" in up.operators
    assert up.num_bytes == pytest.approx(256 * 512 + 512 * 1024 + 256 * 1024, rel=0.01)  # a byte an element
    assert sum(launch.kind == "cast" for launch in result.launches) == 3  # of the input and the weights
    assert not any("mx.largest.default" in launch.operators for launch in result.launches)
