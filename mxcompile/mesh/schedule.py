"""The stages of a pipeline, and the order and time in which its ranks run them on micro-batches.

    GPipe             all forwards, then all backwards
    1F1B              ranks − rank forwards, then backwards and forwards alternate
    Interleaved1F1B   the same with two stages per rank: stage s is on rank s mod ranks

With equal stages, n micro-batches and p ranks of v stages, the bubble takes (p − 1) / (v n + p − 1) of the
time. Names and orders follow `torch.distributed.pipelining`. A micro-batch waits for the activations of the
previous stage; sending takes no time on the sender.

Repeated blocks are split in order, as in torchtitan: the modules before the blocks and the modules after them
count as one block each, so the first and the last stage have one block less.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from torch import Tensor, fx

from mxcompile.errors import ModelError, OptionError, not_allowed, shown
from mxcompile.graph.tags import bytes_of
from mxcompile.mesh.collectives import SEND, Collective
from mxcompile.models.blocks import Blocks
from mxcompile.models.names import module_of
from mxcompile.ranks.fsdp import FSDPGroup
from mxcompile.ranks.shape import PIPELINE

GPIPE, ONE_F_ONE_B, INTERLEAVED = "GPipe", "1F1B", "Interleaved1F1B"
SCHEDULES = (GPIPE, ONE_F_ONE_B, INTERLEAVED)
_INTERLEAVED_STAGES = 2

Action = tuple[str, int, int]
"""A computation: ("F" or "B", stage, micro-batch)."""


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
    ) -> tuple[float, list[float]]:
        """Simulates a step. Each pass takes the µs of its stage, and each transfer takes `send_us`.

        Returns the µs from the first start to the last end, and the µs of computation by rank.
        """
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
        return max(free), busy

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


def split(blocks: int, stages: int) -> tuple[int, ...]:
    """Returns the number of blocks in each of `stages` ≥ 2. Raises `OptionError` if one would be empty."""
    per_stage, more = divmod(blocks + 2, stages)  # the modules at both ends count as a block each
    sizes = [per_stage + (stage < more) for stage in range(stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    if min(sizes) < 1:
        raise OptionError(
            f"a pipeline of {stages} stages needs at least a block for each, found {blocks}: use fewer stages"
        )
    return tuple(sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The stages of a model. sizes: number of blocks in each stage. blocks: blocks of the model.

    `record_forward` fills two fields. before: modules outside of blocks that run before them. sent: (bytes,
    dtype) of tensors that a block passes to another block.
    """

    schedule: Schedule
    sizes: tuple[int, ...]
    blocks: Blocks
    before: set[str] = field(default_factory=set)
    sent: list[tuple[int, str]] = field(default_factory=list)

    @staticmethod
    def from_schedule(schedule: Schedule, blocks: Blocks) -> Stages:
        """Returns the stages of a model with `blocks`. Raises `ModelError` unless they form one stack."""
        stacks = {path.rpartition(".")[0] for path in blocks.places}
        if len(stacks) != 1:
            raise ModelError(f"a pipeline needs a model with one stack of blocks, found {len(stacks)}")
        return Stages(schedule=schedule, sizes=split(len(blocks.places), schedule.stages), blocks=blocks)

    def record_forward(self, forward: fx.Graph) -> None:
        """Records which modules of `forward` run before the blocks, and the tensors passed between blocks."""
        paths = {node: module_of(node)[0] for node in forward.nodes if node.op == "call_function"}
        inside = {node: self.blocks.position(path) for node, path in paths.items()}
        if not self.sent:
            head = itertools.takewhile(lambda node: inside[node] is None, paths)
            self.before.update(paths[node] for node in head if paths[node])
        for node, block in inside.items():
            others = (inside.get(user) for user in node.users)
            if block is not None and any(other not in (None, block) for other in others):
                value = node.meta.get("val")
                if isinstance(value, Tensor):
                    self.sent.append((bytes_of(value), str(value.dtype).removeprefix("torch.")))

    def sends(self, rank: int, stride: int, training: bool) -> Iterator[Collective]:
        """Yields the transfers of `rank` for one micro-batch. stride: distance to the next pipeline rank."""
        size, dtype = max(self.sent, default=(0, ""))
        for stage in self.schedule.of_rank(rank):
            ways = (("forward", stage + 1), ("backward", stage - 1))
            for phase, other in ways[: 2 if training else 1]:
                if 0 <= other < self.schedule.stages:
                    yield Collective(
                        kind=SEND,
                        what="activations",
                        name=f"to stage {other}",
                        dtype=dtype,
                        num_bytes=size,
                        without_bytes=size,
                        axis=PIPELINE,
                        ranks=2,
                        stride=stride,
                        phase=phase,
                    )

    def stage(self, path: str) -> int:
        """Returns the stage of the module at `path`."""
        block = self.blocks.position(path)
        if block is None:
            return 0 if path in self.before else len(self.sizes) - 1
        return bisect_right(list(itertools.accumulate(self.sizes)), block.number)

    def counting(self, stage: int, others: Callable[[str], Iterable[str]]) -> Callable[[str], int]:
        """Returns a function that counts the layers of `stage` among a path and its `others`."""
        return lambda path: sum(self.stage(copy) == stage for copy in (path, *others(path)))

    def groups(self, groups: Iterable[FSDPGroup], rank: int) -> tuple[FSDPGroup, ...]:
        """Returns the FSDP2 `groups`, restricted to the parameters on pipeline rank `rank`."""
        parts = (
            replace(group, parameters=tuple(p for p in group.parameters if self.has(rank, p.path)))
            for group in groups
        )
        return tuple(part for part in parts if part.parameters)

    def has(self, rank: int, path: str) -> bool:
        """Whether pipeline rank `rank` has the parameter at `path`."""
        return self.stage(path.rpartition(".")[0]) in self.schedule.of_rank(rank)
