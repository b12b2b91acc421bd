"""`sweep_meshes`: one rank of each mesh of a number of ranks, side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.explain.rank import links_of, rank_report
from mxcompile.analysis.explain.rank_tracer import BF16
from mxcompile.analysis.explain.tracer import options_for
from mxcompile.errors import MXCompileError, OptionError
from mxcompile.lowering.targets import TARGETS
from mxcompile.mesh.sweep import MeshCandidate, MeshPoint, MeshSweep, candidates
from mxcompile.ranks.built import Factory
from mxcompile.ranks.shape import MeshShape
from mxcompile.report.forms.words import tokens_of


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
    memory_gb = _memory_gb(options.target) if memory_gb is None else memory_gb
    speeds = links_of(links, node, options.target)

    def point(candidate: MeshCandidate) -> MeshPoint:
        given = model, args, kwargs or {}, MeshShape.parse(candidate.mesh), candidate.parallel
        try:
            rank = rank_report(given, options, speeds, others=(BF16,), training=training)
        except MXCompileError as error:
            return MeshPoint(candidate=candidate, reason=str(error))
        return MeshPoint(candidate=candidate, rank=rank)

    meshes = list(candidates(ranks, parallel, speeds.node))
    points = tuple(map(point, tqdm(meshes, desc="meshes", unit="mesh", disable=None, leave=False)))
    tokens = max((tokens_of(each.rank.report.gemms) for each in points if each.rank is not None), default=0)
    return MeshSweep(points=points, ranks=ranks, tokens=tokens, memory_gb=memory_gb)


def _memory_gb(target: str) -> float:
    chip = TARGETS.get(target)
    if chip is None or chip.peak is None:
        raise OptionError(f"the memory of {target} is not known: give it, such as --memory 180")
    return chip.peak.memory_gb
