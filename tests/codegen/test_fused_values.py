"""What the generated kernels of fused casts and products compute, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from fake_timing import fastest
from helpers.eager import NVIDIA, product
from helpers.paces import mostly_slow
from helpers.reference import sqnr_db
from interpreted import interpret
from torch import Tensor, nn
from torch.nn import functional as F

from mxcompile.offline import codegen

POLICY = {"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]}


class Down(nn.Module):
    """y + down(producer(x)), with a bias."""

    def __init__(self, producer: Callable[[Tensor], Tensor], k: int, n: int) -> None:
        super().__init__()
        self.producer, self.down = producer, nn.Linear(k, n)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return y + self.down(self.producer(x))


def heads(x: Tensor) -> Tensor:
    """What stands behind an attention: [heads, tokens, width] → [tokens, heads · width]."""
    return x.transpose(0, 1).reshape(x.shape[1], -1)


def one_more(x: Tensor) -> Tensor:
    return x + 1


def _spread(rows: int, columns: int) -> Tensor:
    """Values whose scales differ from row to row and from block to block."""
    down = torch.exp2(torch.randint(-6, 6, (rows, 1)))
    across = torch.exp2(torch.randint(-6, 6, (1, -(-columns // 32)))).repeat_interleave(32, 1)
    return torch.randn(rows, columns) * down * across[:, :columns]


@pytest.mark.parametrize(
    ("producer", "dtype", "shape", "m", "n"),
    mostly_slow(
        [
            (F.relu, torch.bfloat16, (40, 130), 40, 150),
            (heads, torch.bfloat16, (3, 5, 24), 5, 72),
            (one_more, torch.float32, (2, 72), 2, 40),
            (F.relu, torch.bfloat16, (1, 256), 1, 128),
        ],
        (heads, torch.bfloat16, (3, 5, 24), 5, 72),
        rows=True,
    ),
)
def test_fused_product_of_few_rows_has_the_reference_values(producer, dtype, shape, m, n, tmp_path):
    """Swapped. Nothing beside the weight's cast, and a kernel of the producer if Inductor stores that."""
    launches = _check(Down(producer, Tensor.numel(torch.empty(shape)) // m, n).to(dtype), shape, m, tmp_path)
    assert launches[-1].gemms == ("down fprop",)
    assert len(launches) <= 3


def test_fused_product_of_many_rows_has_the_reference_values(tmp_path):
    """Where the fused form has won the timing."""
    with fastest(lambda name, _: "mx_quantize_mm" in name):
        _check(Down(F.relu, 200, 140).to(torch.bfloat16), (150, 200), 150, tmp_path)


def _check(model: Down, shape: tuple[int, ...], m: int, folder: Path) -> tuple:
    """Generate and run `model`, held to the reference cast and product: what was launched."""
    n, k = model.down.weight.shape
    dtype = model.down.weight.dtype
    with torch.no_grad():
        model.down.weight.copy_(_spread(n, k))
    x, y = _spread(m, k).reshape(shape).to(dtype), torch.randn(m, n).to(dtype)
    result = codegen(model, x, y, target="sm_100", training=False, policy=POLICY, out_dir=folder)
    (gemm,) = result.report.gemms
    tile = "128x32x128 swapped" if m <= 64 else "128x128x64"
    assert gemm.kernel == f"mx_quantize_mm {tile} (tcgen05.mma block_scale)"
    weight, bias = model.down.weight.detach(), model.down.bias.detach()
    out, *_ = interpret(folder, [x, weight, bias, y])
    rounded = product(model.producer(x), weight.t(), NVIDIA, torch.float32) + bias.float()
    expected = (y.float() + rounded.to(dtype).float()).to(dtype)
    assert sqnr_db(expected, out) > (50 if dtype is torch.bfloat16 else 100)
    return result.launches
