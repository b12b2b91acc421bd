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
from mxcompile.errors import ModelError, MXCompileError
from mxcompile.mesh.collectives import Axes, Collective, of_graph, of_groups
from mxcompile.mesh.copied import rank_copy
from mxcompile.mesh.fsdp import FSDPGroup, groups
from mxcompile.mesh.memory import memory
from mxcompile.mesh.parallel import parallelised
from mxcompile.mesh.partial import backward, of_partial_gradients, partial_parameters
from mxcompile.mesh.report import RankReport
from mxcompile.mesh.shape import MeshShape, fake_ranks
from mxcompile.mesh.shards import shards, unmatched
from mxcompile.plan.plan import Plan
from mxcompile.plan.repeats import LeaveOut, some_or_all
from mxcompile.report import Part, Report
from mxcompile.report.fold import spelled
from mxcompile.rules import check_mistakes

Factory = Callable[..., Any]
"""Makes (model, args, kwargs), parallelised on the mesh that it is given if it takes one."""


def explain_rank(
    model: nn.Module | Factory,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    *,
    mesh: str,
    parallel: str | None,
    options: Options,
    training: bool,
) -> RankReport:
    """The report of rank 0 of `mesh`, such as ``dp=128,tp=8``.

    model: a plain module, parallelised in the ways that `parallel` names (see `mesh.parallel`), called with
    `args` and `kwargs`, one rank's; or a factory of (model, args, kwargs), whose own code parallelises.
    options: with a target; "auto" has to be resolved.

    Raises `OptionError` for a mesh or ways that are not valid, or if this process has a process group, and
    otherwise as `explain`.
    """
    shape = MeshShape.parse(mesh)
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
        rank, parts = some_or_all(
            model,
            lambda leave_out: _traced(_Rank(model, shared, options, training, leave_out, axes), args, kwargs),
        )
        plan = rank.whole(args, kwargs)
        report = Report.of(parts, target=options.target, policy=options.policy.label)
        held = memory(model, shared, report, training=training)
        sent = (*of_groups(shared, axes, training=training), *rank.collectives())
    check_mistakes(options.policy, plan.records(options.policy), strict=options.strict)
    return RankReport(
        mesh=str(shape),
        ranks=shape.ranks,
        report=advised(estimate(report)),
        shards=tuple(shards(report.gemms, plan.by_name, options.policy)),
        collectives=sent,
        memory=held,
        warnings=(*unmatched(report.gemms, plan.by_name), *rank.unreduced()),
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

    def after(self, capture: Capture, graph: fx.Graph) -> None:
        self._sent[id(capture)] = capture, self._of(graph, "forward")

    def parted(self, capture: Capture, forward: fx.Graph, backward: fx.Graph) -> None:
        sent = self._of(forward, "forward") + self._of(backward, "backward")
        self._sent[id(capture)] = capture, sent

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
