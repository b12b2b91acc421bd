"""FP4 casts generated for GPUs, run in Triton's interpreter: bit for bit those of the reference."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.casts import encode_packed
from interpreted import interpret
from torch import Tensor, nn

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.offline import codegen


class Casts(nn.Module):
    """Both copies of a matrix in the layout of an FP4 GEMM."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word

    def forward(self, x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
        form, results = Format.parse(self.word), []
        for dim in (-1, -2):
            amax, its = None, form.untransformed if dim == -1 else form
            if its.hadamard is not None:
                (amax,) = ops.cast(x, [f"{self.word} packed @-2 largest"])
                results.append(amax)
            elif form.two_level:
                amax = ops.largest(x)
            randomness = (seed, 5) if form.stochastic else (None, 0)
            results += encode_packed(x, dim, str(its), *randomness, amax)
        return tuple(results)


def spread(m: int, n: int) -> Tensor:
    """Rows and columns of many binades, zeros with both signs, and what lies halfway between elements."""
    gen = torch.Generator().manual_seed(m + n)
    rows, columns = (torch.randint(-12, 12, size, generator=gen) for size in ((m, 1), (1, n)))
    x = torch.randn(m, n, generator=gen) * torch.exp2(rows.float()) * torch.exp2(columns.float())
    x[:, 3], x[2] = -0.0, 0.0
    x[5] = torch.tensor([0.25, 0.75, -1.25, 1.75, -2.5, 3.5, 5.0, 6.0]).repeat(n // 8)
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "target", "shape", "dtype"),
    [
        ("e2m1 1x16 two-level", "sm_100", (96, 160), torch.bfloat16),
        ("e2m1 16x16 two-level", "sm_120", (160, 96), torch.float32),
        ("e2m1 1x16 two-level stochastic", "sm_100", (64, 96), torch.bfloat16),
        ("e2m1 1x16 two-level hadamard:55272", "sm_120", (96, 160), torch.bfloat16),
        ("e2m1 1x16 two-level stochastic hadamard:9", "sm_100", (160, 64), torch.float32),
        ("e2m1 1x32 rceil", "sm_100", (96, 160), torch.float16),
        ("e2m1 32x32 even", "sm_100", (160, 192), torch.bfloat16),
        ("e2m1 1x32 floor stochastic", "sm_100", (64, 96), torch.float32),
    ],
)
def test_generated_fp4_casts_equal_the_reference(
    word: str, target: str, shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path
):
    model, seed = Casts(word), torch.tensor([123456789])
    x = spread(*shape).clamp(-6e4, 6e4).to(dtype)
    wanted = model(x, seed)
    result = codegen(model, x, seed, target=target, training=False, out_dir=tmp_path)
    assert not result.problems
    assert not any(kernel.binary.spill_bytes for kernel in result.kernels)
    arguments = [x, seed] if Format.parse(word).stochastic else [x]
    for computed, reference in zip(interpret(tmp_path, arguments), wanted, strict=True):
        assert computed.shape == reference.shape
        assert torch.equal(computed, reference)
