"""The stages of a pipeline: which of them each module of a model is in.

The repeated blocks are split in turn, as torchtitan does: what comes before them and what comes behind count
as a block each, so the first and the last stage have a block less.
"""

from __future__ import annotations

import itertools
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor, fx

from mxcompile.errors import ModelError, OptionError
from mxcompile.graph.tags import bytes_of
from mxcompile.mesh.collectives import SEND, Collective
from mxcompile.mesh.schedule import Schedule
from mxcompile.models.blocks import Blocks
from mxcompile.models.names import module_of
from mxcompile.ranks.fsdp import FSDPGroup
from mxcompile.ranks.shape import PIPELINE

_ENDS = 2


def split(blocks: int, stages: int) -> tuple[int, ...]:
    """How many of `blocks` each of `stages`, 2 or more, has. Raises `OptionError` if one would have none."""
    each, more = divmod(blocks + _ENDS, stages)
    sizes = [each + (stage < more) for stage in range(stages)]
    sizes[0] -= 1
    sizes[-1] -= 1
    if min(sizes) < 1:
        raise OptionError(f"{stages} stages of a pipeline need a block each, and the model has {blocks}")
    return tuple(sizes)


@dataclass(frozen=True, kw_only=True, slots=True)
class Stages:
    """The stages of a model. sizes: blocks of each. blocks: of the model.

    before: modules outside of blocks that run before them, as `look` has seen them. sent: bytes that blocks
    give to each other, the largest that `look` has seen.
    """

    schedule: Schedule
    sizes: tuple[int, ...]
    blocks: Blocks
    before: set[str] = field(default_factory=set)
    sent: list[tuple[int, str]] = field(default_factory=list)

    @staticmethod
    def of(schedule: Schedule, blocks: Blocks) -> Stages:
        """The stages of a model with `blocks`. Raises `ModelError` unless they are one stack."""
        stacks = {path.rpartition(".")[0] for path in blocks.places}
        if len(stacks) != 1:
            raise ModelError(f"a pipeline splits one stack of blocks, and the model has {len(stacks)}")
        return Stages(schedule=schedule, sizes=split(len(blocks.places), schedule.stages), blocks=blocks)

    def look(self, forward: fx.Graph) -> None:
        """Take from a forward graph what runs before the blocks, and what they send."""
        paths = {node: module_of(node)[0] for node in forward.nodes if node.op == "call_function"}
        inside = {node: self.blocks.place(path) for node, path in paths.items()}
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
        """The activations that `rank` sends for a micro-batch. stride: to the next rank of the pipeline."""
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
        """The stage of the module at `path`."""
        block = self.blocks.place(path)
        if block is None:
            return 0 if path in self.before else len(self.sizes) - 1
        return bisect_right(list(itertools.accumulate(self.sizes)), block.number)

    def counting(self, stage: int, others: Callable[[str], Iterable[str]]) -> Callable[[str], int]:
        """Counts layers of `stage` that the module at a path stands for; others: the paths beside its own."""
        return lambda path: sum(self.stage(each) == stage for each in (path, *others(path)))

    def groups(self, groups: Iterable[FSDPGroup], rank: int) -> tuple[FSDPGroup, ...]:
        """The `groups` of FSDP2 with the parameters that `rank` of the pipeline has."""
        parts = (
            replace(group, parameters=tuple(one for one in group.parameters if self.has(rank, one.path)))
            for group in groups
        )
        return tuple(part for part in parts if part.parameters)

    def has(self, rank: int, path: str) -> bool:
        """Whether `rank` of the pipeline has the parameter at `path`."""
        return self.stage(path.rpartition(".")[0]) in self.schedule.of_rank(rank)
