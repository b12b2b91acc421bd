"""Fake-tensor copies of models that keep the activation checkpoint wrappers.

`fake_copy` drops wrappers, which suffices for roles and decisions. Saved activations and recomputed GEMMs
depend on the wrappers.
"""

from __future__ import annotations

from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper

from mxcompile.models.fake_copy import fake_copy
from mxcompile.models.names import user_path
from mxcompile.models.wrappers import STATE_HOOKS, user_model


def checkpointed_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Returns a `fake_copy` of `model` with its checkpoint wrappers."""
    return rewrapped(fake_copy(model, mode), model)


def rewrapped(copied: nn.Module, model: nn.Module) -> nn.Module:
    """Wraps in `copied`, an unwrapped copy of `model`, every module that `model` checkpoints."""
    for path, wrapper in reversed([*user_model(model).named_modules()]):  # those inside others first
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
    """Returns `module` in a checkpoint wrapper with the settings of `wrapper`."""
    result = CheckpointWrapper(module)
    result.checkpoint_impl = wrapper.checkpoint_impl
    result.checkpoint_fn = wrapper.checkpoint_fn
    for key in STATE_HOOKS:  # the hooks differ for each wrapper, which would prevent folding of equal layers
        vars(result)[key].clear()
    return result
