"""`Target` describes a chip; `choices.families` chooses the kernels of products by its fields.

``native``: Triton compiles ``tl.dot_scaled`` to the chip's block-scaled MMA. ``emulated``: the kernels that
produce the operands dequantize them, and the vendor's BF16 GEMM multiplies them.

For estimates a chip also has a data sheet, and the share of each peak rate that it sustains.
`mxcompile.offline.rates` defines the kinds of rates.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch

from mxcompile.formats import ScaleLayout, ScaleType
from mxcompile.lowering.chips.tiles import ChipTiles


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """Share of a peak rate that a chip sustains: lowest, expected, highest. source: origin of the figures."""

    low: float
    centre: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class Peak:
    """The vendor's data sheet of one chip; rates are for dense products.

    dense_tflops: 10¹² operations a second by kind: "bf16", "fp32" (not TF32), "mxfp8" (a scale per block of
    32), "fp8" (a scale per tensor or channel), "fp4" (packed). FP8 and FP4 default to MXFP8's rate, MXFP8 to
    BF16's. bandwidth_gbs: bandwidth of device memory, 10⁹ bytes a second. memory_gb: device memory, 10⁹
    bytes. clock_ghz: clock that these rates assume, 10⁹ cycles a second. rates: sustained shares that
    replace the target's.
    """

    chip: str
    dense_tflops: Mapping[str, float] = field(hash=False)
    _: KW_ONLY
    bandwidth_gbs: float
    memory_gb: float
    clock_ghz: float
    rates: Mapping[str, Rate] = field(default_factory=dict, hash=False)

    def tflops(self, product: str) -> float:
        """Returns the rate of products of a kind in `mxcompile.offline.rates`; attention has BF16's."""
        kind = product.removeprefix("own_").partition("_")[0]
        others = ("mxfp8", "bf16") if kind in ("fp8", "fp4") else ("bf16",)
        return next(self.dense_tflops[name] for name in (kind, *others) if name in self.dense_tflops)


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A chip.

    device: torch device type. mma: instruction of the MX GEMM, "" if it is emulated. arch: Triton's name of
    the chip, a compute capability (100) or an AMD processor ("gfx950"), None without Triton. processors:
    number of multiprocessors. warp_size: threads of a warp. shared_bytes: most shared memory of a block.
    tmem_columns: tensor memory of a multiprocessor, in columns of 128 words. max_registers: 32-bit registers
    that a thread may use before it spills. registers, threads: 32-bit registers and resident threads of a
    multiprocessor. issue_rate: warp instructions that a multiprocessor issues a cycle; on AMD, vector
    instructions. encodes_fp8, decodes_fp8: whether Triton converts to or from OCP FP8 by an instruction of
    the chip, which rounds once; otherwise by integer code. stores_fp8: whether device code has FP8 tensors;
    otherwise they are bytes. fp8_tiles: granularities of FP32 scales that the vendor's FP8 GEMM takes.
    fp8_fnuz: whether FP8 is FNUZ: exponent bias 8 or 16 instead of OCP's 7 or 15, and no negative 0.
    fp4_scales: types of block scales with which the chip multiplies packed FP4. library_fp4: types of block
    scales that the vendor's FP4 GEMM takes through PyTorch. scale_layout: layout of scales that the chip's MX
    GEMM reads fastest. slow_dtypes: dtypes whose products the vendor's library computes faster in FP32.
    integers: instructions with which a CPU multiplies bytes faster than FP32, or "". no_integers: reasons
    why products do not run in integers, by the dtype in which they run instead. many_rows: the kernel with
    which a CPU multiplies many rows of BF16 by a stored weight, or "" if the vendor's GEMM does. few_rows:
    most rows of BF16 for which a CPU has a kernel that multiplies an unquantized weight faster.
    long_k: from this K on, the library's NVFP4 GEMM and a separate epilogue kernel are faster than our GEMM
    with its epilogue; 0: always. groups_in_library: whether the vendor's library has a grouped MXFP8 GEMM.
    prefers_cudnn: whether PyTorch selects cuDNN's attention. tiles: configs of the kernel families. peak:
    data sheet for estimates, if any. peaks: data sheets by chip name; None stands for `peak`. rates: shares
    of the data sheet's rates that the chip sustains, by kind.
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
    integers: str = ""
    no_integers: Mapping[torch.dtype, str] = field(default_factory=dict, hash=False)
    many_rows: str = ""
    few_rows: int = 0
    long_k: int = 0
    groups_in_library: bool = False
    prefers_cudnn: bool = False
    tiles: ChipTiles = field(default_factory=ChipTiles)
    peak: Peak | None = None
    peaks: Mapping[str, Peak | None] = field(default_factory=dict, hash=False)
    rates: Mapping[str, Rate] = field(default_factory=dict, hash=False)

    @property
    def native(self) -> bool:
        """Whether the chip has an instruction for products of MX operands."""
        return bool(self.mma)

    @property
    def saturates_fp8(self) -> bool:
        """Whether the chip's conversion to FP8 saturates, as on NVIDIA GPUs."""
        return self.encodes_fp8 and isinstance(self.arch, int)

    @property
    def emulates(self) -> bool:
        """Whether the chip is a GPU without an MX GEMM, so that it multiplies dequantized operands."""
        return self.arch is not None and not self.native

    @property
    def has_library_mx(self) -> bool:
        """Whether the vendor's library has MX GEMMs that mxcompile calls."""
        return self.native and self.tmem_columns > 0


FP8_TILES = frozenset({"tensor", "channel"})
BLOCKS, WEIGHTS = "1x128", "128x128"


def nvidia(arch: int, chips: str, processors: int, shared_kib: int, **columns: Any) -> Target:
    """Returns an NVIDIA GPU. shared_kib: most shared memory of a block. columns: other fields of `Target`."""
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
    """Returns an AMD GPU. shared_kib: most shared memory of a block. columns: other fields of `Target`."""
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
        fp8_tiles=FP8_TILES,
        **columns,
    )


MAMF = "stas00/ml-engineering, accelerator benchmarks"
UNKNOWN = "assumed: no measurement of this chip"
"""Names of sources of rates."""


def shares(source: str, **ends: tuple[float, float, float]) -> dict[str, Rate]:
    """Returns a `Rate` for each kind in `ends`, from (low, centre, high); all rates have one `source`."""
    return {
        kind: Rate(low=low, centre=centre, high=high, source=source)
        for kind, (low, centre, high) in ends.items()
    }
