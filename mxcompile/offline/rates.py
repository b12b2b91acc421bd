"""Fractions of its data sheet that a chip sustains, by kind of work: low, centre and high, with sources.

    memory                           bandwidth of device memory
    issue                            issue slots of the vector units
    bf16, fp32, fp8_tensor,          library products, by format and by the granularity of FP32 scales
      fp8_channel, fp8_block, mxfp8,
      fp4
    own_bf16, own_mxfp8, own_fp4     products of generated kernels, without modelled waits
    cudnn, flash, efficient          attention forward by backend; `…_backward` its backward
    latency_us                       from a load to its first use, under load
    launch_us                        overhead of a kernel: its start and its last programs

A fraction refers to the peaks in `lowering.targets`. Times are in µs; their low is the longest time. A rate
that was not measured on a chip is assumed with a wide range, and its source is "assumed". ``make
gpu-rates`` writes measured rates in the format that `Rates.for_target` reads; they replace rows of the table.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxcompile.errors import OptionError, not_allowed
from mxcompile.lowering.chips.target import UNKNOWN, Rate, Target, shares

KINDS = (
    *("memory", "issue", "bf16", "fp32", "fp8_tensor", "fp8_channel", "fp8_block", "mxfp8", "fp4"),
    *("own_bf16", "own_mxfp8", "own_fp4", "cudnn", "cudnn_backward", "flash", "flash_backward"),
    *("efficient", "efficient_backward", "latency_us", "launch_us"),
)


@dataclass(frozen=True, slots=True)
class Range:
    """A quantity that depends on rates."""

    low: float
    centre: float
    high: float

    @staticmethod
    def from_rates(quantity: Callable[[Rates], float], rates: Rates) -> Range:
        """Returns `quantity` at the centre of all rates, and its range.

        The rates count as independent: the changes by one rate at a time are added in quadrature.
        """
        centre = quantity(rates)
        moves = [quantity(moved) - centre for moved in rates.ends()]
        low = math.sqrt(sum(min(move, 0.0) ** 2 for move in moves))
        high = math.sqrt(sum(max(move, 0.0) ** 2 for move in moves))
        return Range(centre - low, centre, centre + high)

    def text(self, form: str) -> str:
        """Returns ``centre (low–high)``, each formatted by `form`."""
        return f"{self.centre:{form}} ({self.low:{form}}–{self.high:{form}})"


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """The rates of the chip `target`. table: rates by kind. values: the value in use by kind."""

    target: Target
    table: Mapping[str, Rate]
    values: Mapping[str, float]

    @staticmethod
    def for_target(target: Target, measured: str | Path | None = None) -> Rates:
        """Returns the rates of the table. measured: file whose rates replace them.

        Raises `OptionError` if the file is for another target or does not contain rates.
        """
        table = {**_ASSUMED, **target.rates, **(target.peak.rates if target.peak else {})}
        if measured is not None:
            table |= _read(Path(measured), target.name)
        return Rates(target=target, table=table, values={kind: rate.centre for kind, rate in table.items()})

    def __getitem__(self, kind: str) -> float:
        return self.values[kind]

    def ends(self) -> Iterator[Rates]:
        """Yields copies with a single rate at its low or high end, for both ends of every rate."""
        for kind, rate in self.table.items():
            for end in {rate.low, rate.high} - {rate.centre}:
                yield dataclasses.replace(self, values={**self.values, kind: end})


def _read(path: Path, target: str) -> dict[str, Rate]:
    wrong = f"{path} does not hold rates of {target}"
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        rates = {kind: Rate(**fields) for kind, fields in data["rates"].items()}
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise OptionError(f"{wrong}: {type(error).__name__}: {error}") from error
    if data.get("target") != target:
        raise OptionError(f"{wrong}: found rates of {data.get('target')}")
    if unknown := sorted(set(rates) - set(KINDS)):
        raise OptionError(f"{wrong}: {not_allowed('kind', unknown[0], KINDS)}")
    return rates


def as_data(target: str, rates: Mapping[str, Rate], **about: Any) -> dict[str, Any]:
    """Returns the content of a file of rates. about: device and versions."""
    return {"target": target, **about, "rates": {kind: dataclasses.asdict(r) for kind, r in rates.items()}}


_ASSUMED = {
    **shares(
        UNKNOWN,
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
    **shares(
        "casts and norms whose issue slots bind, within 10 % on a B200 and an H200 (torchao's training page,"
        " cudnn-frontend's benchmarks of norms)",
        issue=(0.54, 0.60, 0.66),
    ),
    **shares(
        "pointer chases of device memory under load, 0.6 to 0.8 µs on every chip", latency_us=(0.9, 0.7, 0.5)
    ),
    **shares(
        "torchao #4777: casts of 512² to 16384² on a B200 take 3 µs beside their bytes",
        launch_us=(4.5, 3.0, 1.5),
    ),
}
