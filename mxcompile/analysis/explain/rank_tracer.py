"""`RankTracer`: the rehearsal of one rank of a mesh, or of all stages of a pipeline.

It collects the collectives, the work and the liveness of every graph.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from torch import fx, nn

from mxcompile.analysis.explain.explainer import Explainer
from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.session.options import Options
from mxcompile.compiler.session.session import no_plan, planned
from mxcompile.errors import ModelError
from mxcompile.mesh import collectives
from mxcompile.mesh.collectives import Axes, Collective
from mxcompile.mesh.liveness import GraphLiveness, live
from mxcompile.mesh.memory import Memory, memory
from mxcompile.mesh.pipeline import rank_memory
from mxcompile.mesh.schedule import Schedule, Stages
from mxcompile.mesh.time import BACKWARD, FORWARD, PHASES, RankWork, Waits
from mxcompile.models.names import module_of, user_path
from mxcompile.offline.graph_work import Works, works
from mxcompile.plan.plan import Plan
from mxcompile.plan.repeats import LeaveOut
from mxcompile.policy import Policy
from mxcompile.ranks.built import rank_copy
from mxcompile.ranks.fsdp import FSDPGroup
from mxcompile.ranks.shape import PIPELINE
from mxcompile.report.data.fold import spelled

BF16, FP8 = Policy.preset("bf16"), Policy.preset("fp8_tensor")
"""Reference policies of the time estimates."""


class RankTracer(Explainer):
    """Rehearses the compile of one rank; records collectives, work and liveness of its graphs."""

    def __init__(
        self,
        model: nn.Module,
        sharded: tuple[FSDPGroup, ...],
        options: Options,
        training: bool,
        leave_out: LeaveOut,
        axes: Axes,
        order: Schedule | None,
    ) -> None:
        super().__init__(model, options, training, leave_out, partial(rank_copy, sharded))
        self._axes = axes
        self._groups = sharded
        self._gathered = {entry.path for group in sharded for entry in group.parameters}
        self._sent: dict[int, tuple[Capture, tuple[Collective, ...]]] = {}
        self._calls: Counter[int] = Counter()
        self.stages = None if order is None else Stages.from_schedule(order, self.repeats.blocks)
        self._works: dict[int, dict[str, tuple[Works, ...]]] = {}
        self._live: dict[int, GraphLiveness] = {}
        self._results = 0
        self._reached: set[str] = set()

    def after(self, capture: Capture, graph: fx.Graph) -> None:
        """Records an inference graph. A joint graph is recorded after it is partitioned."""
        if self.stages is not None and not self.training:
            self.stages.record_forward(graph)
        self._record_capture(capture, graph)

    def parted(self, capture: Capture, forward: fx.Graph, backward: fx.Graph) -> None:
        """Records the forward and the backward graph."""
        if self.stages is not None:
            self.stages.record_forward(forward)
        self._record_capture(capture, forward, backward)

    def _record_capture(self, capture: Capture, forward: fx.Graph, backward: fx.Graph | None = None) -> None:
        sides = {FORWARD: forward} if backward is None else {FORWARD: forward, BACKWARD: backward}
        sent: list[Collective] = []
        for phase, graph in sides.items():
            sent += collectives.of_graph(graph, self._axes, phase, self.repeats.others)
        self._sent[id(capture)] = capture, tuple(sent)
        stages = self._layers.values() if self.target.peak is not None else ()
        self._works[id(capture)] = {
            phase: tuple(+works(graph, self.target, layers) for layers in stages)
            for phase, graph in sides.items()
        }
        self._live[id(capture)] = live(forward, backward, capture.inputs, self.repeats)
        if backward is not None:  # without forward's nodes, which it may repeat
            self._reach(module_of(n)[0] for n in backward.nodes if "fwd_nn_module_stack" in n.meta)

    def _reach(self, paths: Iterable[str]) -> None:
        """Records `paths` of modules and parameters that backward reaches."""
        for path in {*paths}:
            self._reached |= {path, *self.repeats.others(path)}

    @property
    def _layers(self) -> dict[int, Callable[[str], int]]:
        """By stage, a function from a module's path to the number of equal layers in the stage."""
        if self.stages is None:
            return {0: self.repeats.count}
        counting = partial(self.stages.counting, others=self.repeats.others)
        return {stage: counting(stage) for stage in range(self.stages.schedule.stages)}

    def graph(
        self, capture: Capture, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        """Returns the traced graph with a counter of its calls."""
        run = super().graph(capture, gm, example_inputs)

        def counted(*inputs: Any) -> Any:
            self._calls[id(capture)] += 1
            return run(*inputs)

        return counted

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """Runs forward, and backward when training, which shows the partial gradients."""
        output = super().call(args, kwargs)
        if self.training:
            self._results = collectives.result_bytes(output)
            with self.mode, self.mode.outside.paused():
                collectives.backward(output)
            named = self.model.named_parameters()
            self._reach(user_path(path) for path, parameter in named if parameter.grad is not None)
        return output

    def collectives(self) -> Iterator[Collective]:
        """Yields the collectives of every call of a graph, and of partial gradients that FSDP2 reduces."""
        for reduction in collectives.of_partial_gradients(self.model, self._axes):
            for path in (reduction.name, *self.repeats.others(reduction.name)):
                if path in self._gathered:
                    yield replace(reduction, name=path)
        for key, (_, sent) in self._sent.items():
            for _ in range(max(1, self._calls[key])):
                yield from sent

    def memories(self, model: nn.Module) -> list[Memory]:
        """Returns the memory of each pipeline rank with its part of `model`; one entry without a pipeline."""
        graphs = [(graph, max(1, self._calls[key])) for key, graph in self._live.items()]
        stages = self.stages
        if stages is None:
            return [memory(model, self._groups, graphs, self._reached, training=self.training)]
        if any(calls > 1 for _, calls in graphs):
            raise ModelError(
                "a pipeline needs blocks that are traced in one graph, found graph breaks: remove them"
                " (TORCH_LOGS=graph_breaks shows them)"
            )
        lives = [graph for graph, _ in graphs]
        return [
            rank_memory(
                model, stages.groups(self._groups, rank), lives, stages, rank, self._layers, self.training
            )
            for rank in range(stages.schedule.ranks)
        ]

    def work(self, rank: int = 0, gradients: int = 0) -> RankWork:
        """Returns the work of pipeline rank `rank`. gradients: bytes of gradients on this rank."""
        stages = self.stages
        stage_ids = (0,) if stages is None else stages.schedule.of_rank(rank)
        groups = self._groups if stages is None else stages.groups(self._groups, rank)
        last, sends, waits = True, list[Collective](), None
        if stages is not None:
            last, stride = stages.schedule.stages - 1 in stage_ids, self._axes.strides[PIPELINE]
            sends += stages.sends(rank, stride, self.training)
            send = next(stages.sends(0, stride, self.training))
            waits = Waits(schedule=stages.schedule, rank=rank, stages=self._stage_works, send=send)
        return RankWork(
            policy=self.options.policy.label,
            works={phase: sum((self._work(i, phase) for i in stage_ids), Works()) for phase in PHASES},
            collectives=(
                *collectives.of_groups(groups, self._axes, self._reached),
                *(activation for stage in stage_ids for activation in self._activations(stage)),
                *sends,
            ),
            wire=self.options.policy.label != BF16.label,
            logits=self._results if last else 0,
            gradients=gradients,
            microbatches=1 if stages is None else stages.schedule.microbatches,
            waits=waits,
        )

    def _work(self, stage: int, phase: str) -> Works:
        total = Works()
        for key, phases in self._works.items():
            for launched in phases.get(phase, ())[stage : stage + 1]:
                total += Works({entry: times * max(1, self._calls[key]) for entry, times in launched.items()})
        return total

    def _activations(self, stage: int) -> list[Collective]:
        stages = self.stages
        return [c for c in self.collectives() if stages is None or stages.stage(c.name) == stage]

    @cached_property
    def _stage_works(self) -> tuple[RankWork, ...]:
        """The work of a micro-batch in each stage."""
        label = self.options.policy.label
        return tuple(
            RankWork(
                policy=label,
                works={phase: self._work(stage, phase) for phase in PHASES},
                collectives=tuple(self._activations(stage)),
                wire=label != BF16.label,
            )
            for stage in self._layers
        )

    def unreduced(self) -> Iterator[str]:
        """Yields a warning about partial gradients that FSDP2 does not reduce."""
        paths = [path for path, _ in collectives.partial_parameters(self.model) if path not in self._gathered]
        if paths:
            yield (
                f"gradients of {spelled(paths)} are partial sums on each rank, which backward does not"
                " reduce; bytes that the optimizer sends for them are not counted"
            )

    def whole(self, plain: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
        """Returns the plan of the whole model without its mesh. Raises `ModelError` if there is none.

        plain: the model before `parallel` is applied, or as its own code parallelised it.
        """
        planning = planned(plain, args, kwargs)
        if planning.plan is None:
            raise ModelError(no_plan(plain, planning.missing))
        tags = self.repeats.expanded(planning.plan.tags)
        blocks = self.repeats.blocks
        return replace(planning.plan, tags=tuple(replace(t, block=blocks.position(t.name)) for t in tags))
