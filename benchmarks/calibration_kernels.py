"""Kernels with published times, rewritten from their formulas: norms, SwiGLU, a cast, a product.

As in Liger-Kernel, a program computes one row in forward, and loops over its share of the rows in backward.
Products follow Triton's tutorial 3. Sizes are constants, as in Inductor's code. The weight cast of torchao
is compiled from the installed torchao.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import triton
import triton.language as tl
from triton.compiler import ASTSource

from mxcompile.lowering.targets import Target
from mxcompile.offline import kernel_work
from mxcompile.offline.binary import read_binary
from mxcompile.offline.estimate import Work
from mxcompile.offline.standin import triton_target


@triton.jit
def rms_norm(x_ptr, w_ptr, y_ptr, rstd_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Computes y = x · rstd · w for one row."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    mask = at < N
    x = tl.load(x_ptr + row * N + at, mask=mask, other=0).to(tl.float32)
    rstd = tl.rsqrt(tl.sum(x * x, axis=0) / N + 1e-6)
    tl.store(rstd_ptr + row, rstd)
    w = tl.load(w_ptr + at, mask=mask, other=0)
    y = (x * rstd).to(y_ptr.dtype.element_ty) * w
    tl.store(y_ptr + row * N + at, y, mask=mask)


@triton.jit
def layer_norm(x_ptr, w_ptr, b_ptr, y_ptr, mean_ptr, rstd_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Computes y = (x − mean) · rstd · w + b for one row."""
    row, at = tl.program_id(0), tl.arange(0, BLOCK)
    mask = at < N
    x = tl.load(x_ptr + row * N + at, mask=mask, other=0).to(tl.float32)
    mean = tl.sum(x, axis=0) / N
    centred = tl.where(mask, x - mean, 0.0)
    rstd = tl.rsqrt(tl.sum(centred * centred, axis=0) / N + 1e-6)
    tl.store(mean_ptr + row, mean)
    tl.store(rstd_ptr + row, rstd)
    w, b = tl.load(w_ptr + at, mask=mask, other=0), tl.load(b_ptr + at, mask=mask, other=0)
    tl.store(y_ptr + row * N + at, centred * rstd * w + b, mask=mask)


@triton.jit
def swiglu(a_ptr, b_ptr, c_ptr, N: tl.constexpr, BLOCK: tl.constexpr):
    """Computes c = silu(a) · b for one row."""
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    mask = at < N
    a = tl.load(a_ptr + row * N + at, mask=mask, other=0).to(tl.float32)
    b = tl.load(b_ptr + row * N + at, mask=mask, other=0)
    c = (a * tl.sigmoid(a)).to(b.dtype) * b
    tl.store(c_ptr + row * N + at, c, mask=mask)


