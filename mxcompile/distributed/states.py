"""State dicts of modules that hold `MasterWeight`s are plain, out and in.

    state_dict()                     a MasterWeight, or a DTensor of one  →  its values, the same memory
    load_state_dict(assign=True)     values  →  a MasterWeight, cast as the one that is there

So checkpoints (``torch.save``, DCP, safetensors) hold what they hold without mxcompile.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from mxcompile.distributed.tensors import MasterWeight, local, with_local


def keep_plain(module: nn.Module) -> None:
    """Make the state dicts of `module` plain, from now on. Once is enough; more changes nothing."""
    if _given not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_given)
        module.register_load_state_dict_pre_hook(_taken)


def _given(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # as keep_vars=True gives it
            state_dict[prefix + name] = with_local(value, _plain)


def _taken(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        held = None if parameter is None else local(parameter)
        if isinstance(held, MasterWeight) and isinstance(value, Tensor):
            wrap = functools.partial(MasterWeight, cast=held.cast)
            state_dict[prefix + name] = with_local(value.detach(), wrap)


def _plain(value: Tensor) -> Tensor:
    return value.master if isinstance(value, MasterWeight) else value
