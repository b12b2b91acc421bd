"""The `ModelSession` of each model that this process compiles. It is freed together with the model.

The first partial graph of a model creates its plan. A model in a single graph needs none, because that graph
shows everything.
"""

from __future__ import annotations

import dataclasses
import logging
import time
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from mxcompile.compiler.session.decompositions import table
from mxcompile.compiler.session.frames import Frame
from mxcompile.errors import ModelError
from mxcompile.models.names import joined, user_path, within
from mxcompile.models.tree import path_in
from mxcompile.models.wrappers import user_model
from mxcompile.plan.plan import Plan, make_plan
from mxcompile.policy import Gemm, Policy
from mxcompile.report import REGISTRY, GemmRecord, Ledger, Part

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Planned:
    """The plan of a model, or the reason for its absence ("" if none is needed)."""

    plan: Plan | None = None
    missing: str = ""

    def below(self, prefix: str) -> tuple[object, ...]:
        """Returns a comparable summary of the plan's layers in the module at `prefix`."""
        if self.plan is None:
            return (self.missing,)
        inside = (tag for tag in self.plan.tags if within(tag.name, prefix))
        return tuple((tag.name, str(tag.role), tag.module, tag.n, tag.k) for tag in inside)


class Places:
    """The registry entries of one compiled part, for each model that runs its code.

    A part belongs to a module and its twins, which are expected to share its code. The entries have the twins
    that have run it.

    gemms: planned GEMMs of the part's whole model.
    on_other_module: called with the path of each further module that runs the code. part: the part that was
    published last.
    """

    def __init__(
        self,
        key: object,
        ledger: Ledger,
        gemms: tuple[GemmRecord, ...],
        on_other_module: Callable[[str], None],
    ) -> None:
        self._key = key
        self._gemms = gemms
        self._on_other_module = on_other_module
        self.part = Part()
        self._places: list[tuple[Ledger, int | None, Callable[[str], str]]] = [(ledger, None, str)]
        self._ran: set[str] = set()
        self._is_sure = False

    def put(self, part: Part) -> None:
        """Publishes `part` in all entries."""
        self.part = part
        self._places = [
            (ledger, REGISTRY.put(ledger, index, _moved(self._shown, path)), path)
            for ledger, index, path in self._places
        ]

    @property
    def _shown(self) -> Part:
        """The part with the twins that have run its code; with all twins if it is unknown who has."""
        if not self._is_sure:
            return self.part
        ran = tuple(twin for twin in self.part.twins if twin[0] in self._ran)
        return dataclasses.replace(self.part, twins=ran)

    def add_model(self, model: nn.Module, path: Callable[[str], str]) -> None:
        """Adds an entry for `model`, another instance with the same module names that runs the code.

        path: returns the path in `model` for a path in the first model.
        """
        fresh = self._places[0][0].for_model(model)
        ledger = REGISTRY.open((self._key, fresh.model), fresh)
        self._places.append((ledger, REGISTRY.put(ledger, None, _moved(self._shown, path)), path))
        if self._gemms:
            REGISTRY.plan(model, ledger.group, _renamed(self._gemms, path))
        REGISTRY.flush()  # a call without a compile flushes only here

    def note(self, path: str | None) -> None:
        """Records that a module of the first model runs the code. path: its path, None if unknown."""
        before = self._shown
        self._is_sure = path is not None and (self._is_sure or not self._ran)
        is_other = bool(path and self._ran and path not in self._ran)
        self._ran.add(path or "")
        if path and is_other:
            self._on_other_module(path)
        if self._shown != before:
            self.put(self.part)


def _renamed(gemms: Iterable[GemmRecord], path: Callable[[str], str]) -> tuple[GemmRecord, ...]:
    return tuple(dataclasses.replace(gemm, name=path(gemm.name)) for gemm in gemms)


