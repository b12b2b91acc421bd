"""A sweep over the meshes of a number of ranks: which of them fit in memory, ordered by speed.

    tp          1, 2, 4 … ranks of a node, which share the tokens of a call
    ep          1, 2, 4 … 64 ranks with different experts
    dp          the remaining ranks: weights are sharded over all of them
    dp_shard    or over 32 or 128 of them, with replicas along dp_replicate (HSDP)

Speed is compared as tokens per second and GPU, because the tokens of a call do not depend on `tp`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from mxcompile.errors import OptionError, shown
from mxcompile.mesh.links import NODE
from mxcompile.mesh.report import RankReport
from mxcompile.mesh.time import StepTime
from mxcompile.offline.launch import INDISTINGUISHABLE
from mxcompile.offline.rates import Range
from mxcompile.ranks.experts import EXPERTS
from mxcompile.report.forms import plots
from mxcompile.report.forms.tables import Table, drawn, wrapped
from mxcompile.report.forms.words import byte_count, count

SPLIT, FSDP = "tp=llama", "fsdp"
_SHARDS = (32, 128)
_MOST_EXPERTS = 64
"""Largest number of ranks with different experts."""
_DRAWN = {"product": "products", "cast": "casts", "attention": "attention"}
_COLORS = {
    "products": "#2a6f97",
    "casts": "#e09f3e",
    "attention": "#61a5c2",
    "rest": "#8a8f98",
    "exposed communication": "#9e2a2b",
}
"""Colors of the parts in the plot, in stacking order."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshCandidate:
    """A mesh. parallel: e.g. "fsdp,tp=llama", None for a factory. tp: size of the axis tp."""

    mesh: str
    parallel: str | None
    tp: int


def candidates(ranks: int, parallel: str | None, node: int = NODE) -> Iterator[MeshCandidate]:
    """Yields meshes of `ranks` ranks for the kinds of parallelism in `parallel`; None stands for a factory.

    A factory gets meshes with the axes dp and tp. Raises `OptionError` for fewer than 2 ranks.
    """
    if ranks < 2:
        raise OptionError(f"a sweep over meshes needs 2 ranks or more, found {shown(ranks)}")
    if parallel is None:
        for tp in _parts(ranks, node):
            yield MeshCandidate(mesh=f"dp={ranks // tp},tp={tp}", parallel=None, tp=tp)
        return
    ways = [word.strip() for word in parallel.split(",")]
    axis, word, most = ("ep", EXPERTS, _MOST_EXPERTS) if EXPERTS in ways else ("tp", SPLIT, node)
    for part in _parts(ranks, most) if word in ways else [1]:
        dp, tp = ranks // part, part if word == SPLIT else 1
        kept = ",".join(way for way in ways if way != word or part > 1)
        inner = f",{axis}={part}" if part > 1 else ""
        if FSDP in ways and (dp > 1 or word == EXPERTS):
            yield MeshCandidate(mesh=f"dp={dp}{inner}", parallel=kept, tp=tp)
            for shard in _SHARDS:
                if shard < dp and not dp % shard:
                    mesh = f"dp_replicate={dp // shard},dp_shard={shard}{inner}"
                    yield MeshCandidate(mesh=mesh, parallel=kept, tp=tp)
        elif part == ranks:
            yield MeshCandidate(mesh=f"{axis}={part}", parallel=word, tp=tp)


