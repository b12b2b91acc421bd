"""Shares of its data sheet that a chip sustains, by kind of work: low, centre and high, each with its source.

    memory                           bytes of device memory
    issue                            slots of the vector units
    bf16, fp32, fp8_tensor,          products of a library, by format and by the extent of FP32 scales
      fp8_channel, fp8_block, mxfp8,
      fp4
    own_bf16, own_mxfp8, own_fp4     products of generated kernels, waits that are modelled left out
    cudnn, flash, efficient          attention forward by backend; `…_backward` its backward
    latency_us                       from a load to its first use, under load
    launch_us                        that a kernel takes beside its work: its start, and its last programs

A share is of the peaks in `lowering.targets`; a time is in µs, of which low is the longest. A rate that was
not measured on a chip is assumed, with a wide range, and its source says so. ``make gpu-rates`` writes
measured ones in the form that `Rates.load` reads; they replace rows of the table.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcompile.errors import OptionError
from mxcompile.lowering.targets import TARGETS, Target

KINDS = (
    *("memory", "issue", "bf16", "fp32", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp8", "fp4"),
    *("own_bf16", "own_mxfp8", "own_fp4", "cudnn", "cudnn_backward", "flash", "flash_backward"),
    *("efficient", "efficient_backward", "latency_us", "launch_us"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Rate:
    """low, centre, high: slowest, expected and fastest. source: who measured it, or that it is assumed."""

    low: float
    centre: float
    high: float
    source: str


@dataclass(frozen=True, slots=True)
class Range:
    """A quantity that depends on rates."""

    low: float
    centre: float
    high: float

    @staticmethod
    def of(quantity: Callable[[Rates], float], rates: Rates) -> Range:
        """`quantity` at the centre of all rates, and how far their ends move it.

        Rates are taken to be independent: the moves of one rate at a time are added as squares.
        """
        centre = quantity(rates)
        moves = [quantity(moved) - centre for moved in rates.ends()]
        low = math.sqrt(sum(min(move, 0.0) ** 2 for move in moves))
        high = math.sqrt(sum(max(move, 0.0) ** 2 for move in moves))
        return Range(centre - low, centre, centre + high)

    def text(self, form: str) -> str:
        """``centre (low–high)``, each in `form`."""
        return f"{self.centre:{form}} ({self.low:{form}}–{self.high:{form}})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of one chip. target: of it. table: by kind. values: by kind, the one to reckon with."""

    target: Target
    table: Mapping[str, Rate]
    values: Mapping[str, float]

    @staticmethod
    def of(target: Target, measured: str | Path | None = None) -> Rates:
        """Returns the rates of the table. measured: a file of ``make gpu``, whose rates replace them.

        Raises `OptionError` if the file is of another target, or does not hold rates.
        """
        chip = target.peak.chip if target.peak else ""
        table = {**_ASSUMED, **_BY_TARGET.get(target.name, {}), **_BY_CHIP.get(chip, {})}
        if measured is not None:
            table |= _read(Path(measured), target.name)
        return Rates(target=target, table=table, values={kind: rate.centre for kind, rate in table.items()})

    def __getitem__(self, kind: str) -> float:
        return self.values[kind]

    def ends(self) -> Iterator[Rates]:
        """The same with one rate at its low or high end, for each end of each."""
        for kind, rate in self.table.items():
            for end in {rate.low, rate.high} - {rate.centre}:
                yield dataclasses.replace(self, values={**self.values, kind: end})


def _read(path: Path, target: str) -> dict[str, Rate]:
    wrong = f"{path} does not hold rates of {target}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rates = {kind: Rate(**fields) for kind, fields in data["rates"].items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{wrong}: {type(error).__name__}: {error}") from error
    if data.get("target") != target or not set(rates) <= set(KINDS):
        raise OptionError(f"{wrong}: it is of {data.get('target')}, with {', '.join(rates)}")
    return rates


def as_data(target: str, rates: Mapping[str, Rate], **about: Any) -> dict[str, Any]:
    """The content of a file of rates. about: the device and versions."""
    return {"target": target, **about, "rates": {kind: dataclasses.asdict(r) for kind, r in rates.items()}}


def _rates(source: str, **ends: tuple[float, float, float]) -> dict[str, Rate]:
    return {
        kind: Rate(low=low, centre=centre, high=high, source=source)
        for kind, (low, centre, high) in ends.items()
    }


_UNKNOWN = "assumed: no measurement of this chip"

