"""Meshes of a number of ranks, one rank of each explained: which fit, and which is the fastest.

    tp          1, 2, 4 … ranks of a node; the tokens of a call are shared by all of them
    dp          the rest: weights sharded over all of it
    dp_shard    or over 32 or 128 of it, with copies along dp_replicate (HSDP)

Time is compared as tokens a second of a GPU, because a call has the same tokens whatever `tp` is.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mxcompile.errors import OptionError, shown
from mxcompile.mesh.links import NODE
from mxcompile.mesh.report import RankReport
from mxcompile.mesh.time import StepTime
from mxcompile.offline.rates import Range
from mxcompile.offline.step import INDISTINGUISHABLE
from mxcompile.report.forms.tables import Table, drawn, wrapped
from mxcompile.report.forms.words import byte_count, count

SPLIT, FSDP = "tp=llama", "fsdp"
_SHARDS = (32, 128)

MEMORY_GB = {
    "sm_80": 80.0,
    "sm_89": 48.0,
    "sm_90": 141.0,
    "sm_100": 180.0,
    "sm_103": 288.0,
    "sm_120": 32.0,
    "gfx942": 192.0,
    "gfx950": 288.0,
}
"""10⁹ bytes of memory of the chips that `lowering.targets` has the peaks of."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshCandidate:
    """A mesh. parallel: ways for a plain model, None for a factory. tp: ranks that share tokens."""

    mesh: str
    parallel: str | None
    tp: int


def candidates(ranks: int, parallel: str | None, node: int = NODE) -> Iterator[MeshCandidate]:
    """Meshes of `ranks` ranks, for the ways of `parallel` or, without any, for a factory of dp and tp.

    Raises `OptionError` if there are not two ranks.
    """
    if ranks < 2:
        raise OptionError(f"a sweep over meshes needs 2 ranks or more, found {shown(ranks)}")
    ways = [] if parallel is None else [word.strip() for word in parallel.split(",")]
    splits = [tp for tp in _powers(node) if not ranks % tp]
    for tp in splits if parallel is None or SPLIT in ways else [1]:
        dp = ranks // tp
        if parallel is None:
            yield MeshCandidate(mesh=f"dp={dp},tp={tp}", parallel=None, tp=tp)
            continue
        kept = [way for way in ways if way != SPLIT or tp > 1]
        inner = f",tp={tp}" if tp > 1 else ""
        if FSDP in ways and dp > 1:
            yield MeshCandidate(mesh=f"dp={dp}{inner}", parallel=",".join(kept), tp=tp)
            for shard in _SHARDS:
                if shard < dp and not dp % shard:
                    mesh = f"dp_replicate={dp // shard},dp_shard={shard}{inner}"
                    yield MeshCandidate(mesh=mesh, parallel=",".join(kept), tp=tp)
        elif tp == ranks:
            yield MeshCandidate(mesh=f"tp={tp}", parallel=SPLIT, tp=tp)


def _powers(most: int) -> list[int]:
    return [1 << power for power in range(most.bit_length()) if 1 << power <= most]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPoint:
    """A mesh that was explained. rank: the report of one rank; None if it did not run. reason: why not."""

    candidate: MeshCandidate
    rank: RankReport | None = None
    reason: str = ""

    @property
    def step(self) -> StepTime:
        """The time of the step of a mesh that ran."""
        assert self.rank is not None, "a mesh that ran"
        assert self.rank.time is not None, "a rank explained with links"
        return self.rank.time

    @property
    def memory(self) -> int:
        """Bytes that a rank of a mesh that ran holds."""
        assert self.rank is not None, "a mesh that ran"
        return self.rank.memory.total

    def speed(self, tokens: int) -> Range:
        """Tokens a second of a GPU, of `tokens` in a call."""
        us = self.step.us
        each = tokens / self.candidate.tp * 1e6
        return Range(each / us.high, each / us.centre, each / us.low)

    def over(self, other: MeshPoint) -> Range:
        """µs of a token on a GPU ÷ those on another mesh."""
        mine, theirs = self.step, other.step
        shares = self.candidate.tp / other.candidate.tp
        return Range.of(
            lambda rates: (
                shares * mine.works[0].us(mine.links, rates) / theirs.works[0].us(theirs.links, rates)
            ),
            mine.rates,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSweep:
    """Meshes of one model. ranks: of each. tokens: of a call. memory_gb: of a GPU, in 10⁹ bytes."""

    points: tuple[MeshPoint, ...]
    ranks: int
    tokens: int
    memory_gb: float

    @property
    def fitting(self) -> list[MeshPoint]:
        """The meshes that fit, the fastest first."""
        fit = [point for point in self.points if point.rank is not None and self._fits(point)]
        return sorted(fit, key=lambda point: point.step.us.centre * point.candidate.tp)

    def _fits(self, point: MeshPoint) -> bool:
        return point.memory <= self.memory_gb * 1e9

    def __str__(self) -> str:
        fitting = self.fitting
        title = (
            f"meshes of {count(self.ranks, 'rank')}, {self.tokens:,} tokens a call,"
            f" {self.memory_gb:g} GB a GPU: estimates, not measured"
        )
        if not fitting:
            return "\n".join([title, "no mesh fits", *self._others()])
        return "\n".join([title, drawn(self._rows(fitting)), *self._ties(fitting), *self._others()])

    def _rows(self, fitting: Sequence[MeshPoint]) -> Table:
        head = ["mesh", "memory", "step, ms", "tokens/s a GPU", "exposed", "of BF16's step"]
        rows = []
        for point in fitting:
            step = point.step
            parts = step.works[0].parts(step.links, step.rates)
            exposed = sum(us for part, us in parts.items() if part.startswith("exposed")) / sum(
                parts.values()
            )
            rows.append(
                [
                    point.candidate.mesh,
                    byte_count(point.memory),
                    f"{step.us.centre / 1e3:,.0f}",
                    point.speed(self.tokens).text(",.0f"),
                    f"{exposed:.0%}",
                    step.over(step.works[0], step.works[-1]).text(".2f"),
                ]
            )
        return [head, *rows]

    def _ties(self, fitting: Sequence[MeshPoint]) -> list[str]:
        ties = [point for point in fitting[1:] if point.over(fitting[0]).low <= 1.0]
        names = " and ".join(point.candidate.mesh for point in ties)
        return wrapped([f"{names}: {INDISTINGUISHABLE} from the first"]) if ties else []

    def _others(self) -> list[str]:
        lines = [
            f"{point.candidate.mesh} does not fit: {byte_count(point.memory)}"
            for point in self.points
            if point.rank is not None and not self._fits(point)
        ]
        lines += [f"{point.candidate.mesh}: {point.reason}" for point in self.points if point.rank is None]
        return wrapped(lines)
