"""The operator of weight-only products: what `torch.library.opcheck` demands, and its reference."""

from __future__ import annotations

import pytest
import torch
from helpers.casts import quantize, scaled_mm
from helpers.reference import round_trip
from torch.library import opcheck

from mxcompile import ops
from mxcompile.formats import Format, elem_type

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
MX = "e4m3 1x32 rceil"
# opcheck's schema test compares inputs before and after, which torch cannot do for FP8
WITHOUT_SCHEMA = ("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")


@pytest.mark.parametrize("bias", [None, 30])
@pytest.mark.parametrize("rows", [0, 1, 5])
@pytest.mark.parametrize("elem", [E4M3, E5M2], ids=str)
def test_weight_only_mm_passes_opcheck(elem: torch.dtype, rows: int, bias: int | None):
    qdata, scale = quantize(torch.randn(30, 70), -1, elem, "rceil")
    added = None if bias is None else torch.randn(bias)
    word = str(Format.mx(elem_type(elem)))
    arguments = (torch.randn(rows, 70, dtype=torch.bfloat16), qdata, scale, added, torch.bfloat16, word)
    opcheck(ops.weight_only_mm, arguments, test_utils=WITHOUT_SCHEMA)


def test_weight_only_mm_equals_the_product_with_decoded_weight():
    x, w, bias = torch.randn(6, 100), torch.randn(72, 100), torch.randn(72)
    exact = x.double() @ round_trip(w, 1).double().t() + bias.double()
    output = ops.weight_only_mm(x, *quantize(w, -1, E4M3, "rceil"), bias, torch.float32, MX)
    torch.testing.assert_close(output.double(), exact, rtol=1e-5, atol=1e-4)


def test_weight_only_mm_of_quantized_activation_equals_scaled_mm():
    x, w = torch.randn(6, 100), torch.randn(72, 100)
    a, (qdata, scale) = quantize(x, -1, E4M3, "rceil"), quantize(w, -1, E4M3, "rceil")
    both = scaled_mm(*a, qdata.t(), scale.t(), None, torch.float32)
    weight_only = ops.weight_only_mm(
        ops.decode(*a, -1, MX, torch.bfloat16), qdata, scale, None, torch.float32, MX
    )  # E4M3 times a power of two is exact in BF16
    torch.testing.assert_close(weight_only, both)
