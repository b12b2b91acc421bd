"""The targets: one row a chip, which decides how the mx GEMMs of a graph are lowered for it.

``native``: Triton's ``tl.dot_scaled`` becomes the chip's block-scaled MMA. ``emulated``: operands are
dequantized, fused into their producers, and the vendor's BF16 GEMM multiplies them.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch

from mxcompile.errors import TargetError, not_allowed
from mxcompile.formats import BLOCK, Format, ScaleLayout, ScaleType
from mxcompile.formats.types import E2M1
from mxcompile.lowering.cpu.features import features
from mxcompile.lowering.peaks import PEAKS, Peak


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
    library computes faster in FP32. peak: for estimates, if there is one.
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
    peak: Peak | None = None

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
        alike = left == right != _WEIGHTS or (left, right) == (_BLOCKS, _WEIGHTS)
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


AUTO = "auto"
CPU_FP32 = "cpu_fp32"

_FP8_TILES = frozenset({"tensor", "channel"})
_BLOCKS, _WEIGHTS = "1x128", "128x128"
_HOPPER = {90: frozenset({_BLOCKS, _WEIGHTS})}


def _nvidia(arch: int, chips: str, processors: int, shared_kib: int, **columns: Any) -> Target:
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
        **{"fp8_tiles": _FP8_TILES | _HOPPER.get(arch, frozenset()) if decodes else frozenset(), **columns},
    )


def _amd(arch: str, chips: str, processors: int, shared_kib: int, **columns: Any) -> Target:
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


def _cpu(name: str, chips: str, slow_dtypes: frozenset[torch.dtype]) -> Target:
    return Target(name=name, device="cpu", chips=chips, stores_fp8=True, slow_dtypes=slow_dtypes)


_TCGEN05: dict[str, Any] = {
    "mma": "tcgen05.mma block_scale",
    "tmem_columns": 512,
    "scale_layout": ScaleLayout.TILED_128X4,
    "fp4_scales": frozenset({ScaleType.E4M3, ScaleType.E8M0}),
    "library_fp4": frozenset({ScaleType.E4M3, ScaleType.E8M0}),
}


TARGETS = {
    target.name: target
    for target in (
        _cpu("cpu", "this machine's CPU", features().slow_dtypes),
        _cpu("cpu_bf16", "a CPU, its products in BF16", frozenset()),
        _cpu(CPU_FP32, "a CPU, its products in FP32", frozenset({torch.bfloat16, torch.float16})),
        _nvidia(80, "A100", 108, 163, peak=PEAKS["a100"]),
        _nvidia(89, "L4, L40S, RTX 40", 142, 99, peak=PEAKS["l40s"]),
        _nvidia(90, "H100, H200", 132, 227, peak=PEAKS["h200"]),
        _nvidia(
            100,
            "B200, GB200",
            148,
            227,
            peak=PEAKS["b200"],
            **_TCGEN05,
        ),
        _nvidia(
            103,
            "B300, GB300",
            160,
            227,
            peak=PEAKS["b300"],
            **_TCGEN05,
        ),
        _nvidia(
            120,
            "RTX 50",
            170,
            99,
            mma="mma.sync block_scale",
            scale_layout=ScaleLayout.TILED_128X4,
            fp4_scales=frozenset({ScaleType.E4M3, ScaleType.E8M0}),
            library_fp4=frozenset({ScaleType.E4M3}),
            fp8_tiles=frozenset({"tensor"}),  # pytorch #192707: cuBLAS refuses scales a row
            peak=PEAKS["rtx5090"],
        ),
        _amd(
            "gfx942",
            "MI300",
            304,
            64,
            fp8_tiles=_FP8_TILES,
            fp8_fnuz=True,
            peak=PEAKS["mi300x"],
        ),
        _amd(
            "gfx950",
            "MI350",
            256,
            160,
            mma="v_mfma_scale",
            fp4_scales=frozenset({ScaleType.E8M0}),
            fp8_tiles=_FP8_TILES,
            encodes_fp8=True,
            decodes_fp8=True,
            peak=PEAKS["mi355x"],
        ),
    )
}
"""By name, the value of the option ``target``."""

CHIPS = {
    "a100": "sm_80",
    "l4": "sm_89", "l40": "sm_89", "l40s": "sm_89", "rtx4090": "sm_89",
    "h100": "sm_90", "h200": "sm_90", "gh200": "sm_90",
    "b200": "sm_100", "gb200": "sm_100",
    "b300": "sm_103", "gb300": "sm_103",
    "rtx5090": "sm_120",
    "mi300": "gfx942", "mi300x": "gfx942", "mi325x": "gfx942",
    "mi350": "gfx950", "mi350x": "gfx950", "mi355x": "gfx950",
}  # fmt: skip
"""Targets by what their chips are called."""


def check(name: str) -> str:
    """The target called `name`, or the target of the chip called so; "auto" stays. Raises `TargetError`."""
    known = name if name == AUTO or name in TARGETS else CHIPS.get(_word(name))
    if known is None:
        raise TargetError(f"{not_allowed('target', name, [AUTO, *TARGETS])}, or a chip: {', '.join(CHIPS)}")
    return known


def _word(chip: str) -> str:
    return chip.lower().replace(" ", "")


def of_chip(name: str) -> Target:
    """The target of the chip called `name`, with the chip's own peaks, or the target of that name.

    Raises `TargetError`.
    """
    target = TARGETS[check(name)]
    return replace(target, peak=PEAKS.get(_word(name), target.peak))


def resolve(name: str, device: torch.device) -> Target:
    """The target called `name` for a graph on `device`; "auto" is what the device is.

    Raises `TargetError` if the device is of another kind. A chip without a row is served by its device's
    emulated lowering under its own name.
    """
    here = of_device(device)
    if name == AUTO:
        return here
    wanted = TARGETS[check(name)]
    if wanted.device != here.device:
        raise TargetError(
            f"target {name} does not run on {device}: the model is on {here.name}. Leave target 'auto'"
            " to compile for where the model is"
        )
    return wanted


def of_device(device: torch.device) -> Target:
    """Returns the target of `device`; a chip without a row is emulated under its own name.

    The memory of a device tells chips of one target apart: 80 GB is an H100's, 141 GB an H200's.
    """
    if device.type != "cuda":
        return TARGETS.get(device.type, Target(name=device.type, device=device.type))
    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", "").partition(":")[0]
    name = architecture or f"sm_{properties.major}{properties.minor}"
    target = TARGETS.get(name, Target(name=name, device="cuda"))
    peaks = [target.peak, *(peak for chip, peak in PEAKS.items() if CHIPS[chip] == name)]
    memory_gb = properties.total_memory / 1e9
    nearest = min(filter(None, peaks), key=lambda peak: abs(peak.memory_gb - memory_gb), default=None)
    return replace(target, peak=nearest)
