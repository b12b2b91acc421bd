"""FP32 quotients of compiled casts, with the operator of PyTorch for them and without, as in older ones."""

import pytest
import torch
from helpers.casts import encode
from test_casts import assert_same_bits, wild
from torch._inductor.ops_handler import OpsHandler

from mxcompile import ops
from mxcompile.lowering.inductor import general as general  # registers the lowerings


@pytest.mark.parametrize("fmt", ["e4m3 channel nearest", "e5m2 1x128 nearest", "e2m1 1x16 two-level"])
@pytest.mark.parametrize("operator", [True, False])
def test_elements_and_scales_are_those_of_the_reference(monkeypatch, operator, fmt):
    if not operator:
        monkeypatch.delattr(OpsHandler, "div_rn", raising=False)
    x = wild(64, 256, dtype=torch.float32)
    x = torch.where(x.isfinite(), x, 1.0)
    amax = ops.largest(x) if "two-level" in fmt else None

    def decoded(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        qdata, scale = encode(x, -1, fmt, None, 0, None, amax)
        return qdata, scale, ops.decode(qdata, scale, -1, fmt, torch.float32, amax)

    compiled = torch.compile(decoded, backend="inductor", fullgraph=True)
    assert_same_bits(compiled(x), decoded(x))
