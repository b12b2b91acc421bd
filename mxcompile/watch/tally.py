"""Statistics of an operand as additive sums, which can be joined over calls and ranks.

    tally of a step = Σ over its calls and ranks          underflow = elements cast to 0 / nonzero elements

`ops.watch.FIELDS` lists the sums. A weight does not change within a step, so only its first call counts.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from mxcompile.ops.watch import FIELDS, NUM_BYTES

Key = tuple[str, str, str]
"""Layer, GEMM and operand."""

KEY_NAMES = ("layer", "gemm", "operand")
"""Names of the parts of a `Key` in records."""

_SCALES = "scale_min", "scale_median", "scale_max"
NUMBERS = (
    "amax", "smallest", "underflow", "saturated", "error", "sqnr", *_SCALES, "nan", "inf", "poisoned",
    "changed",
)  # fmt: skip
"""The statistics of an operand."""

OF_RESULTS = ("amax", "smallest", "nan", "inf")
"""The statistics of a GEMM's result, which is not cast."""

STATS = tuple(dict.fromkeys("scales" if name in _SCALES else name for name in NUMBERS))
"""Names for `Watch(stats=…)`: the statistics, with one name for the three of scales."""


@dataclass(kw_only=True, slots=True)
class Tally:
    """The counts and sums of one operand in one step.

    role, format: role of the layer and format of the cast, "" for a result, which is not cast. calls: calls
    of the graph, over all ranks. sums: sums by `FIELDS`. histogram: number of scales by byte. compared,
    changed: elements of a weight's cast that were compared with the previous sample, and the number that
    differ.
    """

    role: str
    format: str
    calls: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    histogram: dict[int, float] = field(default_factory=dict)
    compared: int = 0
    changed: int = 0

    @classmethod
    def from_numbers(cls, role: str, fmt: str, numbers: list[float]) -> Tally:
        """Returns the tally of one call. numbers: a result of ``cast_statistics``."""
        sums = dict(zip(FIELDS, numbers[: len(FIELDS)], strict=True))
        counts = numbers[len(FIELDS) :]
        histogram = {byte: counts[byte] for byte in range(NUM_BYTES) if counts[byte]}
        return cls(role=role, format=fmt, calls=1, sums=sums, histogram=histogram)

    def add(self, other: Tally) -> None:
        """Adds `other`, a tally of the same operand."""
        self.calls += other.calls
        self.compared += other.compared
        self.changed += other.changed
        for name, value in other.sums.items():
            combine = {"amax": max, "smallest": min}.get(name, float.__add__)
            self.sums[name] = combine(self.sums[name], value)
        for byte, count in other.histogram.items():
            self.histogram[byte] = self.histogram.get(byte, 0.0) + count

    def statistics(self) -> dict[str, Any]:
        """Returns the statistics by name, None if undefined. A GEMM's result is not cast and has fewer."""
        sums = self.sums
        values = {
            "amax": sums["amax"],
            "smallest": sums["smallest"] if math.isfinite(sums["smallest"]) else None,
            "nan": int(sums["nan"]),
            "inf": int(sums["inf"]),
        }
        if not self.format:
            return values
        signal, noise = sums["signal"], sums["noise"]
        finite = sums["elements"] - sums["nan"] - sums["inf"]
        error = math.sqrt(noise / signal) if signal else None
        scales: dict[str, int | None] = dict.fromkeys(_SCALES)
        bins = sorted((byte, count) for byte, count in self.histogram.items() if byte != NUM_BYTES - 1)
        if bins:  # without the byte of NaN
            reached = list(itertools.accumulate(count for _, count in bins))
            median = bisect_left(reached, reached[-1] / 2)
            scales = dict(zip(_SCALES, (bins[0][0], bins[median][0], bins[-1][0]), strict=True))
        return values | {
            "underflow": sums["underflow"] / sums["nonzero"] if sums["nonzero"] else 0.0,
            "saturated": sums["saturated"] / finite if finite else 0.0,
            "error": 0.0 if noise == 0 else error,
            "sqnr": 10 * math.log10(signal / noise) if signal and noise else None,
            **scales,
            "poisoned": int(sums["poisoned"]),
            "changed": self.changed / self.compared if self.compared else None,
        }

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Tally:
        """Returns the tally whose fields Python's JSON has written."""
        return cls(**data | {"histogram": {int(byte): count for byte, count in data["histogram"].items()}})


Sample = dict[Key, Tally]
"""The tallies of one step, in the order of execution."""


def join(tallies: Sample, more: Mapping[Key, Tally]) -> None:
    """Adds `more` to `tallies`."""
    for key, tally in more.items():
        if key in tallies:
            tallies[key].add(tally)
        else:
            tallies[key] = tally


def row(key: Key, tally: Tally, stats: frozenset[str]) -> dict[str, Any]:
    """Returns the record of one operand in a sample. stats: the included entries of `STATS`."""
    named: dict[str, Any] = dict(zip(KEY_NAMES, key, strict=True))
    named |= {"role": tally.role, "format": tally.format, "calls": tally.calls}
    named["elements"] = int(tally.sums["elements"])
    measured = tally.statistics()
    wanted = stats.union(_SCALES if "scales" in stats else ())
    return named | {name: value for name, value in measured.items() if name in wanted}
