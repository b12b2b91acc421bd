"""Copies of models on fake tensors that compute again what the model's checkpoint wrappers do.

A `fake_copy` is without wrappers, which is right where only roles and decisions count. What forward keeps,
and how often a product runs, the wrappers decide too.
"""

from __future__ import annotations

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from mxcompile.models.fake_copy import fake_copy
from mxcompile.models.names import user_path
from mxcompile.models.wrappers import STATE_HOOKS, users_own


def checkpointed_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """A `fake_copy` of `model` with its checkpoint wrappers."""
    return rewrapped(fake_copy(model, mode), model)


def rewrapped(copied: nn.Module, model: nn.Module) -> nn.Module:
    """`copied`, a copy of `model` without wrappers, with each module wrapped that is checkpointed there."""
    for path, wrapper in users_own(model).named_modules():
        if not isinstance(wrapper, CheckpointWrapper):
            continue
        parent, _, name = user_path(path).rpartition(".")
        if not name:
            copied = _wrapped(copied, wrapper)
            continue
        owner = copied.get_submodule(parent)
        owner._modules[name] = _wrapped(owner.get_submodule(name), wrapper)
    return copied


def _wrapped(module: nn.Module, wrapper: CheckpointWrapper) -> CheckpointWrapper:
    """`module` in a wrapper that does what `wrapper` does."""
    result = CheckpointWrapper(module)
    result.checkpoint_impl = wrapper.checkpoint_impl
    result.checkpoint_fn = wrapper.checkpoint_fn
    for key in STATE_HOOKS:  # no two wrappers have the same ones, and equal layers are traced once
        vars(result)[key].clear()
    return result
