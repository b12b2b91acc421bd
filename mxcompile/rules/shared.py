"""Compares two modules by the policy rules that select their layers by name or by block."""

from __future__ import annotations

from torch import nn

from mxcompile.models.blocks import Blocks
from mxcompile.models.names import joined, user_path
from mxcompile.policy import Policy


def name_signature(
    policy: Policy, module: nn.Module, path: str, blocks: Blocks
) -> tuple[tuple[bool, ...], ...]:
    """Returns whether each rule of `policy` selects each layer of `module` by name and block.

    Modules of one class with equal signatures get equal decisions, so they can share compiled code. path:
    path of `module` in the model. blocks: blocks of the model.
    """
    inner = [name for name, _ in module.named_modules()]
    inner += [name for name, _ in module.named_parameters()]
    full = [user_path(joined(path, name)) for name in inner]
    layers = [(name, blocks.position(name)) for name in full]
    return tuple(tuple(rule.match.places(*layer) for rule in policy.rules) for layer in layers)
