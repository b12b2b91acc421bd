"""The plans of this process: one for a model, made when its first part is compiled.

A model that Dynamo hands over in one graph needs none: that graph shows all there is.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mxcompile.compiler.decompositions import table
from mxcompile.compiler.frames import Frame
from mxcompile.compiler.session.session import Planned, session_of
from mxcompile.errors import ModelError
from mxcompile.models.names import user_path
from mxcompile.plan.plan import Plan, make_plan

log = logging.getLogger(__name__)


def plan_of(root: nn.Module | None, frame: Frame, matrices: Iterable[str]) -> Planned:
    """The plan of `root`, a call of which leads to `frame`; made if there is none yet.

    matrices: paths of the matrices that are read here. If the plan's call did not read one of them, the
    layers that the present call adds are added to the plan: what it knows stays as it is.
    """
    if root is None:
        return Planned(missing="not part of a module")
    session = session_of(root)
    known = session.planned
    if known is not None and (known.plan is None or not _lacks(known.plan, root, matrices)):
        return known
    call = frame.call_of(root)
    if call is None:
        return known or Planned(missing=f"no call of {type(root).__name__} leads here")
    if known is None or known.plan is None:
        return planned(root, call.args, call.kwargs)
    more, plan = _made(root, call.args, call.kwargs).plan, known.plan
    if more is not None and not plan.differentiated:
        more, plan = plan, more
    session.planned = Planned(plan=plan.with_more(more, matrices))
    return session.planned


def _lacks(plan: Plan, root: nn.Module, matrices: Iterable[str]) -> bool:
    """Whether another call of `root` shows more than `plan`: reads other parameters, or has a backward."""
    return bool(_owned(root, set(matrices) - plan.read)) or torch.is_grad_enabled() > plan.differentiated


def _owned(root: nn.Module, paths: set[str]) -> set[str]:
    """Returns the ones of `paths` that a plan of `root` may know; a shared parameter has one there."""
    return paths.intersection(user_path(raw) for raw, _ in root.named_parameters()) if paths else paths


def no_plan(root: nn.Module, missing: str) -> str:
    """Returns the reason why `root` has no plan."""
    return f"{type(root).__name__} has no plan, so its parts decide for themselves: {missing}"


def planned(root: nn.Module, args: Any, kwargs: Any) -> Planned:
    """The plan of `root`, called with `args` and `kwargs`; made if there is none yet."""
    session = session_of(root)
    session.planned = session.planned or _made(root, args, kwargs)
    return session.planned


def layers_of_call(root: nn.Module, args: Any, kwargs: Any) -> frozenset[str] | None:
    """Returns the names of the layers that `root` runs, called so; None if tensors' values decide it."""
    try:
        plan = make_plan(root, args, kwargs, table(), whole=True)
    except ModelError as error:
        log.info("which layers %s runs is not known: %s", type(root).__name__, error)
        return None
    return None if plan.guess else frozenset(plan.by_name)


def _made(root: nn.Module, args: Any, kwargs: Any) -> Planned:
    start = time.perf_counter()
    try:
        plan = make_plan(root, args, kwargs, table())
    except ModelError as error:
        return Planned(missing=str(error))
    took_s = time.perf_counter() - start
    log.info("planned %s: %d GEMMs in %.1f s", type(root).__name__, len(plan.tags), took_s)
    return Planned(plan=plan)
