"""`explain_rank`: one rank of a mesh, on any machine; `sweep_meshes`: all meshes of a number of ranks.

    model or factory ─▶ fake ranks ─▶ parallelised ─▶ rank's copy on fake tensors ─▶ traced as by `explain`

The user's own code parallelises the model on a fake process group, so the trace is what rank 0 of the real
run would compile. FSDP2's communication between compiled graphs follows from its parameter groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.explain.explainer import options_for
from mxcompile.analysis.explain.rank_tracer import BF16, FP8, RankTracer
from mxcompile.analysis.explain.sweep import advised
from mxcompile.compiler.rehearsal import apart, some_or_all
from mxcompile.compiler.session.options import Options
from mxcompile.errors import MXCompileError, OptionError
from mxcompile.lowering.targets import TARGETS
from mxcompile.mesh.collectives import Axes
from mxcompile.mesh.links import NODE, Links
from mxcompile.mesh.pipeline import Pipeline
from mxcompile.mesh.report import RankReport
from mxcompile.mesh.schedule import Schedule
from mxcompile.mesh.shards import shards, unmatched
from mxcompile.mesh.sweep import MeshCandidate, MeshPoint, MeshSweep, candidates
from mxcompile.mesh.time import StepTime
from mxcompile.models.arguments import ModelInput
from mxcompile.offline.rates import Rates
from mxcompile.offline.record_work import estimate
from mxcompile.plan.repeats import LeaveOut
from mxcompile.policy import Policy
from mxcompile.ranks.built import Factory, named_inputs, rank_model
from mxcompile.ranks.shape import PIPELINE, MeshShape
from mxcompile.report import Part, Report
from mxcompile.report.forms.words import tokens_of
from mxcompile.rules import check_mistakes


def explain_rank(
    model: nn.Module | Factory,
    *args: Any,
    mesh: str,
    parallel: str | None = None,
    policy: Policy | str | dict[str, Any] | None = None,
    target: str = "auto",
    training: bool = True,
    strict: bool = True,
    links: str | None = None,
    node: int | None = None,
    schedule: str | None = None,
    microbatches: int | None = None,
    kwargs: Mapping[str, Any] | None = None,
    **inputs: ModelInput,
) -> RankReport:
    """Returns the graphs, traffic and memory of rank 0 of a mesh, which need not exist.

    Args:
        model: A plain module, parallelised as in `parallel`; or a function that takes the `DeviceMesh`,
            parallelises a model itself and returns (model, args, kwargs) of one rank.
        *args: Positional arguments of a plain module on one rank.
        mesh: Axes and sizes, such as ``dp=128,tp=8``. An axis ``pp`` has the stages of a pipeline.
        parallel: Ways to parallelise a plain module: ``fsdp``, ``ep``, ``tp=llama``, several with commas.
        policy: Policy as in the backend's option.
        target: Target of the compile; "auto" is the device of a plain module.
        training: Whether to trace forward and backward, else forward only.
        strict: Whether a rule that matches no layer is an error.
        links: Link speeds for an estimate of the time of a step, such as ``nvlink=900,net=50``, in 10⁹ bytes
            per second and direction of a GPU.
        node: Number of GPUs that NVLink joins, by default 8.
        schedule: Schedule of a pipeline, by default 1F1B.
        microbatches: Micro-batches per step of a pipeline, by default the number of ranks along ``pp``.
        kwargs: Keyword arguments of a plain module that are also options of this function.
        **inputs: Keyword arguments of a plain module (see `models.arguments`).

    Returns:
        The report of the rank.

    Raises:
        OptionError: For an unknown keyword, an invalid mesh, `parallel` or `links`, and in a process that
            already has a process group.
        ModelError: If the model cannot be traced.
        PolicyError: As for `explain`.
    """
    named, shape = named_inputs("explain_rank", locals()), MeshShape.parse(mesh)
    options = options_for(model, policy=policy, target=target, strict=strict)
    speeds = None if links is None and node is None else _links(links, node, options.target)
    ranks, order = dict(zip(shape.names, shape.sizes, strict=True)).get(PIPELINE, 1), None
    if ranks > 1:
        order = Schedule.parse(schedule, ranks, microbatches)
    elif schedule is not None or microbatches is not None:
        word = "microbatches" if schedule is None else "schedule"
        raise OptionError(f"`{word}` needs a pipeline: give the mesh an axis {PIPELINE}, such as pp=4,dp=8")
    arguments = model, args, named, shape, parallel
    return apart(partial(_rank_report, arguments, options, speeds, order, training=training))


def sweep_meshes(
    model: nn.Module | Factory,
    *args: Any,
    ranks: int,
    links: str,
    target: str,
    parallel: str | None = None,
    policy: Any = None,
    training: bool = True,
    node: int | None = None,
    memory_gb: float | None = None,
    kwargs: Mapping[str, Any] | None = None,
) -> MeshSweep:
    """Compares the meshes of a number of ranks by the time per token; see `mesh.sweep`.

    Args:
        model: As for `explain_rank`. A factory must accept meshes with the axes ``dp`` and ``tp``.
        *args: Positional arguments of one call, which all ranks along ``tp`` share.
        ranks: Number of ranks.
        links: Link speeds as for `explain_rank`.
        target: Target with known rates.
        parallel: As for `explain_rank`.
        policy: Policy as in the backend's option.
        training: Whether to trace forward and backward, else forward only.
        node: Number of GPUs that NVLink joins, by default 8.
        memory_gb: Memory of a GPU in 10⁹ bytes, by default the target's.
        kwargs: Keyword arguments of the call.

    Returns:
        All meshes. A mesh that cannot be explained has the reason instead of a report.

    Raises:
        OptionError: For invalid links, target or number of ranks.
    """
    options = options_for(model, policy=policy, target=target, strict=False)
    speeds, peak = _links(links, node, options.target), TARGETS[options.target].peak
    if memory_gb is None:
        assert peak is not None, "links need a target with a data sheet"
        memory_gb = peak.memory_gb

    def point(candidate: MeshCandidate) -> MeshPoint:
        arguments = model, args, kwargs or {}, MeshShape.parse(candidate.mesh), candidate.parallel
        try:
            rank = apart(partial(_rank_report, arguments, options, speeds, others=(BF16,), training=training))
        except MXCompileError as error:
            return MeshPoint(candidate=candidate, reason=str(error))
        return MeshPoint(candidate=candidate, rank=rank)

    meshes = list(candidates(ranks, parallel, speeds.node))
    points = tuple(map(point, tqdm(meshes, desc="meshes", unit="mesh", disable=None, leave=False)))
    tokens = max((tokens_of(p.rank.report.gemms) for p in points if p.rank is not None), default=0)
    return MeshSweep(points=points, ranks=ranks, tokens=tokens, memory_gb=memory_gb)


def _rank_report(
    arguments: tuple[nn.Module | Factory, Sequence[Any], Mapping[str, Any], MeshShape, str | None],
    options: Options,
    speeds: Links | None,
    order: Schedule | None = None,
    others: Sequence[Policy] = (FP8, BF16),
    *,
    training: bool,
) -> RankReport:
    """Returns the report of rank 0 of a mesh, in the process that `apart` started.

    arguments: arguments of `rank_model`. others: further policies in the estimate of the time.
    """
    with rank_model(*arguments) as here:
        axes = Axes(here.mesh)

        def tracing(options: Options) -> tuple[RankTracer, list[Part]]:
            def traced(leave_out: LeaveOut) -> tuple[RankTracer, list[Part]]:
                rank = RankTracer(here.model, here.groups, options, training, leave_out, axes, order)
                return rank, rank.run(here.args, dict(here.kwargs))

            return some_or_all(here.model, traced)

        rank, parts = tracing(options)
        here.check(sends=any(rank.collectives()))
        plan = rank.whole(here.plain, here.args, here.kwargs)
        report = Report.from_parts(parts, target=options.target, policy=options.policy.title)
        memories = rank.memories(here.model)
        numbers, slowest, step = range(len(memories)), len(memories) - 1, None
        if speeds is not None:
            chip = TARGETS[options.target]
            mine = options.policy.label
            runs = (other for other in others if not other.quantizes or chip.fp8_tiles)
            beside = [other for other in runs if mine not in (BF16.label, other.label)]
            traced = (rank, *(tracing(replace(options, policy=other))[0] for other in beside))
            works = [[run.work(number, memories[number].gradients) for number in numbers] for run in traced]
            rates = speeds.rates(Rates.for_target(chip))
            slowest = max(numbers, key=lambda number: works[0][number].us(speeds, rates))
            step = StepTime.from_works([by_rank[slowest] for by_rank in works], speeds, chip)
        sent = rank.work(slowest).sent
    check_mistakes(options.policy, plan.records(options.policy), strict=options.strict)
    shape = arguments[3]
    return RankReport(
        mesh=str(shape),
        ranks=shape.ranks,
        report=advised(estimate(report)),
        shards=tuple(shards(report.gemms, plan.by_name, options.policy, here.experts)),
        collectives=sent,
        memory=max(memories, key=lambda memory: memory.total),
        time=step,
        pipeline=None if rank.stages is None else Pipeline.from_stages(rank.stages, memories, slowest),
        warnings=(*unmatched(report.gemms, plan.by_name), *rank.unreduced()),
    )


def _links(links: str | None, node: int | None, target: str) -> Links:
    """Returns the user's links. Raises `OptionError` for invalid links or a target with unknown rates."""
    if links is None:
        raise OptionError("`node` needs the speeds of links: give `links`, such as nvlink=900,net=50")
    chip = TARGETS.get(target)
    if chip is None or chip.peak is None:
        names = ", ".join(name for name, row in TARGETS.items() if row.peak is not None)
        raise OptionError(f"`links` needs a target with a data sheet, found {target}; allowed: {names}")
    return Links.parse(links, node=NODE if node is None else node)
