"""`sweep_meshes`: one rank of each mesh of a number of ranks, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from tqdm import tqdm

from mxcompile.analysis.explain.rank import explain_rank
from mxcompile.analysis.explain.rank_tracer import BF16
from mxcompile.compiler.options import Options
from mxcompile.errors import MXCompileError, OptionError
from mxcompile.lowering.targets import TARGETS
from mxcompile.mesh.links import NODE, Links
from mxcompile.mesh.sweep import MeshCandidate, MeshPoint, MeshSweep, candidates
from mxcompile.ranks.built import Factory
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

    model, parallel, links, node, target, policy, training: as `explain` has them; a factory takes meshes with
    the axes ``dp`` and ``tp``. args, kwargs: of one call, which all ranks along ``tp`` share. memory_gb: of a
    GPU in 10⁹ bytes, by the target if it is not given.

    A mesh that cannot be explained is kept with its reason. Raises `OptionError` for links, a target or ranks
    that are not valid.
    """
    options = Options.parse(None, {"policy": policy, "target": target, "strict": False})
    Links.parse(links, node=NODE if node is None else node)
    if memory_gb is None:
        memory_gb = _memory_gb(options.target)
    asked: dict[str, Any] = {
        "options": options,
        "training": training,
        "links": links,
        "node": node,
        "others": (BF16,),
    }
    meshes = list(candidates(ranks, parallel, NODE if node is None else node))
    points = [
        _point(model, args, kwargs or {}, candidate, asked)
        for candidate in tqdm(meshes, desc="meshes", unit="mesh", disable=None, leave=False)
    ]
    explained = [point.rank for point in points if point.rank is not None]
    tokens = max((tokens_of(rank.report.gemms) for rank in explained), default=0)
    return MeshSweep(points=tuple(points), ranks=ranks, tokens=tokens, memory_gb=memory_gb)


def _memory_gb(target: str) -> float:
    chip = TARGETS.get(target)
    if chip is None or chip.peak is None:
        raise OptionError(f"the memory of {target} is not known: give it, such as --memory 180")
    return chip.peak.memory_gb


def _point(
    model: nn.Module | Factory,
    args: Sequence[Any],
    kwargs: Mapping[str, Any],
    candidate: MeshCandidate,
    asked: Mapping[str, Any],
) -> MeshPoint:
    try:
        rank = explain_rank(model, args, kwargs, mesh=candidate.mesh, parallel=candidate.parallel, **asked)
    except MXCompileError as error:
        return MeshPoint(candidate=candidate, reason=str(error))
    return MeshPoint(candidate=candidate, rank=rank)
