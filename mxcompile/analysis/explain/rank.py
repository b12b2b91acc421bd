"""`explain_rank`: the report of one rank of a mesh, on a machine that has no mesh.

    model or factory ─▶ fake ranks ─▶ parallelised ─▶ rank's copy on fake tensors ─▶ traced as by `explain`

The user's own code parallelises the model on a fake process group, so what is traced is what rank 0 of the
run would compile. What FSDP2 does between compiled graphs follows from its groups.
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx, nn

from mxcompile.analysis.explain.advice import advised
from mxcompile.analysis.explain.roofline import estimate
from mxcompile.analysis.explain.tracer import Explainer
from mxcompile.compiler.capture import Capture
from mxcompile.compiler.options import Options
from mxcompile.compiler.plans import no_plan, planned
from mxcompile.errors import ModelError, MXCompileError, OptionError
from mxcompile.lowering.targets import TARGETS
from mxcompile.mesh.collectives import Axes, Collective, of_graph, of_groups
from mxcompile.mesh.copied import rank_copy
from mxcompile.mesh.fsdp import FSDPGroup, groups
from mxcompile.mesh.links import NODE, Links
from mxcompile.mesh.memory import memory
from mxcompile.mesh.parallel import parallelised
from mxcompile.mesh.partial import backward, of_partial_gradients, partial_parameters, result_bytes
from mxcompile.mesh.report import RankReport
from mxcompile.mesh.shape import MeshShape, fake_ranks
from mxcompile.mesh.shards import shards, unmatched
from mxcompile.mesh.time import BACKWARD, FORWARD, RankWork, StepTime
from mxcompile.offline.graph_work import Works, works
from mxcompile.plan.plan import Plan
from mxcompile.plan.repeats import LeaveOut, some_or_all
from mxcompile.policy import Policy
from mxcompile.report import Part, Report
from mxcompile.report.fold import spelled
from mxcompile.rules import check_mistakes

Factory = Callable[..., Any]
"""Makes (model, args, kwargs), parallelised on the mesh that it is given if it takes one."""

_BF16 = Policy.preset("bf16")
"""The policy that others are compared with."""


def explain_rank(
    model: nn.Module | Factory,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mesh: str,
    parallel: str | None,
    options: Options,
    training: bool,
    links: str | None = None,
    node: int | None = None,
) -> RankReport:
    """The report of rank 0 of `mesh`, such as ``dp=128,tp=8``.

    model: a plain module, parallelised in the ways that `parallel` names (see `mesh.parallel`), called with
    `args` and `kwargs`, one rank's; or a factory of (model, args, kwargs), whose own code parallelises.
    options: with a target; "auto" has to be resolved. links, node: as `explain` has them.

    Raises `OptionError` for a mesh, ways or links that are not valid, or if this process has a process group,
    and otherwise as `explain`.
    """
    shape = MeshShape.parse(mesh)
    speeds = _links(links, node, options.target)
    with fake_ranks(shape) as device_mesh:
        if not isinstance(model, nn.Module):
            model, args, kwargs = _called(model, device_mesh)
        if parallel is not None:
            model = parallelised(model, parallel, device_mesh)
        shared, axes = groups(model), Axes(device_mesh)
        if not shared and not _has_shards(model):
            raise ModelError(
                f"{type(model).__name__} is not parallelised: name a way, such as --parallel fsdp, or call"
                " fully_shard or parallelize_module in a factory that takes the mesh"
            )
        tracing = partial(_of_policy, model, shared, axes, args, kwargs, training=training)
        rank, parts = tracing(options)
        plan = rank.whole(args, kwargs)
        report = Report.of(parts, target=options.target, policy=options.policy.label)
        held = memory(model, shared, report, training=training)
        fsdp = tuple(of_groups(shared, axes, training=training))
        sent = (*fsdp, *rank.collectives())
        step = None
        if speeds is not None:
            works = [rank.work(fsdp, held.gradients)]
            if options.policy.label != _BF16.label:
                plain, _ = tracing(replace(options, policy=_BF16))
                works.append(plain.work(fsdp, held.gradients))
            step = StepTime.of(works, speeds, TARGETS[options.target])
    check_mistakes(options.policy, plan.records(options.policy), strict=options.strict)
    return RankReport(
        mesh=str(shape),
        ranks=shape.ranks,
        report=advised(estimate(report)),
        shards=tuple(shards(report.gemms, plan.by_name, options.policy)),
        collectives=sent,
        memory=held,
        time=step,
        warnings=(*unmatched(report.gemms, plan.by_name), *rank.unreduced()),
    )


def _links(links: str | None, node: int | None, target: str) -> Links | None:
    """The links that a user gave. Raises `OptionError` for some that are not valid, or of no use."""
    if links is None:
        if node is not None:
            raise OptionError("node says which ranks share a link: give links, such as nvlink=900,net=50")
        return None
    chip = TARGETS.get(target)
    if chip is None or chip.peak is None:
        known = ", ".join(name for name, row in TARGETS.items() if row.peak is not None)
        raise OptionError(f"links need a target whose rates are known: found {target}, allowed are {known}")
    return Links.parse(links, node=NODE if node is None else node)


def _of_policy(
    model: nn.Module,
    shared: tuple[FSDPGroup, ...],
    axes: Axes,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    options: Options,
    *,
    training: bool,
) -> tuple[_Rank, list[Part]]:
    """The rehearsal of a rank under the policy of `options`, with its parts of the report."""
    return some_or_all(
        model,
        lambda leave_out: _traced(_Rank(model, shared, options, training, leave_out, axes), args, kwargs),
    )


def _called(factory: Factory, mesh: Any) -> tuple[nn.Module, Sequence[Any], Mapping[str, Any]]:
    """The model of `factory` with its arguments, made on the meta device."""
    try:
        with torch.device("meta"):
            result = factory(mesh) if _takes_mesh(factory) else factory()
    except MXCompileError:
        raise
    except Exception as error:  # of the user's code, whatever it is
        name = getattr(factory, "__name__", str(factory))
        raise ModelError(f"factory {name} on fake ranks: {type(error).__name__}: {error}") from error
    match result:
        case (nn.Module() as model, tuple() | list() as args, dict() as kwargs):
            return model, args, kwargs
    raise ModelError(f"the factory returned {type(result).__name__}, not (model, args, kwargs)")


def _takes_mesh(factory: Factory) -> bool:
    """Whether `factory` has to be given something, which is the mesh."""
    parameters = inspect.signature(factory).parameters.values()
    return any(parameter.default is inspect.Parameter.empty for parameter in parameters)


def _has_shards(model: nn.Module) -> bool:
    from torch.distributed.tensor import DTensor

    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def _traced(rank: _Rank, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[_Rank, list[Part]]:
    return rank, rank.run(args, dict(kwargs))


class _Rank(Explainer):
    """The rehearsal of one rank, which keeps the collectives of its graphs."""

    def __init__(
        self,
        model: nn.Module,
        sharded: tuple[FSDPGroup, ...],
        options: Options,
        training: bool,
        leave_out: LeaveOut,
        axes: Axes,
    ) -> None:
        super().__init__(model, options, training, leave_out, partial(rank_copy, sharded))
        self._axes = axes
        self._groups = sharded
        self._sent: dict[int, tuple[Capture, tuple[Collective, ...]]] = {}
        self._calls: Counter[int] = Counter()
        self._works: dict[int, dict[str, Works]] = {}
        self._results = 0

    def after(self, capture: Capture, graph: fx.Graph) -> None:
        self._sent[id(capture)] = capture, self._of(graph, FORWARD)
        self._works[id(capture)] = {FORWARD: self._launched(graph)}

    def parted(self, capture: Capture, forward: fx.Graph, backward: fx.Graph) -> None:
        sent = self._of(forward, FORWARD) + self._of(backward, BACKWARD)
        self._sent[id(capture)] = capture, sent
        sides = {FORWARD: forward, BACKWARD: backward}
        self._works[id(capture)] = {phase: self._launched(graph) for phase, graph in sides.items()}

    def _launched(self, graph: fx.Graph) -> Works:
        return Works() if self.target.peak is None else works(graph, self.target, self.repeats.count)

    def _of(self, graph: fx.Graph, phase: str) -> tuple[Collective, ...]:
        return tuple(of_graph(graph, self._axes, phase, self.repeats.others))

    def graph(
        self, capture: Capture, gm: fx.GraphModule, example_inputs: Sequence[Any]
    ) -> Callable[..., Any]:
        run = super().graph(capture, gm, example_inputs)

        def counted(*inputs: Any) -> Any:
            self._calls[id(capture)] += 1
            return run(*inputs)

        return counted

    def call(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        output = super().call(args, kwargs)
        if self.training:
            self._results = result_bytes(output)
            with self.mode, self.mode.outside.paused():
                backward(output)
        return output

    def collectives(self) -> Iterator[Collective]:
        """The collectives of every graph, as often as it runs, and of partial gradients under FSDP2."""
        gathered = {one.path for group in self._groups for one in group.parameters}
        for one in of_partial_gradients(self.model, self._axes):
            for path in (one.name, *self.repeats.others(one.name)):
                if path in gathered:
                    yield replace(one, name=path)
        for key, (_, sent) in self._sent.items():
            for _ in range(max(1, self._calls[key])):
                yield from sent

    def work(self, fsdp: Sequence[Collective], gradients: int) -> RankWork:
        """The work of this rank. fsdp: the collectives of FSDP2. gradients: bytes on this rank."""
        sides: dict[str, Works] = {FORWARD: Works(), BACKWARD: Works()}
        for key, phases in self._works.items():
            for phase, launched in phases.items():
                for entry, times in launched.items():
                    sides[phase][entry] += times * max(1, self._calls[key])
        return RankWork(
            policy=self.options.policy.label,
            works=sides,
            collectives=(*fsdp, *self.collectives()),
            wire=self.options.policy.label != _BF16.label,
            logits=self._results,
            gradients=gradients,
        )

    def unreduced(self) -> Iterator[str]:
        """A warning about partial gradients that FSDP2 does not reduce."""
        gathered = {one.path for group in self._groups for one in group.parameters}
        paths = [path for path, _ in partial_parameters(self.model) if path not in gathered]
        if paths:
            yield (
                f"gradients of {spelled(paths)} are partial sums on each rank, which backward does not"
                " reduce; what the optimizer sends for them is not counted"
            )

    def whole(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Plan:
        """The plan of the model without its mesh, with all layers. Raises `ModelError` if there is none."""
        planning = planned(self.model, args, kwargs)
        if planning.plan is None:
            raise ModelError(no_plan(self.model, planning.missing))
        tags = self.repeats.expanded(planning.plan.tags)
        return replace(
            planning.plan, tags=tuple(replace(tag, block=self.repeats.blocks.place(tag.name)) for tag in tags)
        )