_ASSUMED = {
    **_rates(
        _UNKNOWN,
        memory=(0.70, 0.80, 0.88),
        bf16=(0.55, 0.72, 0.85),
        fp32=(0.60, 0.80, 0.90),
        fp8_tensor=(0.50, 0.65, 0.80),
        fp8_channel=(0.40, 0.55, 0.75),
        fp8_block=(0.35, 0.50, 0.65),
        mxfp8=(0.45, 0.60, 0.75),
        fp4=(0.40, 0.55, 0.70),
        own_bf16=(0.60, 0.75, 0.90),
        own_mxfp8=(0.40, 0.55, 0.75),
        own_fp4=(0.30, 0.45, 0.60),
        cudnn=(0.45, 0.60, 0.72),
        cudnn_backward=(0.38, 0.50, 0.62),
        flash=(0.40, 0.55, 0.70),
        flash_backward=(0.30, 0.45, 0.60),
        efficient=(0.20, 0.32, 0.50),
        efficient_backward=(0.12, 0.22, 0.40),
    ),
    **_rates(
        "casts and norms whose issue slots bind, within 10 % on a B200 and an H200 (torchao's training page,"
        " cudnn-frontend's benchmarks of norms)",
        issue=(0.54, 0.60, 0.66),
    ),
    **_rates(
        "pointer chases of device memory under load, 0.6 to 0.8 µs on every chip", latency_us=(0.9, 0.7, 0.5)
    ),
    **_rates(
        "torchao #4777: casts of 512² to 16384² on a B200 take 3 µs beside their bytes",
        launch_us=(4.5, 3.0, 1.5),
    ),
}

_MAMF = "stas00/ml-engineering, accelerator benchmarks"

