"""Kernel launches, generated kernels, and a step as the sum of its launches' estimates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mxcompile import ops
from mxcompile.offline.binary import Binary
from mxcompile.offline.estimate import REASONS, Estimate, Work, ratio, total
from mxcompile.offline.kernel_work import Facts
from mxcompile.offline.rates import Range, Rates

CASTS = frozenset(f"{operator}.default" for operator in ops.CAST_WORK)
"""Names of cast operators, and of operators that only prepare casts."""

_KERNELS = "from mxcompile.lowering.kernels import"
"""Import in the source of every template of mxcompile."""


COLLECTIVE = "collective"
"""Kind of a launch that runs a collective or waits for it. It has no estimate."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Launch:
    """One kernel launch of a step.

    phase: "forward", "backward" or "inference", numbered if the model has several graphs. kernel: name of a
    generated kernel or of a library operator. generated: whether it is generated. gemms: GEMMs it computes,
    as ``layer gemm``. operators: operators it computes, without views. cast: source of a launch that only
    casts: "input" (a weight, or a tensor saved for backward), "library" (result of a library kernel) or
    "generated" (result of a generated kernel, a missed fusion); else "". num_bytes: lower bound of the bytes
    it moves. flops: FLOPs of its products. library: name of the library kernel in the GEMM's record. work,
    estimate: see `estimate`; None for a chip without known peaks. facts: figures from the machine code.
    """

    phase: str
    kernel: str
    generated: bool
    gemms: tuple[str, ...] = ()
    operators: tuple[str, ...] = ()
    cast: str = ""
    num_bytes: int = 0
    flops: float = 0.0
    library: str = ""
    work: Work | None = None
    estimate: Estimate | None = None
    facts: Facts | None = None

    @property
    def kind(self) -> str:
        """Kind: "product", "cast" (alone or fused with its producer), "attention", "collective" or "rest"."""
        if "_c10d_functional" in self.kernel:
            return COLLECTIVE
        if self.gemms:
            return "attention" if "attention" in self.kernel else "product"
        return "rest" if CASTS.isdisjoint(self.operators) else "cast"


@dataclass(frozen=True, kw_only=True, slots=True)
class Kernel:
    """A generated kernel of a phase: Inductor's Triton module and the compiled binary."""

    phase: str
    name: str
    source: str
    binary: Binary

    @property
    def is_template(self) -> bool:
        """Whether it is a template of mxcompile, not a kernel of Inductor."""
        return _KERNELS in self.source

    @property
    def spill(self) -> str:
        """A sentence about its register spills."""
        whose = "mxcompile's" if self.is_template else "Inductor's own"
        return f"{self.phase} {self.name} ({whose}) spills {self.binary.spill_bytes} bytes a thread"


KINDS = ("product", "cast", "attention", "rest")

INDISTINGUISHABLE = "not distinguishable"
"""Label for two policies if the range of their ratio includes 1."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Sums over launches.

    us: sum of the estimates. by_kind, by_reason: sums by kind of launch, and by largest part. num_bytes:
    lower bound of the bytes moved. cast_memory_us: memory time of the casts alone. launches: launches with an
    estimate. unclear: launches among them with an unknown trip count. works: work of the launches. rates:
    rates behind the estimates.
    """

    us: float = 0.0
    by_kind: Mapping[str, float] = field(default_factory=dict)
    by_reason: Mapping[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    cast_memory_us: float = 0.0
    launches: int = 0
    unclear: int = 0
    works: tuple[Work, ...] = ()
    rates: Rates

    @classmethod
    def from_launches(cls, launches: Iterable[Launch], rates: Rates) -> Step:
        """Returns the sum over `launches`; zeros if no launch has an estimate."""
        estimated = [launch for launch in launches if launch.work is not None]
        by_kind: defaultdict[str, float] = defaultdict(float)
        by_reason: defaultdict[str, float] = defaultdict(float)
        cast_memory_us = 0.0
        for launch in estimated:
            assert launch.estimate is not None
            by_kind[launch.kind] += launch.estimate.us
            by_reason[launch.estimate.by] += launch.estimate.us
            cast_memory_us += launch.estimate.memory_us if launch.kind == "cast" else 0.0
        return cls(
            us=sum(by_kind.values()),
            by_kind=dict(by_kind),
            by_reason=dict(by_reason),
            num_bytes=sum(launch.num_bytes for launch in estimated),
            cast_memory_us=cast_memory_us,
            launches=len(estimated),
            unclear=sum(launch.facts is not None and not launch.facts.understood for launch in estimated),
            works=tuple(launch.work for launch in estimated if launch.work is not None),
            rates=rates,
        )

    @property
    def range(self) -> Range:
        """The estimate in µs at the low, centre and high rates."""
        if not self.works:
            return Range(0.0, 0.0, 0.0)
        return Range.from_rates(lambda rates: total(self.works, rates), self.rates)

    def over(self, other: Step) -> Range:
        """Returns the ratio of this step and `other` on the same chip, by the rates of this step."""
        return ratio(self.works, other.works, self.rates)

    @property
    def cast_ratio(self) -> float | None:
        """Ratio of the casts' estimates and their memory time; None without casts."""
        return self.by_kind.get("cast", 0.0) / self.cast_memory_us if self.cast_memory_us else None

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {self.by_kind[kind]:,.0f}" for kind in KINDS if kind in self.by_kind)
        reasons = ", ".join(
            f"{name} {self.by_reason[name]:,.0f}" for name in REASONS if name in self.by_reason
        )
        unclear = f"; {self.unclear} with loops counted once" if self.unclear else ""
        return (
            f"estimates of the launches, from the machine code: {self.range.text(',.0f')} µs{unclear}\n"
            f"  {kinds}\n"
            f"  bound by {reasons}"
        )
