"""The memory of all ranks of a pipeline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

from mxcompile.distributed.tensors import local_bytes
from mxcompile.mesh.liveness import GraphLiveness
from mxcompile.mesh.memory import Memory, MemoryBreakdown, reduced_bytes, weight_bytes
from mxcompile.mesh.schedule import Schedule, Stages
from mxcompile.models.names import user_path
from mxcompile.ranks.fsdp import FSDPGroup
from mxcompile.report.forms.tables import drawn
from mxcompile.report.forms.words import byte_count, count


@dataclass(frozen=True, kw_only=True, slots=True)
class PipelineRank:
    """A pipeline rank. blocks: number of its blocks. in_flight: micro-batches in flight by stage."""

    blocks: int
    in_flight: tuple[int, ...]
    memory: Memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Pipeline:
    """The ranks of a pipeline. slowest: rank with the longest step; without time estimates, the last rank."""

    schedule: Schedule
    ranks: tuple[PipelineRank, ...]
    slowest: int

    @staticmethod
    def from_stages(stages: Stages, memories: Sequence[Memory], slowest: int) -> Pipeline:
        """Returns the pipeline of `stages` whose ranks hold `memories`."""
        schedule = stages.schedule
        return Pipeline(
            schedule=schedule,
            slowest=slowest,
            ranks=tuple(
                PipelineRank(
                    blocks=sum(stages.sizes[stage] for stage in schedule.of_rank(rank)),
                    in_flight=tuple(schedule.in_flight(rank).values()),
                    memory=memory,
                )
                for rank, memory in enumerate(memories)
            ),
        )

    def __str__(self) -> str:
        schedule = self.schedule
        head = ["rank", "blocks", "in flight", "memory"]
        rows = [
            [str(n), str(rank.blocks), " + ".join(map(str, rank.in_flight)), byte_count(rank.memory.total)]
            for n, rank in enumerate(self.ranks)
        ]
        title = (
            f"pipeline of {count(schedule.ranks, 'rank')}, {schedule.name}, "
            f"micro-batches {schedule.microbatches}; inputs are one micro-batch"
        )
        notes = (
            "rank 0 has the modules before the blocks, the last rank has the head and the loss\n"
            f"collectives and time: rank {self.slowest}, the slowest; memory: rank {self.largest}, the"
            " largest"
        )
        return f"{title}\n{drawn([head, *rows])}\n{notes}"

    @property
    def largest(self) -> int:
        """The rank that holds the most memory."""
        return max(range(len(self.ranks)), key=lambda rank: self.ranks[rank].memory.total)

    def as_data(self) -> dict[str, Any]:
        """Returns the pipeline as data for JSON."""
        return {
            "schedule": self.schedule.name,
            "microbatches": self.schedule.microbatches,
            "slowest": self.slowest,
            "largest": self.largest,
            "ranks": [
                {"blocks": rank.blocks, "in_flight": rank.in_flight, "bytes": rank.memory.total}
                for rank in self.ranks
            ],
        }


def rank_memory(
    model: nn.Module,
    groups: Sequence[FSDPGroup],
    graphs: Sequence[GraphLiveness],
    stages: Stages,
    rank: int,
    layers: Mapping[int, Callable[[str], int]],
    training: bool,
) -> Memory:
    """Returns the memory of `rank` of a pipeline.

    groups: the FSDP2 groups on this rank, which keep whole gradients in the reduction dtype until the last
    micro-batch. layers: by stage, the number of layers of a path.
    """
    parameters = [(path, p) for path, p in model.named_parameters() if stages.has(rank, user_path(path))]
    trained = sum(local_bytes(p) for _, p in parameters if p.requires_grad) if training else 0
    flights = stages.schedule.in_flight(rank) if training else {}
    saved = sum(
        times * size * layers[stage](path)
        for stage, times in flights.items()
        for graph in graphs
        for path, size in graph.kept
    )
    moments = [moment for graph in graphs for moment in (*graph.forward, *graph.backward)]
    working = max(
        (m.working for m in moments if stages.stage(m.path) in stages.schedule.of_rank(rank)), default=0
    )
    freed = sorted((weight_bytes(group) for group in groups if group.backward is not None), reverse=True)
    gathered = sum(map(weight_bytes, groups)) - sum(freed[2:])
    breakdown = MemoryBreakdown(
        gathered=gathered + (sum(map(reduced_bytes, groups)) if training else 0), saved=saved, working=working
    )
    return Memory(
        parameters=sum(local_bytes(p) for _, p in parameters) + sum(map(local_bytes, model.buffers())),
        gradients=trained,
        optimizer=2 * trained,
        saved=saved,
        backward=breakdown if training else MemoryBreakdown(),
        forward=MemoryBreakdown() if training else breakdown,
    )
