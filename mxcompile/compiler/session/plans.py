"""Creates and extends the plan of each model. The first partial graph of a model creates its plan.

A model in a single graph needs no plan, because that graph shows everything.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from mxcompile.compiler.session.decompositions import table
from mxcompile.compiler.session.frames import Frame
from mxcompile.compiler.session.session import Planned, session_of
from mxcompile.errors import ModelError
from mxcompile.models.names import joined, user_path
from mxcompile.plan.plan import Plan, make_plan
from mxcompile.policy import Gemm

log = logging.getLogger(__name__)


def plan_of(root: nn.Module | None, frame: Frame, matrices: Iterable[str]) -> Planned:
    """Returns the plan of `root`, whose running call leads to `frame`; creates it if necessary.

    matrices: paths of the matrices that this graph reads. If the plan lacks one of them, it is extended with
    the layers of the running call; existing entries do not change.
    """
    if root is None:
        return Planned(missing="not part of a module")
    session = session_of(root)
    plans = session.planned
    if plans is not None and (plans.plan is None or not _lacks(plans.plan, root, matrices)):
        return plans
    call = frame.call_of(root)
    if call is None:
        return plans or Planned(missing=f"this graph is not called from a call of {type(root).__name__}")
    if plans is None or plans.plan is None:
        return planned(root, call.args, call.kwargs)
    more, plan = _new_plan(root, call.args, call.kwargs).plan, plans.plan
    # the base is the plan with gradients, whose tags include the GEMMs of the backward
    if more is not None and not plan.differentiated:
        more, plan = plan, more
    session.planned = Planned(plan=plan.with_more(more, matrices))
    return session.planned


def _lacks(plan: Plan, root: nn.Module, matrices: Iterable[str]) -> bool:
    """Whether a call of `root` shows more than `plan`: other parameters, or a backward."""
    unread, name = set(matrices) - plan.read, session_of(root).name
    # a plan contains one path of a shared parameter
    owned = unread and any(joined(name, user_path(raw)) in unread for raw, _ in root.named_parameters())
    return bool(owned) or torch.is_grad_enabled() > plan.differentiated


def no_plan(root: nn.Module, missing: str) -> str:
    """Returns the reason why `root` has no plan."""
    return f"{type(root).__name__} has no plan, so each graph decides on its layers alone: {missing}"


def planned(root: nn.Module, args: Any, kwargs: Any) -> Planned:
    """Returns the plan of `root` called with `args` and `kwargs`; creates it if necessary."""
    session = session_of(root)
    session.planned = session.planned or _new_plan(root, args, kwargs)
    return session.planned


def gemms_of_call(root: nn.Module, args: Any, kwargs: Any) -> Counter[tuple[str, Gemm]] | None:
    """Returns how often a call of `root` and its backward compute each GEMM, by layer name and GEMM.

    Returns None if that depends on tensor values.
    """
    try:
        plan = make_plan(root, args, kwargs, table(), whole=True).moved("", session_of(root).name)
    except ModelError as error:
        log.info("cannot find the layers that %s runs: %s", type(root).__name__, error)
        return None
    return None if plan.guess else plan.runs


def _new_plan(root: nn.Module, args: Any, kwargs: Any) -> Planned:
    start = time.perf_counter()
    try:
        plan = make_plan(root, args, kwargs, table()).moved("", session_of(root).name)
    except ModelError as error:
        return Planned(missing=str(error))
    took_s = time.perf_counter() - start
    log.info("planned %s: %d GEMMs in %.1f s", type(root).__name__, len(plan.tags), took_s)
    return Planned(plan=plan)