def _parts(ranks: int, most: int) -> list[int]:
    """Returns the powers of two up to `most` that divide `ranks`."""
    powers = (1 << power for power in range(most.bit_length()))
    return [part for part in powers if part <= most and not ranks % part]


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshPoint:
    """An evaluated mesh. rank: report of one rank, None after a failure. reason: cause of the failure."""

    candidate: MeshCandidate
    rank: RankReport | None = None
    reason: str = ""

    @property
    def step(self) -> StepTime:
        """Step time of a mesh that ran."""
        assert self.rank is not None, "a mesh that ran"
        assert self.rank.time is not None, "a rank explained with links"
        return self.rank.time

    @property
    def memory(self) -> int:
        """Bytes that a rank holds, for a mesh that could be traced."""
        assert self.rank is not None, "a mesh that ran"
        return self.rank.memory.total

    def speed(self, tokens: int) -> Range:
        """Returns tokens per second and GPU for calls of `tokens` tokens."""
        us = self.step.us
        scaled_tokens = tokens / self.candidate.tp * 1e6
        return Range(scaled_tokens / us.high, scaled_tokens / us.centre, scaled_tokens / us.low)

    def over(self, other: MeshPoint) -> Range:
        """Returns the ratio of the µs per token and GPU to another mesh's."""
        mine, theirs = self.step, other.step
        shares = self.candidate.tp / other.candidate.tp
        return Range.from_rates(
            lambda rates: (
                shares * mine.works[0].us(mine.links, rates) / theirs.works[0].us(theirs.links, rates)
            ),
            mine.rates,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class MeshSweep:
    """The meshes of a sweep over one model. `sweep_meshes` returns it; ``print`` shows a table.

    Attributes:
        points: The evaluated meshes.
        ranks: Number of ranks of each mesh.
        tokens: Tokens of a call.
        memory_gb: Memory of a GPU in 10⁹ bytes.
    """

    points: tuple[MeshPoint, ...]
    ranks: int
    tokens: int
    memory_gb: float

    @property
    def fitting(self) -> list[MeshPoint]:
        """The meshes that fit in memory, fastest first."""
        fit = [point for point in self.points if point.rank is not None and self._fits(point)]
        return sorted(fit, key=lambda point: point.step.us.centre * point.candidate.tp)

    def _fits(self, point: MeshPoint) -> bool:
        return point.memory <= self.memory_gb * 1e9

    def __str__(self) -> str:
        fitting = self.fitting
        title = f"{self._title()}: estimates, not measured"
        if not fitting:
            return "\n".join([title, "no mesh fits", *self._others()])
        return "\n".join([title, drawn(self._rows(fitting)), *self._ties(fitting), *self._others()])

    def plot(self, path: str | Path) -> None:
        """Draws a bar of the µs per token and GPU, by part, for each mesh that fits.

        Args:
            path: Image file; matplotlib derives the format from the suffix.

        Raises:
            OptionError: matplotlib is missing, or no mesh fits.
        """
        fitting = self.fitting
        if not fitting:
            raise OptionError("no mesh fits in memory, so there is no picture: give more ranks")
        figure = plots.figure(figsize=(9, 1.6 + 0.42 * len(fitting)))
        axes = figure.subplots()
        names = [point.candidate.mesh for point in fitting]
        before = [0.0] * len(fitting)
        parts = [(point.candidate.tp / self.tokens, _parts_us(point.step)) for point in fitting]
        for part, color in _COLORS.items():
            sizes = [share * us[part] for share, us in parts]
            axes.barh(names, sizes, left=before, color=color, label=part)
            before = [start + size for start, size in zip(before, sizes, strict=True)]
        axes.invert_yaxis()
        axes.set(xlabel="µs a token on a GPU", title=f"{self._title()} (estimates, not measured)")
        axes.title.set_fontsize(10)
        axes.grid(axis="x", alpha=0.3)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        figure.savefig(path)

    def _title(self) -> str:
        return (
            f"meshes of {count(self.ranks, 'rank')}, {self.tokens:,} tokens a call,"
            f" {self.memory_gb:g} GB a GPU"
        )

    def _rows(self, fitting: Sequence[MeshPoint]) -> Table:
        head = ["mesh", "memory", "step, ms", "tokens/s a GPU", "exposed", "of BF16's step"]
        rows = []
        for point in fitting:
            step, us = point.step, _parts_us(point.step)
            rows.append(
                [
                    point.candidate.mesh,
                    byte_count(point.memory),
                    f"{step.us.centre / 1e3:,.0f}",
                    point.speed(self.tokens).text(",.0f"),
                    f"{us['exposed communication'] / sum(us.values()):.0%}",
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


def _parts_us(step: StepTime) -> dict[str, float]:
    """Returns the µs of each part of `_COLORS`."""
    sums = dict.fromkeys(_COLORS, 0.0)
    for part, us in step.works[0].parts(step.links, step.rates).items():
        sums["exposed communication" if part.startswith("exposed") else _DRAWN.get(part, "rest")] += us
    return sums
