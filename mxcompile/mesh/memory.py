"""The bytes that one rank of a mesh holds in a training step, at the peak of each phase.

    parameters   this rank's shards, and buffers; always
    optimizer    two states per trained parameter in its dtype, as in AdamW; always
    gradients    one per trained parameter, in its sharding and dtype: from backward to the optimizer step
    gathered     unsharded tensors of FSDP2: the weights of groups that stay unsharded after forward; of other
                 groups, the weights in use, and the gather buffer or the next group's weights; whole
                 gradients until their group is reduced; the reduction buffer of the last group
    saved        tensors that forward keeps for backward (MX copies among them) until backward has read them
    working      all other tensors of the graphs (see `liveness`); after forward, logits and their gradient

The walk goes through forward and backward node by node, because peaks of different parts occur at different
times. It leaves out: workspaces of operators, a loss outside the model, memory that the allocator caches, and
network buffers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from mxcompile.distributed.tensors import local_bytes
from mxcompile.mesh.liveness import GraphLiveness, LivenessPoint
from mxcompile.ranks.fsdp import FSDPGroup, prefetched


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBreakdown:
    """Bytes beside parameters and optimizer states. The module docstring defines the fields."""

    gradients: int = 0
    gathered: int = 0
    saved: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        """Sum of all fields."""
        return self.gradients + self.gathered + self.saved + self.working


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes on one rank by category. The module docstring defines the categories.

    saved: bytes saved by all layers between forward and backward. forward, backward: breakdown at the peak of
    each phase. loss: breakdown between them.
    """

    parameters: int
    gradients: int = 0
    optimizer: int = 0
    saved: int = 0
    forward: MemoryBreakdown = MemoryBreakdown()
    loss: MemoryBreakdown = MemoryBreakdown()
    backward: MemoryBreakdown = MemoryBreakdown()

    @property
    def update(self) -> MemoryBreakdown:
        """Breakdown at the optimizer step."""
        return MemoryBreakdown(gradients=self.gradients)

    @property
    def total(self) -> int:
        """Bytes at the peak of the step."""
        phases = (self.forward, self.loss, self.backward, self.update)
        return self.parameters + self.optimizer + max(phase.total for phase in phases)


def memory(
    model: nn.Module,
    groups: Sequence[FSDPGroup],
    graphs: Sequence[tuple[GraphLiveness, int]],
    reached: Collection[str],
    *,
    training: bool,
) -> Memory:
    """Returns the memory of a rank that holds `model`, whose parameters FSDP2 shards in `groups`.

    graphs: (liveness, number of runs in a step) of each graph that the rank compiles, in execution order.
    reached: paths of modules and parameters that backward reaches.
    """
    trained = sum(map(local_bytes, (p for p in model.parameters() if p.requires_grad))) if training else 0
    step = _Walk(groups, graphs, reached)
    return Memory(
        parameters=sum(map(local_bytes, (*model.parameters(), *model.buffers()))),
        gradients=trained,
        optimizer=2 * trained,
        saved=sum(graph.saved * times for graph, times in graphs),
        forward=max(step.forward(), key=lambda breakdown: breakdown.total, default=MemoryBreakdown()),
        loss=step.loss(),
        backward=max(step.backward(), key=lambda breakdown: breakdown.total, default=MemoryBreakdown()),
    )


