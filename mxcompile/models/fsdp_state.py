"""The only reader of FSDP2's private state. Raises `AttributeError` for a torch with another layout."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from mxcompile.models.names import joined, user_path

Group = tuple[Any, list[tuple[str, Any]]]
"""An FSDP2 parameter group, and its parameters as (user's path, FSDPParam)."""


def states(root: nn.Module) -> Iterator[tuple[str, Any, list[Group]]]:
    """Yields (path, state, groups) for every module of `root` with an FSDP2 state.

    A state of several modules counts for its first module.
    """
    paths = {id(module): path for path, module in root.named_modules()}
    for path, module in root.named_modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        if state is not None and state._modules[0] is module:
            yield path, state, [(group, [*_parameters(group, paths)]) for group in _groups(state)]


def groups(root: nn.Module) -> Iterator[Group]:
    """Returns the parameter groups of all states."""
    return (group for *_, state_groups in states(root) for group in state_groups)


def _parameters(group: Any, paths: dict[int, str]) -> Iterator[tuple[str, Any]]:
    for parameter in group.fsdp_params:
        info = parameter._module_info
        if id(info.module) in paths:
            yield user_path(joined(paths[id(info.module)], info.param_name)), parameter


def _groups(state: Any) -> list[Any]:
    """Returns the groups of a state. Torch before 2.12 has one group per state."""
    several = getattr(state, "_fsdp_param_groups", None)
    if several is not None:
        return list(several)
    single = getattr(state, "_fsdp_param_group", None)
    return [] if single is None else [single]
