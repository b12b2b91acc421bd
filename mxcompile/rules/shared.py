"""The layers that a policy tells apart by name or by block."""

from __future__ import annotations

from torch import nn

from mxcompile.models.blocks import Blocks
from mxcompile.models.names import joined, user_path
from mxcompile.policy import Policy


def name_signature(
    policy: Policy, module: nn.Module, path: str, blocks: Blocks
) -> tuple[tuple[bool, ...], ...]:
    """How the names and blocks of `policy`'s rules fall on the layers of `module`, at `path`, in their order.

    Equal for two modules of a class whose layers the policy does not tell apart so. blocks: of the model.
    """
    inner = [name for name, _ in module.named_modules()]
    inner += [name for name, _ in module.named_parameters()]
    full = [user_path(joined(path, name)) for name in inner]
    places = [(name, blocks.place(name)) for name in full]
    return tuple(tuple(rule.match.places(*place) for rule in policy.rules) for place in places)
