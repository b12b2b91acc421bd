"""One tile of a product of MX operands, loaded by the tensor memory accelerator, scales in tiles of 128×4.

    acc[m, n] = Σ_{step, k} a[a_row + m, a_k + k] · sa · b[b_row + n, b_k + k] · sb      k of a step, in FP32

K is counted in bytes of elements. Packed operands have two elements a byte and are contiguous along K; others
are contiguous along K or along rows. The accelerator reads zeros outside of a descriptor's matrix, also
before its start. The caller makes the descriptors, for all tiles or for each group, chooses where a tile
begins, and stores the tile. `scaled_tile` is the form with pointers.
"""

from __future__ import annotations

import triton
import triton.language as tl

from mxcompile.lowering.kernels import scale_bytes


@triton.jit
def operand(ptr, rows, K, stride, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, K_MAJOR: tl.constexpr):
    """Returns a descriptor of codes [rows, K] for loads of [ROWS, BLOCK_K]. stride: the larger stride."""
    if K_MAJOR:
        desc = tl.make_tensor_descriptor(ptr, [rows, K], [stride, 1], [ROWS, BLOCK_K])
    else:
        desc = tl.make_tensor_descriptor(ptr, [K, rows], [stride, 1], [BLOCK_K, ROWS])
    return desc


@triton.jit
def load_scale(desc, row, step, ROWS: tl.constexpr, BLOCKS: tl.constexpr):
    """Returns bytes [ROWS, BLOCKS] in row-major order, from a descriptor of tiles of 128×4.

    row: first row of tiles. step: first block, in units of BLOCKS.
    """
    DOWN: tl.constexpr = ROWS // 128
    ACROSS: tl.constexpr = BLOCKS // 4
    tiled = desc.load([0, row, step * ACROSS, 0, 0])
    return scale_bytes.from_tiles(tiled, DOWN, ACROSS)


@triton.jit
def columns_of(x, HALVINGS: tl.constexpr):
    """Returns `x` [H, W] as a tuple of 2^HALVINGS tensors, its columns in order."""
    if HALVINGS == 0:
        parts = (x,)
    else:
        left, right = x.reshape(x.shape[0], 2, x.shape[1] // 2).permute(0, 2, 1).split()
        parts = columns_of(left, HALVINGS - 1) + columns_of(right, HALVINGS - 1)
    return parts


@triton.jit
def tile_product(
    a_desc, sa_desc, b_desc, sb_desc, a_row, a_k, sa_row, b_row, b_k, sb_row, s_step, steps,
    ELEM_A: tl.constexpr, ELEM_B: tl.constexpr, BLOCK: tl.constexpr, A_K_MAJOR: tl.constexpr,
    B_K_MAJOR: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Returns FP32 [BLOCK_M, BLOCK_N], the sum over `steps` steps along K.

    a_row, a_k, b_row, b_k: where the operands' tiles begin, int32. sa_row, sb_row: where their scales begin,
    in rows of tiles. s_step: first step of the scales. BLOCK: bytes that share a scale.
    """
    BLOCKS: tl.constexpr = BLOCK_K // BLOCK
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(steps):
        k = step * BLOCK_K
        a = a_desc.load([a_row, a_k + k]) if A_K_MAJOR else a_desc.load([a_k + k, a_row]).T
        b = b_desc.load([b_row, b_k + k]).T if B_K_MAJOR else b_desc.load([b_k + k, b_row])
        a_scale = load_scale(sa_desc, sa_row, s_step + step, BLOCK_M, BLOCKS)
        b_scale = load_scale(sb_desc, sb_row, s_step + step, BLOCK_N, BLOCKS)
        acc = tl.dot_scaled(a, a_scale, ELEM_A, b, b_scale, ELEM_B, acc)
    return acc
