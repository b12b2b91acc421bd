"""The state of FSDP2, which is not public: read here alone. AttributeError if a torch keeps it otherwise."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from mxcompile.models.names import joined, user_path

Group = tuple[Any, list[tuple[str, Any]]]
"""FSDP2's group of parameters that are gathered together, and the parameters with the user's paths."""


def states(root: nn.Module) -> Iterator[tuple[str, Any, list[Group]]]:
    """Path, state and groups of every module of `root` with a state; of several with one state, the first."""
    paths = {id(module): path for path, module in root.named_modules()}
    for path, module in root.named_modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        if state is not None and state._modules[0] is module:
            yield path, state, [(group, [*_parameters(group, paths)]) for group in _groups(state)]


def groups(root: nn.Module) -> Iterator[Group]:
    """The groups of all states."""
    return (group for *_, own in states(root) for group in own)


def _parameters(group: Any, paths: dict[int, str]) -> Iterator[tuple[str, Any]]:
    for parameter in group.fsdp_params:
        place = parameter._module_info
        if id(place.module) in paths:
            yield user_path(joined(paths[id(place.module)], place.param_name)), parameter


def _groups(state: Any) -> list[Any]:
    """The groups of a state; torch before 2.12 has one for a module."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    one = getattr(state, "_fsdp_param_group", None)
    return [] if one is None else [one]
