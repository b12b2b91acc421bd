"""The assignment of a model's modules to pipeline stages.

Repeated blocks are split in order, as in torchtitan: the modules before the blocks and the modules after them
count as one block each, so the first and the last stage have one block less.
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
    """Returns the number of blocks in each of `stages` ≥ 2. Raises `OptionError` if one would be empty."""
    per_stage, more = divmod(blocks + _ENDS, stages)
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
