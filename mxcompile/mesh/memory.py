"""The bytes that one rank of a mesh holds in a training step, at the peak of each phase.

    parameters   this rank's shards, and buffers; always
    optimizer    two values for each trained one, in its dtype, as AdamW keeps them; always
    gradients    of what is trained, in the same shards and dtypes: from backward to the optimizer
    gathered     what FSDP2 holds whole: groups that it does not free; of the others the weights at hand, and
                 the buffer they came in or the next ones; gradients until their group is done, and the
                 buffer in which the last group was reduced
    saved        what forward keeps for backward, MX copies among it, as far as backward has not read it
    working      what else the graphs hold at that time (see `live`); after forward its results, the logits,
                 with their gradient

Forward and backward are walked node by node, so that what does not exist at one time is not added up. Not in
it: what operators need for themselves, a loss outside of the model, what the allocator keeps, and buffers of
the network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from torch import nn

from mxcompile.distributed.tensors import local_bytes
from mxcompile.mesh.liveness import GraphLiveness, LivenessPoint
from mxcompile.ranks.fsdp import FSDPGroup


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBreakdown:
    """Bytes beside parameters and the optimizer's values; see this module's text."""

    gradients: int = 0
    gathered: int = 0
    saved: int = 0
    working: int = 0

    @property
    def total(self) -> int:
        """Their sum."""
        return self.gradients + self.gathered + self.saved + self.working


@dataclass(frozen=True, kw_only=True, slots=True)
class Memory:
    """Bytes that a rank holds, by what they are for; see this module's text.

    saved: by all layers, between forward and backward. forward, backward: at the peak of each. loss: between
    them.
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
        """At the optimizer's step."""
        return MemoryBreakdown(gradients=self.gradients)

    @property
    def total(self) -> int:
        """Bytes at the peak of the step."""
        held = (self.forward, self.loss, self.backward, self.update)
        return self.parameters + self.optimizer + max(each.total for each in held)


def memory(
    model: nn.Module,
    groups: Sequence[FSDPGroup],
    graphs: Sequence[tuple[GraphLiveness, int]],
    *,
    training: bool,
) -> Memory:
    """The memory of a rank that holds `model`, of which FSDP2 shards `groups`.

    graphs: that the rank compiles, in the order in which they first run, each with how often it runs.
    """
    trained = sum(map(local_bytes, (p for p in model.parameters() if p.requires_grad))) if training else 0
    step = _Walk(groups, graphs)
    return Memory(
        parameters=sum(map(local_bytes, (*model.parameters(), *model.buffers()))),
        gradients=trained,
        optimizer=2 * trained,
        saved=sum(one.saved * times for one, times in graphs),
        forward=max(step.forward(), key=lambda held: held.total, default=MemoryBreakdown()),
        loss=step.loss(),
        backward=max(step.backward(), key=lambda held: held.total, default=MemoryBreakdown()),
    )


