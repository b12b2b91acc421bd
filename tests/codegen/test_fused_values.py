"""What the generated kernels of fused casts and products compute, in Triton's interpreter."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_timing import fastest
from helpers.eager import NVIDIA, product
from helpers.paces import mostly_slow
from helpers.policies import every
from helpers.reference import sqnr_db
from helpers.stored_weights import binades
from helpers.written import Written
from interpreted import interpret
from torch import Tensor, nn
from torch.nn import functional as F

from mxcompile.offline import codegen


def down(producer: Callable[[Tensor], Tensor], k: int, n: int) -> Any:
    """y + down(producer(x)), with a bias."""
    parts = {"producer": producer, "down": nn.Linear(k, n)}
    return Written(lambda model, x, y: y + model.down(model.producer(x)), **parts)


def heads(x: Tensor) -> Tensor:
    """What stands behind an attention: [heads, tokens, width] → [tokens, heads · width]."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


@pytest.mark.parametrize(
    ("producer", "dtype", "shape", "m", "n"),
    mostly_slow(
        [
            (F.relu, torch.bfloat16, (40, 130), 40, 150),
            (heads, torch.bfloat16, (3, 5, 24), 5, 72),
            (lambda x: x + 1, torch.float32, (2, 72), 2, 40),
            (F.relu, torch.bfloat16, (1, 256), 1, 128),
        ],
        (heads, torch.bfloat16, (3, 5, 24), 5, 72),
        rows=True,
    ),
)
def test_fused_product_of_few_rows_has_the_reference_values(producer, dtype, shape, m, n, tmp_path):
    """Swapped. Nothing beside the weight's cast, and a kernel of the producer if Inductor stores that."""
    launches = _check(down(producer, math.prod(shape) // m, n).to(dtype), shape, m, tmp_path)
    assert launches[-1].gemms == ("down fprop",)
    assert len(launches) <= 3


def test_fused_product_of_many_rows_has_the_reference_values(tmp_path):
    """Where the fused form has won the timing."""
    with fastest(lambda name, _: "mx_quantize_mm" in name):
        _check(down(F.relu, 200, 140).to(torch.bfloat16), (150, 200), 150, tmp_path)


def _check(model: Any, shape: tuple[int, ...], m: int, folder: Path) -> tuple:
    """Generate and run `model`, held to the reference cast and product: what was launched."""
    (n, k), dtype = model.down.weight.shape, model.down.weight.dtype
    with torch.no_grad():
        model.down.weight.copy_(binades(n, k))
    x, y = binades(m, k).reshape(shape).to(dtype), torch.randn(m, n).to(dtype)
    result = codegen(model, x, y, target="sm_100", training=False, policy=every("mxfp8"), out_dir=folder)
    (gemm,) = result.report.gemms
    tile = "128x32x128 swapped" if m <= 64 else "128x128x64"
    assert gemm.kernel == f"mx_quantize_mm {tile} (tcgen05.mma block_scale)"
    weight, bias = model.down.weight.detach(), model.down.bias.detach()
    out, *_ = interpret(folder, [x, weight, bias, y])
    rounded = product(model.producer(x), weight.t(), NVIDIA, torch.float32) + bias.float()
    expected = (y.float() + rounded.to(dtype).float()).to(dtype)
    assert sqnr_db(expected, out) > (50 if dtype is torch.bfloat16 else 100)
    return result.launches
