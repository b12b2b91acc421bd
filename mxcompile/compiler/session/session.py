"""The `ModelSession` of each model that this process compiles. It is freed together with the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from weakref import WeakKeyDictionary, WeakSet

from torch import nn

from mxcompile.compiler.session.publication import Places
from mxcompile.errors import ModelError
from mxcompile.models.names import joined, within
from mxcompile.models.tree import path_in
from mxcompile.models.wrappers import user_model
from mxcompile.plan.plan import Plan
from mxcompile.policy import Policy


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
    # Places refer to the model, which is the key of `_SESSIONS`: a strong reference would keep it alive.
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