_BY_TARGET: dict[str, dict[str, Rate]] = {
    "sm_80": {
        **_rates("Liger-Kernel's benchmarks, norms of 8,192 columns and more", memory=(0.72, 0.80, 0.84)),
        **_rates(
            f"{_MAMF}: 0.87 at the best shape; triton #3551: 0.77 to 0.83",
            bf16=(0.74, 0.80, 0.87),
            own_bf16=(0.70, 0.80, 0.88),
        ),
        **_rates(
            "FlashAttention-2, arXiv 2307.08691, causal, heads of 128",
            flash=(0.54, 0.60, 0.65),
            flash_backward=(0.44, 0.50, 0.56),
        ),
    },
    "sm_89": {
        **_rates(
            "pytorch #192799: 86 TFLOPS forward, 24 to 28 both ways over a mix of shapes",
            flash=(0.24, 0.42, 0.60),
            flash_backward=(0.08, 0.25, 0.45),
        ),
    },
    "sm_90": {
        **_rates("cudnn-frontend's benchmarks of norms on an H200", memory=(0.74, 0.80, 0.87)),
        **_rates(f"{_MAMF}: 794 TFLOPS at the best shape, 0.70 to 0.76 at others", bf16=(0.70, 0.74, 0.80)),
        **_rates(
            f"{_MAMF}: 1,453 TFLOPS; Transformer Engine's GEMM profile 0.60 to 0.68",
            fp8_tensor=(0.60, 0.65, 0.73),
        ),
        **_rates(
            "torchao: Llama-3 8B on H100 gains 25 % with scales a tensor and 10 % with scales a row",
            fp8_channel=(0.44, 0.53, 0.63),
        ),
        **_rates(
            "_scaled_mm of blocks against BF16 on an H100 PCIe 1.34; Transformer Engine's blocks 1.40",
            fp8_block=(0.45, 0.50, 0.56),
        ),
        **_rates(
            "cudnn-frontend, H200 with cuDNN 9.19, causal, 8,192 long: 644 and 541 TFLOPS",
            cudnn=(0.60, 0.65, 0.68),
            cudnn_backward=(0.50, 0.547, 0.58),
        ),
        **_rates(
            "transformers #48163: cuDNN's is 1.7 to 2.3 times as fast as FlashAttention-2",
            flash=(0.28, 0.33, 0.38),
            flash_backward=(0.24, 0.27, 0.32),
        ),
    },
    "sm_100": {
        **_rates(
            "casts of torchao 5.9 to 6.5 TB/s, cuDNN's norms 6.0 to 6.5, quack's copy 6.3",
            memory=(0.74, 0.78, 0.81),
        ),
        **_rates(f"{_MAMF}: 1,745 TFLOPS at the best shape, 0.62 to 0.71 at others", bf16=(0.62, 0.67, 0.73)),
        **_rates(
            "cuBLAS, triton #9044 and #9697: 2,850 TFLOPS at 8192³, 2,648 at 16384³, 2,587 at 32768³",
            mxfp8=(0.57, 0.60, 0.64),
        ),
        **_rates(
            "cuBLAS on a B200, triton #9697: 5,590 TFLOPS at 8192³, 4,314 at 16384³, 4,933 at 32768³; torchao"
            " #2427: 4,460 at 4096³, 5,370 at 8192³",
            fp4=(0.48, 0.57, 0.63),
        ),
        **_rates(
            "triton #9697: Gluon's NVFP4 on one processor 4,782 TFLOPS at 8192³; #9044: dot_scaled 4,200 to"
            " 4,500",
            own_fp4=(0.45, 0.50, 0.55),
        ),
        **_rates(
            "triton #9044: dot_scaled of 128×256 2,202 TFLOPS; #9697: Gluon on one processor 2,526",
            own_mxfp8=(0.45, 0.50, 0.58),
            own_bf16=(0.45, 0.55, 0.68),
        ),
        **_rates(f"{_MAMF}: 3,432 TFLOPS at the best shape", fp8_tensor=(0.58, 0.65, 0.76)),
        **_rates("helion #2756: CUTLASS 1,860 TFLOPS at 4096³", fp8_channel=(0.36, 0.41, 0.50)),
        **_rates(
            "cudnn-frontend, GB200 with cuDNN 9.22, causal, 8,192 long: 1,574 and 1,332 TFLOPS;"
            " FlashAttention-4 on a B200 1,418 and 1,209",
            cudnn=(0.58, 0.64, 0.70),
            cudnn_backward=(0.50, 0.55, 0.59),
        ),
        **_rates(
            "triton-lang/Triton-to-tile-IR: 391 and 313 TFLOPS",
            flash=(0.15, 0.174, 0.20),
            flash_backward=(0.12, 0.139, 0.16),
        ),
    },
    "sm_120": {
        **_rates("quack's benchmark of clusters: 1,477 to 1,577 GB/s", memory=(0.82, 0.85, 0.88)),
        **_rates(
            "zzc0721/torch-performance-test-data: 234 to 240 TFLOPS at the boosted clock; some cards 178",
            bf16=(0.95, 1.10, 1.15),
        ),
        **_rates(
            "gn-kernels: cuBLAS 660 TFLOPS at 600 W, 532 to 552 at 400 W; quack, blockscaled_api.md: 728 at"
            " 8192³",
            mxfp8=(0.64, 0.80, 0.90),
        ),
        **_rates(
            "cuBLAS: gn-kernels 1,306 TFLOPS at 600 W, 1,140 to 1,165 at 400 W; quack, blockscaled_api.md:"
            " 1,435 at 8192³; gpu-flops-bench 1,617 at 8192³",
            fp4=(0.66, 0.80, 0.96),
        ),
        **_rates(
            "gn-kernels: cuBLAS 480 TFLOPS at 600 W, 448 at 400 W; pytorch #155991: CUTLASS 389",
            fp8_tensor=(0.90, 1.05, 1.16),
        ),
        **_rates(
            "vllm #38338: Triton's product of NVFP4 845 to 874 TFLOPS, 0.52 of its peak; MXFP8 assumed alike",
            own_mxfp8=(0.40, 0.52, 0.70),
        ),
        **_rates("vllm #38338: dot_scaled of NVFP4 845 to 874 TFLOPS", own_fp4=(0.45, 0.52, 0.60)),
        **_rates(
            "a blog of FlashAttention on an RTX 5090: PyTorch's forward 187 TFLOPS; backward assumed",
            flash=(0.75, 0.85, 0.95),
            flash_backward=(0.45, 0.65, 0.85),
        ),
    },
    "gfx942": {
        **_rates("aiter #335: norms 3.1 to 3.9 TB/s", memory=(0.58, 0.70, 0.80)),
        **_rates(f"{_MAMF}: 668 TFLOPS at the best shape; gn-kernels 660", bf16=(0.44, 0.48, 0.52)),
        **_rates(
            "gn-kernels: hipBLASLt 1,197 TFLOPS at the best shape; hipBLASLt #1721: 907 at 8192³ at 1 GHz;"
            " scales a row assumed to cost 0.02",
            fp8_tensor=(0.36, 0.42, 0.46),
            fp8_channel=(0.34, 0.40, 0.45),
        ),
        **_rates(_UNKNOWN, flash=(0.24, 0.33, 0.42), flash_backward=(0.16, 0.24, 0.32)),
    },
    "gfx950": {
        **_rates("torchao #4290: casts 4.4 to 4.5 TB/s", memory=(0.54, 0.58, 0.64)),
        **_rates(f"{_MAMF}: 1,565 TFLOPS at the best shape", bf16=(0.50, 0.56, 0.62)),
        **_rates(
            "pytorch #193527: FlyDSL 2,336 TFLOPS at 8192³, 0.47; Triton's own assumed to be slower",
            own_mxfp8=(0.34, 0.40, 0.47),
            mxfp8=(0.38, 0.44, 0.50),
        ),
        **_rates(
            "MSLK #379: dot_scaled of MXFP4 3,300 TFLOPS on a MI350X, 0.36 of its data sheet",
            own_fp4=(0.28, 0.34, 0.42),
        ),
        **_rates(_UNKNOWN, fp8_tensor=(0.36, 0.44, 0.54), fp8_channel=(0.32, 0.40, 0.50)),
        **_rates(_UNKNOWN, flash=(0.22, 0.30, 0.42), flash_backward=(0.14, 0.22, 0.32)),
    },
}
_BY_TARGET["sm_103"] = _BY_TARGET["sm_100"] | _rates(
    "Transformer Engine's GEMM profile of a B300: 5,094 TFLOPS over the products of a layer, by cuBLAS",
    fp4=(0.33, 0.38, 0.46),
    own_fp4=(0.30, 0.35, 0.40),
)

_BY_CHIP: dict[str, dict[str, Rate]] = {
    "H100": _rates(
        "Liger-Kernel's benchmarks of norms and triton #11644: 0.88 to 0.91, more than an H200 reaches",
        memory=(0.80, 0.89, 0.91),
    ),
}
"""By the name of a chip in `Peak`, whose rates differ from the rates of the chip in its target's row."""

assert set(_BY_TARGET) <= set(TARGETS)
