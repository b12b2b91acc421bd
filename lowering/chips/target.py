"""`Target`: what mxcompile knows of a chip, which decides how the mx GEMMs of a graph are lowered for it.

``native``: Triton's ``tl.dot_scaled`` becomes the chip's block-scaled MMA. ``emulated``: operands are
dequantized, fused into their producers, and the vendor's BF16 GEMM multiplies them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from mxcompile.formats import BLOCK, Format, ScaleLayout, ScaleType
from mxcompile.formats.types import E2M1
from mxcompile.lowering.chips.peak import Peak, Rate
from mxcompile.lowering.chips.tiles import ChipTiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A chip.

    device: torch device type. mma: instruction of the MX GEMM, "" where it is emulated. arch: as Triton names
    it, a compute capability (100) or an AMD processor ("gfx950"), None where there is no Triton. processors:
    multiprocessors of the chip. warp_size: threads. shared_bytes: most shared memory one block may have.
    tmem_columns: tensor memory of an SM, in columns of 128 words. max_registers: 32-bit registers a thread
    may have before it spills. registers, threads: 32-bit registers of a multiprocessor, and threads it holds
    at once. issue_rate: instructions of a warp that it issues a cycle, of AMD's those of its vector units.
    encodes_fp8, decodes_fp8: whether Triton's conversion to or from OCP FP8 is the chip's own, rounding
    once; integers do it otherwise. stores_fp8: whether the device's code has tensors of those types;
    bytes stand for them otherwise. fp8_tiles: extents of FP32 scales that the vendor's FP8 GEMM takes (see
    `multiplies_fp8`). fp8_fnuz: whether the bias of its elements' exponents is 8 or 16, where OCP's is 7 or
    15, and there is no negative 0. fp4_scales: types of the scales of blocks under which the chip multiplies
    packed FP4 (see `multiplies_fp4`). library_fp4: the same of the vendor's GEMM, as PyTorch calls it.
    scale_layout: what the chip's MX GEMM reads fastest. slow_dtypes: those whose products the vendor's
    library computes faster in FP32. long_k: from this K on a library's product of NVFP4 and another kernel
    behind it take less time than ours with an epilogue; 0: always. groups_in_library: whether its library
    multiplies groups of MXFP8 rows. prefers_cudnn: whether PyTorch takes cuDNN's attention. tiles: of the
    kernel families. peak: for estimates, if there is one. peaks: data sheets by what chips are called; None
    stands for `peak`. rates: shares of its data sheet that it sustains, by kind.
    """

    name: str
    device: str
    mma: str = ""
    chips: str = ""
    arch: int | str | None = None
    processors: int = 1
    warp_size: int = 32
    shared_bytes: int = 0
    tmem_columns: int = 0
    max_registers: int = 255
    registers: int = 65536
    threads: int = 2048
    issue_rate: float = 4.0
    encodes_fp8: bool = False
    decodes_fp8: bool = False
    stores_fp8: bool = False
    fp8_tiles: frozenset[str] = frozenset()
    fp8_fnuz: bool = False
    fp4_scales: frozenset[ScaleType] = frozenset()
    library_fp4: frozenset[ScaleType] = frozenset()
    scale_layout: ScaleLayout = ScaleLayout.ROW_MAJOR
    slow_dtypes: frozenset[torch.dtype] = frozenset()
    long_k: int = 0
    groups_in_library: bool = False
    prefers_cudnn: bool = False
    tiles: ChipTiles = field(default_factory=ChipTiles)
    peak: Peak | None = None
    peaks: Mapping[str, Peak | None] = field(default_factory=dict, hash=False)
    rates: Mapping[str, Rate] = field(default_factory=dict, hash=False)

    @property
    def native(self) -> bool:
        """Whether the chip multiplies MX operands itself."""
        return bool(self.mma)

    @property
    def saturates_fp8(self) -> bool:
        """Whether the chip's conversion gives the largest element for what is larger, as NVIDIA's do."""
        return self.encodes_fp8 and isinstance(self.arch, int)

    @property
    def emulates(self) -> bool:
        """Whether it is a GPU that multiplies what MX operands stand for."""
        return self.arch is not None and not self.native

    def multiplies_fp8(self, left: str, right: str) -> bool:
        """Whether the vendor's FP8 GEMM takes FP32 scales of these extents, of the left and right operand."""
        alike = left == right != WEIGHTS or (left, right) == (BLOCKS, WEIGHTS)
        return alike and {left, right} <= self.fp8_tiles

    def multiplies_fp4(self, *forms: Format) -> bool:
        """Whether the chip multiplies packed operands of these formats.

        Blocks of 16 of E2M1 under E4M3 scales, or of 32 under E8M0 scales, or tiles of as many rows.
        """
        scales = {form.scale for form in forms}
        return len(scales) == 1 and scales <= self.fp4_scales and all(map(_is_fp4, forms))

    @property
    def has_library_mx(self) -> bool:
        """Whether the vendor's library has products of MX operands that mxcompile calls."""
        return self.native and self.tmem_columns > 0

    def multiplies_mx(self, *forms: Format) -> bool:
        """Whether the chip's MX GEMM multiplies operands of these formats."""
        return self.native and all(form.mx_elem is not None for form in forms)


def _is_fp4(form: Format) -> bool:
    along = 16 if form.two_level else BLOCK
    return form.elem is E2M1 and form.tile.along == along and form.tile.across in (1, along)


FP8_TILES = frozenset({"tensor", "channel"})
BLOCKS, WEIGHTS = "1x128", "128x128"


def nvidia(arch: int, chips: str, processors: int, shared_kib: int, **columns: Any) -> Target:
    """Returns a GPU of NVIDIA. shared_kib: most shared memory of a block. columns: other fields."""
    decodes, encodes = arch >= 89, arch >= 90  # sm_89: Triton encodes through FP16, which rounds twice
    return Target(
        name=f"sm_{arch}",
        device="cuda",
        chips=chips,
        arch=arch,
        processors=processors,
        shared_bytes=shared_kib * 1024,
        threads=1536 if arch in (89, 120) else 2048,
        decodes_fp8=decodes,
        encodes_fp8=encodes,
        stores_fp8=decodes,
        **{"fp8_tiles": FP8_TILES if decodes else frozenset(), **columns},
    )


def amd(arch: str, chips: str, processors: int, shared_kib: int, **columns: Any) -> Target:
    """Returns a GPU of AMD. shared_kib: most shared memory of a block. columns: other fields."""
    return Target(
        name=arch,
        device="cuda",
        chips=chips,
        arch=arch,
        processors=processors,
        warp_size=64,
        shared_bytes=shared_kib * 1024,
        max_registers=512,
        registers=131072,
        issue_rate=1.0,
        stores_fp8=True,
        **columns,
    )
