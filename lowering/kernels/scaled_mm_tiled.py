"""What products through the tensor memory accelerator load and store: tiled scales, parts of an accumulator.

Scales come in the 128×4 tiled layout as the cast writes it, which the MMA takes from shared memory
(`tcgen05.cp`). The padding bytes of the scales must be zero, as the cast leaves them.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.lowering.kernels import scale_bytes


@triton.jit
def load_scale(desc, tile_row, tile_column, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Bytes [ROWS, BLOCKS], in the order of a row-major matrix, from a descriptor of tiles of 128×4."""
    return load_scale_at(desc, tile_row * (ROWS // 128), tile_column, ROWS, BLOCKS)


@triton.jit
def load_scale_at(desc, first, tile_column, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """The same, from row of tiles `first` on."""
    DOWN: tl.constexpr = ROWS // 128
    ACROSS: tl.constexpr = BLOCKS // 4
    tiled = desc.load([0, first, tile_column * ACROSS, 0, 0])
    return scale_bytes.from_tiles(tiled, DOWN, ACROSS)


@triton.jit
def columns_of(x, HALVINGS: tl.constexpr):
    """`x` [H, W] as a tuple of 2^HALVINGS tensors, its columns in order."""
    if HALVINGS == 0:
        parts = (x,)
    else:
        H: tl.constexpr = x.shape[0]
        W: tl.constexpr = x.shape[1]
        left, right = x.reshape(H, 2, W // 2).permute(0, 2, 1).split()
        parts = columns_of(left, HALVINGS - 1) + columns_of(right, HALVINGS - 1)
    return parts
