"""`explain_rank`, `sweep_meshes`: one rank of a mesh, or of each mesh of a number of ranks, without a mesh.

    model or factory ─▶ fake ranks ─▶ parallelised ─▶ rank's copy on fake tensors ─▶ traced as by `explain`

The user's own code parallelises the model on a fake process group, so what is traced is what rank 0 of the
run would compile. What FSDP2 does between compiled graphs follows from its groups.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.explain.advice import advised
from mxcompile.analysis.explain.rank_tracer import BF16, FP8, RankTracer
from mxcompile.analysis.explain.tracer import options_for
from mxcompile.compiler.options import Options
from mxcompile.compiler.rehearsal import apart, some_or_all
from mxcompile.errors import MXCompileError, OptionError
from mxcompile.lowering.targets import TARGETS, Target
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
from mxcompile.offline.roofline import estimate
from mxcompile.plan.plan import Plan
from mxcompile.plan.repeats import LeaveOut
from mxcompile.policy import Policy
from mxcompile.ranks.built import Factory, RankModel, named_inputs, rank_model
from mxcompile.ranks.shape import PIPELINE, MeshShape
from mxcompile.report import Part, Report
from mxcompile.report.forms.words import tokens_of
from mxcompile.rules import check_mistakes

RankArguments = tuple[nn.Module | Factory, Sequence[Any], Mapping[str, Any], MeshShape, str | None]
"""What `rank_model` takes."""


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
    """Returns what rank 0 of a mesh would compile, send and hold. The mesh need not exist.

    Args:
        model: A plain module, parallelised in the ways that `parallel` names; or a function of the
            `DeviceMesh` that parallelises a model itself and returns (model, args, kwargs) of one rank.
        *args: What a plain module is called with on one rank.
        **inputs: Named arguments of a plain module (see `models.arguments`).
        kwargs: The same, for names that are options of this function.
        mesh: Axes and sizes, such as ``dp=128,tp=8``. An axis ``pp`` has the stages of a pipeline.
        parallel: Ways to parallelise a plain module, ``fsdp``, ``ep``, ``tp=llama``, several with commas.
        policy: As the backend's option.
        target: What to compile for; "auto" is the device of a plain module.
        training: Forward and backward, else forward only.
        strict: A rule that matches no layer is an error.
        links: Estimates the time of a step with these links, such as ``nvlink=900,net=50``, in 10⁹ bytes a
            second each way of a GPU.
        node: How many GPUs NVLink joins, 8 if it is not given.
        schedule: The order in which the stages of a pipeline run, 1F1B if it is not given.
        microbatches: How many a step of a pipeline has, as many as ranks along ``pp`` if it is not given.

    Raises:
        OptionError: For a keyword that neither this function nor the model takes, for a mesh, ways or links
            that are not valid, and in a process that has a process group.
        ModelError: If the model cannot be traced.
        PolicyError: As `explain`.
    """
    given: dict[str, Any] = {"policy": policy, "target": target, "strict": strict}
    own = {**given, "training": training, "mesh": mesh, "parallel": parallel, "links": links, "node": node}
    own |= {"schedule": schedule, "microbatches": microbatches}
    named = named_inputs("explain_rank", model, mesh, args, inputs, kwargs, own)
    options, shape = options_for(model, **given), MeshShape.parse(mesh)
    speeds = None if links is None and node is None else _links(links, node, options.target)
    order = _schedule(shape, schedule, microbatches)
    return _rank_report((model, args, named, shape, parallel), options, speeds, order, training=training)


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
    """The meshes of `ranks` ranks that fit, sorted by the time of a token; see `mesh.sweep`.

    model, parallel, links, node, target, policy, training: as `explain_rank` has them; a factory takes meshes
    with the axes ``dp`` and ``tp``. args, kwargs: of one call, which all ranks along ``tp`` share. memory_gb:
    of a GPU in 10⁹ bytes, by the target if it is not given.

    A mesh that cannot be explained is kept with its reason. Raises `OptionError` for links, a target or ranks
    that are not valid.
    """
    options = options_for(model, policy=policy, target=target, strict=False)
    if memory_gb is None:
        chip = TARGETS.get(options.target)
        if chip is None or chip.peak is None:
            raise OptionError(f"the memory of {options.target} is not known: give it, such as --memory 180")
        memory_gb = chip.peak.memory_gb
    speeds = _links(links, node, options.target)

    def point(candidate: MeshCandidate) -> MeshPoint:
        given = model, args, kwargs or {}, MeshShape.parse(candidate.mesh), candidate.parallel
        try:
            rank = _rank_report(given, options, speeds, others=(BF16,), training=training)
        except MXCompileError as error:
            return MeshPoint(candidate=candidate, reason=str(error))
        return MeshPoint(candidate=candidate, rank=rank)

    meshes = list(candidates(ranks, parallel, speeds.node))
    points = tuple(map(point, tqdm(meshes, desc="meshes", unit="mesh", disable=None, leave=False)))
    tokens = max((tokens_of(each.rank.report.gemms) for each in points if each.rank is not None), default=0)
    return MeshSweep(points=points, ranks=ranks, tokens=tokens, memory_gb=memory_gb)


def _rank_report(
    given: RankArguments,
    options: Options,
    speeds: Links | None,
    order: Schedule | None = None,
    others: Sequence[Policy] = (FP8, BF16),
    *,
    training: bool,
) -> RankReport:
    """The report of rank 0 of a mesh. others: policies beside that of `options` in the time of a step."""
    report, plan = apart(partial(_traced, given, options, speeds, order, others, training=training))
    check_mistakes(options.policy, plan.records(options.policy), strict=options.strict)
    return report


def _traced(
    given: RankArguments,
    options: Options,
    speeds: Links | None,
    order: Schedule | None,
    others: Sequence[Policy],
    *,
    training: bool,
) -> tuple[RankReport, Plan]:
    """The report of a rank, and the plan of the whole model."""
    with rank_model(*given) as here:
        axes = Axes(here.mesh)
        tracing = partial(_of_policy, here, axes, order, training=training)
        rank, parts = tracing(options)
        here.check(sends=any(rank.collectives()))
        plan = rank.whole(here.plain, here.args, here.kwargs)
        report = Report.of(parts, target=options.target, policy=options.policy.label)
        memories = rank.memories(here.model)
        numbers, slowest, step = range(len(memories)), len(memories) - 1, None
        if speeds is not None:
            chip = TARGETS[options.target]
            beside = _beside(options.policy, others, chip)
            traced = (rank, *(tracing(replace(options, policy=each))[0] for each in beside))
            works = [[one.work(number, memories[number].gradients) for number in numbers] for one in traced]
            rates = speeds.rates(Rates.of(chip))
            slowest = max(numbers, key=lambda number: works[0][number].us(speeds, rates))
            step = StepTime.of([each[slowest] for each in works], speeds, chip)
        sent = rank.work(slowest).sent
    shape = given[3]
    explained = RankReport(
        mesh=str(shape),
        ranks=shape.ranks,
        report=advised(estimate(report)),
        shards=tuple(shards(report.gemms, plan.by_name, options.policy, here.experts)),
        collectives=sent,
        memory=max(memories, key=lambda memory: memory.total),
        time=step,
        pipeline=None if rank.stages is None else Pipeline.of(rank.stages, memories, slowest),
        warnings=(*unmatched(report.gemms, plan.by_name), *rank.unreduced()),
    )
    return explained, plan


def _beside(policy: Policy, others: Sequence[Policy], chip: Target) -> list[Policy]:
    """The policies of `others`, BF16 the last, to set beside `policy`: FP8 if `chip` multiplies that."""
    if policy.label == BF16.label:
        return []
    runs = (each for each in others if not each.quantizes or chip.fp8_tiles)
    return [each for each in runs if each.label != policy.label]


def _schedule(shape: MeshShape, name: str | None, microbatches: int | None) -> Schedule | None:
    """The schedule of the pipeline of `shape`. Raises `OptionError` for one that is wrong or of no use."""
    ranks = dict(zip(shape.names, shape.sizes, strict=True)).get(PIPELINE, 1)
    if ranks > 1:
        return Schedule.parse(name, ranks, microbatches)
    for word, value in {"schedule": name, "microbatches": microbatches}.items():
        if value is not None:
            raise OptionError(
                f"`{word}` is of a pipeline: give the mesh an axis {PIPELINE}, such as pp=4,dp=8"
            )
    return None


def _links(links: str | None, node: int | None, target: str) -> Links:
    """The links that a user gave. Raises `OptionError` if they are not valid, or of no use for `target`."""
    if links is None:
        raise OptionError("`node` says which ranks share a link: give `links`, such as nvlink=900,net=50")
    chip = TARGETS.get(target)
    if chip is None or chip.peak is None:
        known = ", ".join(name for name, row in TARGETS.items() if row.peak is not None)
        raise OptionError(f"links need a target whose rates are known: found {target}, allowed are {known}")
    return Links.parse(links, node=NODE if node is None else node)


def _of_policy(
    here: RankModel, axes: Axes, order: Schedule | None, options: Options, *, training: bool
) -> tuple[RankTracer, list[Part]]:
    """The rehearsal of a rank under the policy of `options`, with its parts of the report."""

    def traced(leave_out: LeaveOut) -> tuple[RankTracer, list[Part]]:
        rank = RankTracer(here.model, here.groups, options, training, leave_out, axes, order)
        return rank, rank.run(here.args, dict(here.kwargs))

    return some_or_all(here.model, traced)