@triton.jit
def rms_norm_backward(
    dy_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, rows, N: tl.constexpr, BLOCK: tl.constexpr
):
    """Computes dx for `rows` rows, and the sum of dw over these rows."""
    program, at = tl.program_id(0), tl.arange(0, BLOCK)
    mask = at < N
    dw = tl.zeros((BLOCK,), tl.float32)
    w = tl.load(w_ptr + at, mask=mask, other=0).to(tl.float32)
    for row in range(program * rows, (program + 1) * rows):
        dy = tl.load(dy_ptr + row * N + at, mask=mask, other=0)
        x = tl.load(x_ptr + row * N + at, mask=mask, other=0).to(tl.float32)
        rstd = tl.load(rstd_ptr + row)
        m = dy.to(tl.float32) * w
        dx = rstd * (m - rstd * rstd / N * tl.sum(m * x, axis=0) * x)
        dw += dy * (x * rstd).to(dy.dtype)
        tl.store(dx_ptr + row * N + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
    tl.store(dw_ptr + program * N + at, dw, mask=mask)


@triton.jit
def layer_norm_backward(
    x_ptr,
    w_ptr,
    mean_ptr,
    rstd_ptr,
    dx_ptr,
    dw_ptr,
    db_ptr,
    dy_ptr,
    rows,
    N: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Computes dx for `rows` rows, and the sums of dw and db over these rows."""
    program, at = tl.program_id(0), tl.arange(0, BLOCK)
    mask = at < N
    dw, db = tl.zeros((BLOCK,), tl.float32), tl.zeros((BLOCK,), tl.float32)
    w = tl.load(w_ptr + at, mask=mask, other=0).to(tl.float32)
    for row in range(program * rows, (program + 1) * rows):
        x = tl.load(x_ptr + row * N + at, mask=mask, other=0).to(tl.float32)
        dy = tl.load(dy_ptr + row * N + at, mask=mask, other=0).to(tl.float32)
        mean, rstd = tl.load(mean_ptr + row), tl.load(rstd_ptr + row)
        x_hat = (x - mean) * rstd
        m = w * dy
        dx = (m - (x_hat * tl.sum(x_hat * m, axis=0) + tl.sum(m, axis=0)) / N) * rstd
        tl.store(dx_ptr + row * N + at, dx.to(dx_ptr.dtype.element_ty), mask=mask)
        dw += dy * x_hat
        db += dy
    tl.store(dw_ptr + program * N + at, dw, mask=mask)
    tl.store(db_ptr + program * N + at, db, mask=mask)


@triton.jit
def product(
    a_ptr, b_ptr, c_ptr, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Computes c = a · b, one tile per program. TRANSPOSED: whether b is stored as [N, K]."""
    wide = tl.cdiv(N, BLOCK_N)
    m, n = tl.program_id(0) // wide, tl.program_id(0) % wide
    rows, columns = m * BLOCK_M + tl.arange(0, BLOCK_M), n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    k_stride, n_stride = (1, K) if TRANSPOSED else (N, 1)
    a_at = a_ptr + (rows % M)[:, None] * K + k[None, :]
    b_at = b_ptr + k[:, None] * k_stride + (columns % N)[None, :] * n_stride
    sums = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for step in range(tl.cdiv(K, BLOCK_K)):
        remaining = K - step * BLOCK_K
        a = tl.load(a_at, mask=k[None, :] < remaining, other=0.0)
        b = tl.load(b_at, mask=k[:, None] < remaining, other=0.0)
        sums = tl.dot(a, b, sums)
        a_at += BLOCK_K
        b_at += BLOCK_K * k_stride
    mask = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * N + columns[None, :], sums.to(c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def nvfp4(x_ptr, whole_ptr, codes_ptr, scales_ptr, N: tl.constexpr):
    """Casts a 128×64 tile to NVFP4 in blocks of 16 along rows. Scales have the layout of cuBLAS."""
    n, m = tl.program_id(0), tl.program_id(1)
    row = m * 128 + tl.arange(0, 128)[:, None]
    x = tl.load(x_ptr + row * N + n * 64 + tl.arange(0, 64)[None, :])
    blocks = x.to(tl.float32).reshape(128, 4, 16)
    whole = tl.load(whole_ptr)
    wanted = tl.max(tl.abs(blocks), axis=2) / 6.0 / whole
    scales = tl.minimum(tl.maximum(wanted, 2.0**-16), 448.0).to(tl.float8e4nv)
    scaled = tl.div_rn(blocks, whole * scales.to(tl.float32)[:, :, None])
    codes = tl.inline_asm_elementwise(
        """
        {
        .reg .b8 a, b, c, d;
        cvt.rn.satfinite.e2m1x2.f32 a, $5, $1;
        cvt.rn.satfinite.e2m1x2.f32 b, $6, $2;
        cvt.rn.satfinite.e2m1x2.f32 c, $7, $3;
        cvt.rn.satfinite.e2m1x2.f32 d, $8, $4;
        mov.b32 $0, {a, b, c, d};
        }
        """,
        "=r,r,r,r,r,r,r,r,r",
        scaled.reshape(128, 32, 2).split(),
        dtype=tl.uint8, is_pure=True, pack=4,
    )  # fmt: skip
    tl.store(codes_ptr + row * (N // 2) + n * 32 + tl.arange(0, 32)[None, :], codes)
    tiled = scales.reshape(4, 32, 4).permute(1, 0, 2).reshape(32, 16)
    at = tl.arange(0, 32)[:, None] * 16 + tl.arange(0, 16)[None, :]
    tl.store(scales_ptr + (m * (N // 64) + n) * 512 + at, tiled)


NVFP4_BYTES = 2 + 1 / 2 + 1 / 16
"""Bytes per element that a cast from BF16 to one layout of NVFP4 reads and writes."""


@dataclass(frozen=True, kw_only=True)
class Launched:
    """A Triton kernel and its launch. pointers: types of its first arguments; the others are integers.

    constants: values of its constexprs. rounds: trip count of its loop over rows, 1 without a loop.
    """

    kernel: Any
    pointers: tuple[str, ...]
    constants: dict[str, int]
    programs: int
    num_warps: int
    num_bytes: float
    num_stages: int = 3
    rounds: int = 1
    flops: float = 0.0
    sizes: dict[str, int] = field(default_factory=dict)

    def work(self, target: Target) -> Work:
        """Returns the work of the launch on `target`, read from the machine code that Triton generates."""
        names = self.kernel.arg_names
        types = dict(zip(names, self.pointers, strict=False))
        signature = {
            name: types.get(name, "constexpr" if name in self.constants else "i32") for name in names
        }
        aligned = {
            (at,): [["tt.divisibility", 16]] for at, name in enumerate(names) if name not in self.constants
        }
        if "rows" in names:
            aligned.pop((names.index("rows"),))
        source = ASTSource(self.kernel, signature, dict(self.constants), aligned)
        options = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        stated = {**options, "enable_fp_fusion": True}
        compiled = triton.compile(source, target=triton_target(target), options=stated)
        settings = {**options, **self.constants, **self.sizes}
        if self.rounds > 1:
            settings |= {"RSPLIT_SIZE": self.rounds, "XBLOCK": 1}
        binary = read_binary(compiled.asm, compiled.metadata, target, settings=settings, num_configs=1)
        return kernel_work.read(
            num_bytes=self.num_bytes,
            flops=self.flops,
            source="'grid_type': 'FixedGrid'",
            numbers=(self.programs, 1, 1),
            binary=binary,
            target=target,
        ).work


def _warps(block: int) -> int:
    """Returns the warps per program that Liger-Kernel chooses."""
    return 32 if block >= 32768 else 16 if block >= 8192 else 8 if block >= 2048 else 4


def by_rows(kernel: Any, rows: int, width: int, *, element: str, operands: int) -> Launched:
    """Returns a launch with one program per row. operands: number of rows that a program reads and writes."""
    block = triton.next_power_of_2(width)
    tensors = [name for name in kernel.arg_names if name.endswith("_ptr")]
    statistics = ("rstd_ptr", "mean_ptr")
    return Launched(
        kernel=kernel,
        pointers=tuple("*fp32" if name in statistics else f"*{element}" for name in tensors),
        constants={"N": width, "BLOCK": block},
        programs=rows,
        num_warps=_warps(block),
        num_bytes=operands * rows * width * _size(element),
    )


def looping(kernel: Any, rows: int, width: int, processors: int, *, element: str, sums: int) -> Launched:
    """Returns a launch with one program per SM, looping over rows. sums: FP32 rows of weight gradients."""
    block = triton.next_power_of_2(width)
    rounds = math.ceil(rows / processors)
    tensors = [name for name in kernel.arg_names if name.endswith("_ptr")]
    wide = ("rstd_ptr", "mean_ptr", "dw_ptr", "db_ptr")
    return Launched(
        kernel=kernel,
        pointers=tuple("*fp32" if name in wide else f"*{element}" for name in tensors),
        constants={"N": width, "BLOCK": block},
        programs=processors,
        num_warps=_warps(block),
        num_bytes=3 * rows * width * _size(element) + 4 * sums * processors * width,
        rounds=rounds,
    )


def multiplied(size: int, *, element: str, block_k: int, out: str = "fp16") -> Launched:
    """Returns the launch of a square product in tiles of 128×256."""
    tiles = {"BLOCK_M": 128, "BLOCK_N": 256, "BLOCK_K": block_k, "TRANSPOSED": int(element == "fp8e4nv")}
    return Launched(
        kernel=product,
        pointers=(f"*{element}", f"*{element}", f"*{out}"),
        constants=tiles,
        programs=math.ceil(size / 128) * math.ceil(size / 256),
        num_warps=8,
        num_bytes=size * size * (2 * _size(element) + _size(out)),
        flops=2.0 * size**3,
        sizes=dict.fromkeys("MNK", size),
    )


def cast_to_nvfp4(size: int) -> Launched:
    """Returns the launch of a rowwise cast of a square matrix, one tile per program."""
    return Launched(
        kernel=nvfp4,
        pointers=("*bf16", "*fp32", "*u8", "*fp8e4nv"),
        constants={"N": size},
        programs=size // 64 * (size // 128),
        num_warps=4,
        num_bytes=size * size * NVFP4_BYTES,
    )


def casts_of_weights(rows: int, columns: int, processors: int) -> Iterator[Launched]:
    """Yields torchao's cast of a weight to both layouts, in each configuration that its autotuner times."""
    with mock.patch.object(torch.utils._triton, "has_triton", return_value=True):
        from torchao.prototype.moe_training.nvfp4_training import quantize_2d_triton
    tuner = quantize_2d_triton.triton_quantize_2d_weight
    for config in tuner.configs:
        tiles = math.ceil(rows / config.kwargs["BLOCK_M"]) * math.ceil(columns / config.kwargs["BLOCK_N"])
        yield Launched(
            kernel=tuner.fn,
            pointers=("*bf16", "*u8", "*fp8e4nv", "*u8", "*fp8e4nv", "*fp32"),
            constants={**config.kwargs, "GROUP_SIZE_N": 8, "NUM_SMS": processors},
            programs=processors,
            num_warps=config.num_warps,
            num_stages=config.num_stages,
            num_bytes=rows * columns * (2 * NVFP4_BYTES - 2),
            rounds=math.ceil(tiles / processors),
        )


def _size(element: str) -> int:
    return {"fp32": 4, "bf16": 2, "fp16": 2, "fp8e4nv": 1}[element]
