"""Every tile that a fused cast and product may run with: on the chip's instruction, without spills."""

from __future__ import annotations

import pytest
import torch
from fake_timing import fastest
from generating import generate, product_of
from helpers.paces import mostly_slow
from helpers.written import Written
from test_codegen_native import MMA
from torch import nn
from torch._inductor import config
from torch.nn import functional as F

from mxcompile.lowering.choices.configs import NARROW, fused
from mxcompile.lowering.targets import TARGETS
from mxcompile.lowering.templates import fused_quantize_mm
from mxcompile.offline import CodegenResult
from mxcompile.offline.launch import Kernel

FEW, MANY = 40, 500


def layer(k: int, n: int) -> nn.Module:
    """An epilogue that needs registers."""
    return Written(lambda model, x, y: y + F.gelu(model.linear(torch.relu(x))), linear=nn.Linear(k, n))


def _all() -> list:
    with config.patch(max_autotune_gemm=True):
        return [
            pytest.param(
                target, rows, swap, tile, id=f"{target}-{rows}-{tile.block_m}x{tile.block_n}x{tile.block_k}"
            )
            for target in MMA
            for rows in (FEW, MANY)
            for swap, tile in fused(TARGETS[target], rows, NARROW)
            if target != "sm_103"  # the row of sm_100
        ]


@pytest.mark.parametrize(("target", "rows", "swap", "tile"), _all())
@pytest.mark.parametrize(("k", "n"), mostly_slow([(1000, 500), (250, 130)], (250, 130), rows=True))
def test_fused_tile_compiles_for_sizes_it_does_not_divide(target, rows, swap, tile, k, n):
    """Sizes of which neither a tile nor 32 is a divisor, so that everything is masked."""
    block_m, block_n = (tile.block_n, tile.block_m) if swap else (tile.block_m, tile.block_n)
    blocks = {"BLOCK_M": block_m, "BLOCK_N": block_n, "BLOCK_K": tile.block_k}
    wanted = {name: str(value) for name, value in {"SWAP": swap, **blocks}.items()}
    with fastest(lambda name, constants: "quantize_mm" in name and wanted.items() <= constants.items()):
        result = generate(layer(k, n), (rows, k), (rows, n), target=target)
    _, kernel = product_of(result)
    assert "quantize_rowwise" in kernel.source
    assert all(f"{name} : tl.constexpr = {value}" in kernel.source for name, value in wanted.items())
    assert result.problems == ()
    assert kernel.binary.mma
    assert all(name.startswith(MMA[target]) for name in kernel.binary.mma)
    assert kernel.binary.spill_bytes == 0


def of_16_rows(k: int, n: int) -> tuple[CodegenResult, Kernel]:
    """The code of a layer for few tokens, and its product's kernel."""
    result = generate(layer(k, n), (16, k), (16, n))
    return result, product_of(result)[1]


def test_scales_are_read_as_whole_tiles():
    """On Blackwell they go from shared to tensor memory as they lie, the copy that the MMA reads."""
    _, kernel = of_16_rows(1024, 512)
    assert "load_tiled" in kernel.source
    assert "tcgen05.cp" in kernel.binary.text["ptx"]


def test_on_a_chip_for_which_the_cast_was_not_fused(monkeypatch):
    """As when the option `target` names another: a tile that the plain product would have."""
    monkeypatch.setattr(fused_quantize_mm, "fused", lambda *_: [])
    result, kernel = of_16_rows(250, 130)
    assert "quantize_rowwise" in kernel.source
    assert "BLOCK_K : tl.constexpr = 256" in kernel.source
    assert result.problems == ()