class _Walk:
    """A walk through the graphs of a step, one after the other, with what FSDP2 holds meanwhile."""

    def __init__(self, groups: Sequence[FSDPGroup], graphs: Sequence[tuple[GraphLiveness, int]]) -> None:
        self._groups = {group.path: group for group in groups}
        self._kept = sum(weight_bytes(group) for group in groups if group.again is None)
        self._graphs = graphs

    def forward(self) -> Iterator[MemoryBreakdown]:
        """The bytes at each moment of forward."""
        before = 0
        for graph, times in self._graphs:
            for moment in graph.forward:
                group = self._groups.get(self._path(moment.path))
                gathered = self._kept + self._gathered(group, group, 1)
                saved = before + (times - 1) * graph.saved + moment.saved
                yield MemoryBreakdown(gathered=gathered, saved=saved, working=moment.working)
            before += times * graph.saved

    def loss(self) -> MemoryBreakdown:
        """The bytes when the loss of the results has made their gradient."""
        saved = sum(times * graph.saved for graph, times in self._graphs)
        results = sum(graph.results for graph, _ in self._graphs[-1:])
        return MemoryBreakdown(gathered=self._kept, saved=saved, working=2 * results)

    def backward(self) -> Iterator[MemoryBreakdown]:
        """The bytes at each moment of backward, and where FSDP2 reduces."""
        saved = sum(times * graph.saved for graph, times in self._graphs)
        reduction = _Reduction(self._groups)
        for graph, times in reversed(self._graphs):
            saved -= times * graph.saved
            yield from self._backward(graph, saved + (times - 1) * graph.saved, reduction)

    def _backward(
        self, graph: GraphLiveness, others: int, reduction: _Reduction
    ) -> Iterator[MemoryBreakdown]:
        """The same of one graph. others: bytes that other graphs have saved."""
        moments = graph.backward
        following = self._following(moments)
        groups = [self._groups.get(self._path(moment.path)) for moment in moments]
        ends = {id(group): place for place, group in enumerate(groups)}
        layers = {moment.layer: place for place, moment in enumerate(moments) if moment.layer}
        rests = reduction.rests(moments)
        for place, (moment, group, ahead) in enumerate(zip(moments, groups, following, strict=True)):
            reduction.take(moment)
            gathered = self._kept + self._gathered(group, ahead, moment.times)
            for saved, rest in ((moment.saved, 0), (moment.last, rests.get(moment.layer, 0))):
                yield MemoryBreakdown(
                    gradients=reduction.done + rest,
                    gathered=gathered + reduction.buffers(group if rest else None),
                    saved=others + saved,
                    working=moment.working,
                )
            if group is not None and ends[id(group)] == place:
                own = weight_bytes(group) if group.again is None else 0
                reduction.finish(group)
                yield MemoryBreakdown(
                    gradients=reduction.done + rests.get(moment.layer, 0),
                    gathered=self._kept
                    - own
                    + reduction.reducing
                    + (0 if ahead is None else weight_bytes(ahead)),
                    saved=others + moment.last,
                    working=moment.working,
                )
            if layers.get(moment.layer) == place:
                reduction.done += rests.get(moment.layer, 0)

    def _path(self, path: str) -> str:
        """The path of the innermost group around the module at `path`; "" is the root's, or none."""
        while path and path not in self._groups:
            path = path.rpartition(".")[0]
        return path

    def _following(self, moments: Sequence[LivenessPoint]) -> list[FSDPGroup | None]:
        """For each of `moments` the group that is gathered next."""
        result: list[FSDPGroup | None] = []
        ahead = now = None
        for moment in reversed(moments):
            group = self._groups.get(self._path(moment.path))
            if group is not None and group.again is not None and group is not now:
                ahead, now = now, group
            result.append(ahead if group is now else now)
        return result[::-1]

    def _gathered(self, group: FSDPGroup | None, ahead: FSDPGroup | None, times: int) -> int:
        """Bytes of weights of the group at hand, if it is freed after forward, and of the next one's."""
        if group is None or group.again is None:
            return 0 if ahead is None else weight_bytes(ahead)
        return weight_bytes(group) + weight_bytes(group if times > 1 or ahead is None else ahead)


class _Reduction:
    """Gradients in backward: whole ones of groups that are not done, and shards of those that are.

    done: bytes of gradients that stay. reducing: bytes while the group is reduced that was finished last.
    """

    def __init__(self, groups: Mapping[str, FSDPGroup]) -> None:
        self._owners = {one.path: group for group in groups.values() for one in group.parameters}
        self._shards = {
            one.path: local_bytes(one.parameter) for group in groups.values() for one in group.parameters
        }
        self._whole: defaultdict[int, int] = defaultdict(int)
        self._arrived: defaultdict[int, int] = defaultdict(int)
        self._buffer = 0
        self.done = 0
        self.reducing = 0

    def take(self, moment: LivenessPoint) -> None:
        """The gradients that `moment` completes, of one of equal layers."""
        for path, size in moment.born:
            owner = self._owners.get(path)
            if owner is None:
                self.done += size
            else:
                self._whole[id(owner)] += size
                self._arrived[id(owner)] += self._shards[path]

    def rests(self, moments: Sequence[LivenessPoint]) -> dict[str, int]:
        """By layer that stands for others: bytes of the gradients of the others."""
        rests: defaultdict[str, int] = defaultdict(int)
        for moment in moments:
            if moment.layer:
                each = sum(self._shards.get(path, size) for path, size in moment.born)
                rests[moment.layer] += (moment.times - 1) * each
        return rests

    def buffers(self, before: FSDPGroup | None = None) -> int:
        """Bytes of whole gradients, and of the buffer in which the group `before` was, or the last one."""
        last = self._buffer if before is None else max(self._buffer, reduced_bytes(before))
        return sum(self._whole.values()) + last

    def finish(self, group: FSDPGroup) -> None:
        """All of `group` has its gradients: they are copied into a buffer, and shards come out of it."""
        self._buffer = reduced_bytes(group)
        self.reducing = self.buffers()
        self._whole.pop(id(group), None)
        self.done += self._arrived.pop(id(group), 0)


def weight_bytes(group: FSDPGroup) -> int:
    """Bytes of the whole weights of `group`."""
    return group.ranks * sum(one.travels for one in group.parameters)


def reduced_bytes(group: FSDPGroup) -> int:
    """Bytes of the buffer in which gradients of `group` are reduced."""
    if group.reduced is None:
        return 0
    trained = [one for one in group.parameters if one.parameter.requires_grad]
    return group.ranks * group.reduced.itemsize * sum(one.numel for one in trained)