def _moved(part: Part, path: Callable[[str], str]) -> Part:
    """Returns `part` with each path in it replaced by ``path(old)``."""
    nodes = (dataclasses.replace(node, names=tuple(map(path, node.names))) for node in part.outline.nodes)
    return dataclasses.replace(
        part,
        gemms=_renamed(part.gemms, path),
        weights=tuple((path(row[0]), *row[1:]) for row in part.weights),
        outline=dataclasses.replace(part.outline, nodes=tuple(nodes)),
        prefix=path(part.prefix),
        twins=tuple((path(twin), block) for twin, block in part.twins),
    )


@dataclass(kw_only=True, slots=True)
class ModelSession:
    """The plan, policies and checks of one model. Dictionary keys are fingerprints of options.

    name: path of the model in the function that is compiled, "" if it has no other model. planned: plan, or
    why there is none; None before the first part is compiled. policies: the policies of compiles, in order
    of first use; a policy that a watch changed replaces the original.
    checked: plan that was last compared with the policy. ran: plan that was last compared with the layers
    that ran. read: parameters that compiled graphs read, for a model without a plan. places:
    registry entries of the compiled parts. loads_histories: whether the model can load state dicts with
    amax histories.
    """

    name: str = ""
    planned: Planned | None = None
    policies: dict[str, Policy] = field(default_factory=dict)
    checked: dict[str, Plan] = field(default_factory=dict)
    ran: dict[str, Plan] = field(default_factory=dict)
    read: dict[str, set[str]] = field(default_factory=dict)
    places: WeakSet[Places] = field(default_factory=WeakSet)
    loads_histories: bool = False

    @property
    def plan(self) -> Plan | None:
        """The plan of the model, if there is one."""
        return None if self.planned is None else self.planned.plan

    def rename(self, name: str) -> None:
        """Sets the name of the model, and replaces this prefix of the names in its plan."""
        if name != self.name and self.plan is not None:
            self.planned = Planned(plan=self.plan.moved(self.name, name))
        self.name = name


_SESSIONS: WeakKeyDictionary[nn.Module, ModelSession] = WeakKeyDictionary()


def session_of(root: nn.Module) -> ModelSession:
    """Returns the session of the model `root`."""
    return _SESSIONS.setdefault(root, ModelSession())


def path_of(root: nn.Module, module: nn.Module | None) -> str | None:
    """Returns the path of `module` under the name of the model `root`, or None if it is not in the model."""
    path = path_in(root, module)
    return None if path is None else joined(session_of(root).name, path)


def compiled_policy(model: nn.Module) -> Policy:
    """Returns the policy of the compiled `model`. Raises `ModelError` for none or several policies."""
    root = user_model(model)
    policies = [*session_of(root).policies.values()]
    if len(policies) == 1:
        return policies[0]
    name = type(root).__name__
    if not policies:
        raise ModelError(
            f"no graph of this {name} was compiled in this process: call it once, or pass policy=…, the"
            " policy that it is compiled with"
        )
    labels = ", ".join(policy.label for policy in policies)
    raise ModelError(f"{name} was compiled with several policies ({labels}): pass one of them as policy=…")


def plan_of(root: nn.Module | None, frame: Frame, matrices: Iterable[str]) -> Planned:
    """Returns the plan of `root`, whose running call leads to `frame`; creates it if necessary.

    matrices: paths of the matrices that this graph reads. If the plan lacks one of them, it is extended with
    the layers of the running call; existing entries do not change.
    """
    if root is None:
        return Planned(missing="not part of a module")
    session = session_of(root)
    plans = session.planned
    if plans is not None:
        if plans.plan is None:
            return plans
        unread, name = set(matrices) - plans.plan.read, session.name
        # a plan contains one path of a shared parameter
        owned = unread and any(joined(name, user_path(raw)) in unread for raw, _ in root.named_parameters())
        if not owned and torch.is_grad_enabled() <= plans.plan.differentiated:
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
