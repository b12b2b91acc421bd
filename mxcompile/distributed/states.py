"""State dicts of modules with `MasterWeight`s contain plain tensors, on saving and on loading.

    state_dict()                     MasterWeight, or a DTensor of one  →  its values, in the same memory
    load_state_dict(assign=True)     values  →  MasterWeight with the cast of the present parameter

Checkpoints (``torch.save``, DCP, safetensors) therefore have the same tensors as without mxcompile.
"""

from __future__ import annotations

import functools
from typing import Any

from torch import Tensor, nn

from mxcompile.distributed.tensors import MasterWeight, local, with_local


def register_state_hooks(module: nn.Module) -> None:
    """Registers the state dict hooks on `module`. A second call changes nothing."""
    if _after_saving not in module._state_dict_hooks.values():
        module.register_state_dict_post_hook(_after_saving)
        module.register_load_state_dict_pre_hook(_before_loading)


def _after_saving(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    for name in module._parameters:
        value = state_dict.get(prefix + name)
        if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):  # not for keep_vars=True
            state_dict[prefix + name] = with_local(
                value, lambda tensor: tensor.master if isinstance(tensor, MasterWeight) else tensor
            )


def _before_loading(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any], *_: Any
) -> None:
    if not local_metadata.get("assign_to_params_buffers", False):
        return
    for name, parameter in module._parameters.items():
        value = state_dict.get(prefix + name)
        shard = None if parameter is None else local(parameter)
        if isinstance(shard, MasterWeight) and isinstance(value, Tensor):
            wrap = functools.partial(MasterWeight, cast=shard.cast)
            state_dict[prefix + name] = with_local(value.detach(), wrap)