class _Walk:
    """A walk through the graphs of a step in execution order, with FSDP2's buffers."""

    def __init__(
        self,
        groups: Sequence[FSDPGroup],
        graphs: Sequence[tuple[GraphLiveness, int]],
        reached: Collection[str],
    ) -> None:
        self._groups = {group.path: group for group in groups}
        self._reached = {group.path for group in groups if group.is_reached(reached)}
        self._prefetched = prefetched(groups, self._reached)
        self._ungathered_bytes = sum(weight_bytes(group) for group in groups if group.backward is None)
        self._graphs = graphs

    def forward(self) -> Iterator[MemoryBreakdown]:
        before = 0
        for graph, times in self._graphs:
            for moment in graph.forward:
                group = self._group(moment.path)
                gathered = self._ungathered_bytes + self._gathered(group, group, 1)
                saved = before + (times - 1) * graph.saved + moment.saved
                yield MemoryBreakdown(gathered=gathered, saved=saved, working=moment.working)
            before += times * graph.saved

    def loss(self) -> MemoryBreakdown:
        """Returns the memory after the loss has computed the gradient of the results."""
        saved = sum(times * graph.saved for graph, times in self._graphs)
        results = sum(graph.results for graph, _ in self._graphs[-1:])
        return MemoryBreakdown(gathered=self._ungathered_bytes, saved=saved, working=2 * results)

    def backward(self) -> Iterator[MemoryBreakdown]:
        """Yields the memory at each node of backward, and at each FSDP2 reduction."""
        saved = sum(times * graph.saved for graph, times in self._graphs)
        reduction = _Reduction(self._groups)
        for graph, times in reversed(self._graphs):
            saved -= times * graph.saved
            yield from self._backward(graph, saved + (times - 1) * graph.saved, reduction)

    def _backward(
        self, graph: GraphLiveness, others: int, reduction: _Reduction
    ) -> Iterator[MemoryBreakdown]:
        """Yields the memory during the backward of one graph. others: bytes saved by other graphs."""
        moments = graph.backward
        around = [self._group(moment.path) for moment in moments]
        groups = [g if g is not None and g.path in self._reached else None for g in around]
        following = self._following(groups)
        ends = {id(group): index for index, group in enumerate(groups)}
        layers = {moment.layer: index for index, moment in enumerate(moments) if moment.layer}
        rests = reduction.rests(moments)
        for index, (moment, group, ahead) in enumerate(zip(moments, groups, following, strict=True)):
            reduction.take(moment)
            gathered = self._ungathered_bytes + self._gathered(group, ahead, moment.times)
            for saved, rest in ((moment.saved, 0), (moment.last, rests.get(moment.layer, 0))):
                yield MemoryBreakdown(
                    gradients=reduction.done + rest,
                    gathered=gathered + reduction.buffers(group if rest else None),
                    saved=others + saved,
                    working=moment.working,
                )
            if group is not None and ends[id(group)] == index:
                freed = weight_bytes(group) if group.backward is None else 0
                reduction.finish(group)
                yield MemoryBreakdown(
                    gradients=reduction.done + rests.get(moment.layer, 0),
                    gathered=self._ungathered_bytes
                    - freed
                    + reduction.reducing
                    + (0 if ahead is None else weight_bytes(ahead)),
                    saved=others + moment.last,
                    working=moment.working,
                )
            if layers.get(moment.layer) == index:
                reduction.done += rests.get(moment.layer, 0)

    def _group(self, path: str) -> FSDPGroup | None:
        """Returns the innermost FSDP2 group around the module at `path`, if any."""
        while path and path not in self._groups:
            path = path.rpartition(".")[0]
        return self._groups.get(path)

    def _following(self, groups: Sequence[FSDPGroup | None]) -> list[FSDPGroup | None]:
        """Returns, for each of the active `groups`, the group that FSDP2 gathers next."""
        result: list[FSDPGroup | None] = []
        ahead = now = None
        for group in reversed(groups):
            if group is not None and group.backward is not None and group is not now:
                frozen = self._groups.get(self._prefetched.get(group.path, ""))
                ahead, now = now if frozen is None or frozen.backward is None else frozen, group
            result.append(ahead if group is now else now)
        return result[::-1]

    def _gathered(self, group: FSDPGroup | None, ahead: FSDPGroup | None, times: int) -> int:
        """Returns the weight bytes of the active group, if FSDP2 frees it, and of the next group."""
        if group is None or group.backward is None:
            return 0 if ahead is None else weight_bytes(ahead)
        return weight_bytes(group) + weight_bytes(group if times > 1 or ahead is None else ahead)


class _Reduction:
    """Gradients in backward: whole gradients of unfinished groups, gradient shards of finished groups.

    done: bytes of gradients that stay until the optimizer step. reducing: bytes during the latest reduction.
    """

    def __init__(self, groups: Mapping[str, FSDPGroup]) -> None:
        self._owners = {parameter.path: group for group in groups.values() for parameter in group.parameters}
        self._shards = {
            p.path: local_bytes(p.parameter) for group in groups.values() for p in group.parameters
        }
        self._whole: defaultdict[int, int] = defaultdict(int)
        self._arrived: defaultdict[int, int] = defaultdict(int)
        self._buffer = 0
        self.done = 0
        self.reducing = 0

    def take(self, moment: LivenessPoint) -> None:
        """Adds the gradients that `moment` completes, for one of the equal layers."""
        for path, size in moment.gradients:
            owner = self._owners.get(path)
            if owner is None:
                self.done += size
            else:
                self._whole[id(owner)] += size
                self._arrived[id(owner)] += self._shards[path]

    def rests(self, moments: Sequence[LivenessPoint]) -> dict[str, int]:
        """Returns the gradient bytes of all other equal layers by the layer that represents them."""
        rests: defaultdict[str, int] = defaultdict(int)
        for moment in moments:
            if moment.layer:
                per_layer = sum(self._shards.get(path, size) for path, size in moment.gradients)
                rests[moment.layer] += (moment.times - 1) * per_layer
        return rests

    def buffers(self, before: FSDPGroup | None = None) -> int:
        """Returns the bytes of whole gradients and of the larger buffer: `before`'s or the last group's."""
        last = self._buffer if before is None else max(self._buffer, reduced_bytes(before))
        return sum(self._whole.values()) + last

    def finish(self, group: FSDPGroup) -> None:
        """Reduces `group`: copies its whole gradients into a buffer, from which the shards are written."""
        self._buffer = reduced_bytes(group)
        self.reducing = self.buffers()
        self._whole.pop(id(group), None)
        self.done += self._arrived.pop(id(group), 0)


def weight_bytes(group: FSDPGroup) -> int:
    """Returns the bytes of the unsharded weights of `group`."""
    return group.ranks * sum(parameter.travels for parameter in group.parameters)


def reduced_bytes(group: FSDPGroup) -> int:
    """Returns the bytes of the buffer in which FSDP2 reduces the gradients of `group`."""
    if group.reduced is None:
        return 0
    trained = [parameter for parameter in group.parameters if parameter.parameter.requires_grad]
    return group.ranks * group.reduced.itemsize * sum(parameter.numel for parameter in trained)
