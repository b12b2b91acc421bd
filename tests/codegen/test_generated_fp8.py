"""FP8 casts generated for GPUs, run in Triton's interpreter: bit for bit those of the reference.

The interpreter has no tensors of MI300's types; their codes are checked in `check_fp8_tiles`.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.casts import encode
from interpreted import interpret
from torch import Tensor, nn

from mxcompile.offline import codegen

LAYOUTS, BLOCKS, SCALES = torch.ops.mx.encode_layouts, torch.ops.mx.encode_blocks, torch.ops.mx.scales


class Casts(nn.Module):
    """Every result that is not empty, of the operators as the lowering writes them into graphs."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        word, fnuz = self.word, False
        if "128" in word:
            codes, row, down, column = BLOCKS(x, word, True, True, fnuz)
            codes_alone, row_alone, *_ = BLOCKS(x, word, True, False, fnuz)
            _, _, down_alone, column_alone = BLOCKS(x, word, False, True, fnuz)
            made = codes, down, codes_alone, down_alone, row, row_alone
            return made if "128x" in word else (*made, column, column_alone)
        row, column = SCALES(x, word, True, "channel" in word)
        if "channel" not in word:
            column = row
        codes, down, largest = LAYOUTS(x, word, row, column, fnuz, True)
        codes_alone, *_ = LAYOUTS(x, word, row, None, fnuz, False)
        _, down_alone, _ = LAYOUTS(x, word, None, column, fnuz, False)
        scales = (row, column, SCALES(x, word, False, True)[1]) if "channel" in word else (row,)
        return codes, down, codes_alone, down_alone, largest, *scales


def spread(m: int, n: int) -> Tensor:
    """Rows and columns of many binades, zeros with both signs."""
    gen = torch.Generator().manual_seed(m + n)
    rows, columns = (torch.randint(-30, 30, size, generator=gen) for size in ((m, 1), (1, n)))
    x = torch.randn(m, n, generator=gen) * torch.exp2(rows.float()) * torch.exp2(columns.float())
    x[:, 3], x[2] = -0.0, 0.0
    return x


def check(word: str, target: str, shape: tuple[int, int], dtype: torch.dtype, folder: Path) -> None:
    model, x = Casts(word), spread(*shape).to(dtype)
    wanted = model(x)
    result = codegen(model, x, target=target, training=False, out_dir=folder)
    assert not result.problems
    assert not any(kernel.binary.spill_bytes for kernel in result.kernels)
    for found, reference in zip(interpret(folder, [x]), wanted, strict=True):
        assert found.shape == reference.shape
        bits = torch.uint8 if reference.element_size() == 1 else torch.int32
        assert torch.equal(found.view(bits), reference.view(bits))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("word", "target", "shape", "dtype"),
    [
        ("e4m3 channel nearest", "sm_90", (72, 272), torch.bfloat16),
        ("e4m3 1x128 pow2", "sm_90", (132, 272), torch.bfloat16),
        ("e4m3 128x128 nearest", "sm_90", (272, 144), torch.float32),
        ("e5m2 tensor nearest", "sm_89", (72, 144), torch.float16),
        ("e4m3 tensor nearest delayed:4:0", "sm_100", (72, 144), torch.bfloat16),
    ],
)
def test_casts(word: str, target: str, shape: tuple[int, int], dtype: torch.dtype, tmp_path: Path):
    check(word, target, shape, dtype, tmp_path)


@pytest.mark.slow
def test_what_is_not_finite(tmp_path: Path):
    """A row and a column that hold NaN or Inf are NaN, the rest is as it was."""
    x = torch.randn(16, 64).to(torch.bfloat16)
    x[3, 5], x[6, 9] = torch.nan, -torch.inf
    model = Casts("e4m3 channel nearest")
    codegen(model, x, target="sm_90", training=False, out_dir=tmp_path)
    codes, down, *_ = interpret(tmp_path, [x])
    assert codes.float().isnan().all(1).nonzero().flatten().tolist() == [3, 6]
    assert down.float().isnan().all(1).nonzero().flatten().tolist() == [5, 9]
    assert int(codes.float().isnan().sum()) == 2 * 64
    assert encode(x, -1, "e4m3 channel nearest")[0].float().isnan().equal(codes.float().isnan())
