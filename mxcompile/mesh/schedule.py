"""Pipeline schedules: the order in which a rank runs its stages on micro-batches, and the resulting time.

    GPipe             all forwards, then all backwards
    1F1B              ranks − rank forwards, then backwards and forwards alternate
    Interleaved1F1B   the same with two stages per rank: stage s is on rank s mod ranks

With equal stages, n micro-batches and p ranks of v stages, the bubble takes (p − 1) / (v n + p − 1) of the
time. Names and orders follow `torch.distributed.pipelining`. A micro-batch waits for the activations of the
previous stage; sending takes no time on the sender.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mxcompile.errors import OptionError, not_allowed, shown

GPIPE, ONE_F_ONE_B, INTERLEAVED = "GPipe", "1F1B", "Interleaved1F1B"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)
_INTERLEAVED_STAGES = 2

Action = tuple[str, int, int]
"""A computation: ("F" or "B", stage, micro-batch)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Timeline:
    """A simulated schedule. us: from the first start to the last end. busy: µs of computation by rank."""

    us: float
    busy: tuple[float, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """A pipeline schedule. name: one of `SCHEDULES`. ranks: size of the axis pp. microbatches: in a step."""

    name: str
    ranks: int
    microbatches: int

    @staticmethod
    def parse(name: str | None, ranks: int, microbatches: int | None) -> Schedule:
        """Returns the schedule called `name`, by default 1F1B with as many micro-batches as ranks.

        Raises `OptionError` for an unknown name or an unsupported number of micro-batches.
        """
        by_lower = {schedule.lower(): schedule for schedule in SCHEDULES}
        chosen = ONE_F_ONE_B if name is None else by_lower.get(name.lower())
        if chosen is None:
            raise OptionError(not_allowed("schedule", name, SCHEDULES))
        count = ranks if microbatches is None else microbatches
        if not isinstance(count, int) or count < 1:
            raise OptionError(f"`microbatches` must be a whole number of at least 1, found {shown(count)}")
        rounds = max(1, count // ranks)
        if chosen == INTERLEAVED and count % rounds:
            raise OptionError(
                f"`microbatches` must be a multiple of {rounds} for {chosen} on {ranks} ranks, found {count}"
            )
        return Schedule(name=chosen, ranks=ranks, microbatches=count)

    @property
    def stages(self) -> int:
        """Number of stages on all ranks."""
        return self.ranks * (_INTERLEAVED_STAGES if self.name == INTERLEAVED else 1)

    def of_rank(self, rank: int) -> range:
        """Returns the stages of `rank`."""
        return range(rank, self.stages, self.ranks)

    def order(self, rank: int) -> list[Action]:
        """Returns the computations of `rank` in order."""
        steps = len(self.of_rank(rank)) * self.microbatches
        warmup = min(self._warmup(rank), steps)
        forwards = list(self._passes(rank, "F"))
        backwards = list(self._passes(rank, "B"))
        steady = [action for pair in zip(forwards[warmup:], backwards, strict=False) for action in pair]
        return [*forwards[:warmup], *steady, *backwards[steps - warmup :]]

    def _warmup(self, rank: int) -> int:
        """Returns the number of forwards that `rank` runs before forwards and backwards alternate."""
        match self.name:
            case "GPipe":
                return self.microbatches
            case "1F1B":
                return self.ranks - 1 - rank
        return (_INTERLEAVED_STAGES - 1) * self._round + 2 * (self.ranks - 1 - rank)

    @property
    def _round(self) -> int:
        """Number of consecutive micro-batches in one stage before the rank switches to its other stage."""
        return self.microbatches // max(1, self.microbatches // self.ranks)

    def _passes(self, rank: int, kind: str) -> Iterator[Action]:
        """Yields the forwards or the backwards of `rank` in order."""
        stages = list(self.of_rank(rank))
        stages = stages if kind == "F" else stages[::-1]
        for first in range(0, self.microbatches, self._round):
            for stage in stages:
                yield from ((kind, stage, first + index) for index in range(self._round))

    def in_flight(self, rank: int) -> dict[int, int]:
        """Returns, by stage of `rank`, the micro-batches in flight when their sum is largest."""
        counts = dict.fromkeys(self.of_rank(rank), 0)
        most = dict(counts)
        for kind, stage, _ in self.order(rank):
            counts[stage] += 1 if kind == "F" else -1
            most = dict(counts) if sum(counts.values()) > sum(most.values()) else most
        return most

    def run(
        self, forward_us: Sequence[float], backward_us: Sequence[float], send_us: float = 0.0
    ) -> Timeline:
        """Simulates a step. Each pass takes the µs of its stage, and each transfer takes `send_us`."""
        pending = [self.order(rank) for rank in range(self.ranks)]
        free, busy = [0.0] * self.ranks, [0.0] * self.ranks
        ends: dict[Action, float] = {}
        while any(pending):
            for rank, actions in enumerate(pending):
                while actions and (begin := self._ready(actions[0], ends, send_us)) is not None:
                    action = actions.pop(0)
                    us = (forward_us if action[0] == "F" else backward_us)[action[1]]
                    free[rank] = max(free[rank], begin) + us
                    busy[rank] += us
                    ends[action] = free[rank]
        return Timeline(us=max(free), busy=tuple(busy))

    def _ready(self, action: Action, ends: dict[Action, float], send_us: float) -> float | None:
        """Returns the time at which the inputs of `action` have arrived; None if it is not known yet."""
        kind, stage, batch = action
        last = self.stages - 1
        if kind == "F":
            needed = None if stage == 0 else ("F", stage - 1, batch)
        else:
            needed = ("F", last, batch) if stage == last else ("B", stage + 1, batch)
        if needed is None:
            return 0.0
        sent = 0.0 if kind == "B" and stage == last else send_us
        return ends[needed] + sent if needed in ends else None
