"""Which policies the models of this process were compiled with."""

from __future__ import annotations

from weakref import WeakKeyDictionary

from torch import nn

from mxcompile.errors import ModelError
from mxcompile.models.wrappers import users_own
from mxcompile.policy import Policy

_POLICIES: WeakKeyDictionary[nn.Module, dict[str, Policy]] = WeakKeyDictionary()
"""By the user's model: policies, in the order they were first used. One that a watch has changed takes the
place of the one it came from."""


def remember(root: nn.Module | None, policy: Policy, given: str) -> None:
    """Note that a graph of `root` was compiled with `policy`. given: fingerprint of the one it came from."""
    if root is not None:
        _POLICIES.setdefault(users_own(root), {})[given] = policy


def compiled_policy(model: nn.Module) -> Policy:
    """Returns the policy that `model` was compiled with. Raises `ModelError` if there is none, or several."""
    known = _POLICIES.get(users_own(model), {})
    if len(known) == 1:
        return next(iter(known.values()))
    name = type(users_own(model)).__name__
    if not known:
        raise ModelError(
            f"no graph of this {name} was compiled in this process: call it once, or pass policy=…, the one"
            " that it is compiled with"
        )
    labels = ", ".join(policy.label for policy in known.values())
    raise ModelError(f"{name} was compiled with several policies ({labels}): pass the one you mean, policy=…")
