"""FP4 casts compile for GPUs without spills; what they compute is checked in `check_fp4_casts`."""

from __future__ import annotations

import pytest
import torch
from generating import assert_clean
from helpers.casts import encode_packed
from helpers.written import Written
from torch import Tensor

from mxcompile import ops
from mxcompile.formats import Format
from mxcompile.offline import codegen


def casts(word: str, x: Tensor, seed: Tensor) -> tuple[Tensor, ...]:
    """Both copies of a matrix in the layout of an FP4 GEMM."""
    form, results = Format.parse(word), []
    for dim in (-1, -2):
        amax, its = None, form.untransformed if dim == -1 else form
        if its.hadamard is not None:
            (amax,) = ops.cast(x, [f"{word} packed @-2 largest"])
            results.append(amax)
        elif form.two_level:
            amax = ops.largest(x)
        randomness = (seed, 5) if form.stochastic else (None, 0)
        results += encode_packed(x, dim, str(its), *randomness, amax)
    return tuple(results)


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
def test_generated_fp4_casts_compile_without_spills(word: str, target: str, shape, dtype: torch.dtype):
    x, seed = torch.empty(shape, dtype=dtype), torch.tensor([123456789])
    model = Written(lambda _, x, seed: casts(word, x, seed))
    assert_clean(codegen(model, x, seed, target=target, training=False))
