"""A step as the sum of the bounds of its launches, which are estimates."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from mxcompile.offline.launch import Launch

KINDS = ("product", "cast", "attention", "rest")
REASONS = ("memory", "issue", "mma", "latency")


@dataclass(frozen=True, kw_only=True, slots=True)
class Step:
    """Sums over launches.

    us: Σ bounds, and of them by_kind of launch and by_reason. num_bytes: moved at least. cast_memory_us: what
    the casts' bytes alone would take. launches: with a bound; unclear: of them with a loop whose rounds are
    not known.
    """

    us: float = 0.0
    by_kind: Mapping[str, float] = field(default_factory=dict)
    by_reason: Mapping[str, float] = field(default_factory=dict)
    num_bytes: int = 0
    cast_memory_us: float = 0.0
    launches: int = 0
    unclear: int = 0

    @classmethod
    def of(cls, launches: Iterable[Launch]) -> Step:
        """The sum; zeros if no launch has a bound."""
        bounds = [(launch, launch.bound) for launch in launches if launch.bound is not None]
        by_kind: defaultdict[str, float] = defaultdict(float)
        by_reason: defaultdict[str, float] = defaultdict(float)
        for launch, bound in bounds:
            by_kind[launch.kind] += bound.us
            by_reason[bound.by] += bound.us
        return cls(
            us=sum(bound.us for _, bound in bounds),
            by_kind=dict(by_kind),
            by_reason=dict(by_reason),
            num_bytes=sum(launch.num_bytes for launch, _ in bounds),
            cast_memory_us=sum(bound.memory_us for launch, bound in bounds if launch.kind == "cast"),
            launches=len(bounds),
            unclear=sum(not bound.understood for _, bound in bounds),
        )

    @property
    def cast_ratio(self) -> float | None:
        """Σ bounds of the casts over what their bytes would take; None without casts."""
        return self.by_kind.get("cast", 0.0) / self.cast_memory_us if self.cast_memory_us else None

    def __str__(self) -> str:
        kinds = ", ".join(f"{kind} {self.by_kind[kind]:,.0f}" for kind in KINDS if kind in self.by_kind)
        reasons = ", ".join(
            f"{name} {self.by_reason[name]:,.0f}" for name in REASONS if name in self.by_reason
        )
        unclear = f"; {self.unclear} with loops counted once" if self.unclear else ""
        return (
            f"bounds of the launches, estimates from the machine code: {self.us:,.0f} µs{unclear}\n"
            f"  {kinds}\n"
            f"  bound by {reasons}"
        )
