"""FP8 casts generated for GPUs, run in Triton's interpreter: bit for bit those of the reference.

The interpreter has no tensors of MI300's types; their codes are checked in `check_fp8_tiles`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from generating import assert_clean
from helpers.bits import assert_same_bits
from interpreted import interpret
from torch import Tensor, nn

from mxcompile.offline import codegen

CAST = torch.ops.mx.cast


class Casts(nn.Module):
    """The results of casts as the lowering writes them into graphs."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.rows = [f"{word} @-1 elements", f"{word} @-1 scales"]
        self.columns = [f"{word} @-2 elements transposed", f"{word} @-2 scales"]
        self.largest = f"{word} @-1 largest"

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        results = *CAST(x, self.rows + self.columns), *CAST(x, self.rows), *CAST(x, self.columns)
        if "128" in self.largest:  # whose tiles make their scales
            return results
        row, column = CAST(x, [self.rows[1], self.columns[1]])
        copies = [self.rows[0], self.columns[0], self.largest]
        codes, down, largest = CAST(x, copies, None, 0, [row, column, None])
        (down_alone,) = CAST(x, copies[1:2], None, 0, [column])
        return *results, row, column, codes, down, largest, down_alone, *CAST(x, copies[2:])


def spread(m: int, n: int) -> Tensor:
    """Rows and columns of many binades, zeros with both signs."""
    gen = torch.Generator().manual_seed(m + n)
    rows, columns = (torch.randint(-30, 30, size, generator=gen) for size in ((m, 1), (1, n)))
    x = torch.randn(m, n, generator=gen) * torch.exp2(rows.float()) * torch.exp2(columns.float())
    x[:, 3], x[2] = -0.0, 0.0
    return x


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "target", "shape", "dtype", "has_nan"),
    [
        ("e4m3 channel nearest", "sm_90", (72, 272), torch.bfloat16, False),
        ("e4m3 channel nearest", "sm_90", (16, 64), torch.bfloat16, True),
        ("e4m3 1x128 pow2", "sm_90", (132, 272), torch.bfloat16, False),
        ("e4m3 128x128 nearest", "sm_90", (272, 144), torch.float32, False),
        ("e5m2 tensor nearest", "sm_89", (72, 144), torch.float16, False),
        ("e4m3 tensor nearest delayed:4:0", "sm_100", (72, 144), torch.bfloat16, False),
    ],
)
def test_generated_fp8_casts_equal_the_reference(
    word: str, target: str, shape: tuple[int, int], dtype: torch.dtype, has_nan: bool, tmp_path: Path
):
    model, x = Casts(word), spread(*shape).to(dtype)
    if has_nan:
        x[3, 5], x[6, 9] = torch.nan, -torch.inf
    wanted = model(x)
    assert int(wanted[0].float().isnan().sum()) == (2 * x.shape[1] if has_nan else 0)  # two rows
    result = codegen(model, x, target=target, training=False, out_dir=tmp_path)
    assert_clean(result)
    assert_same_bits(interpret(tmp_path, [x]), wanted)
