"""Unwraps compiled, sharded, data-parallel and checkpointed modules, and recognises their hooks."""

from __future__ import annotations

import functools
import inspect
from types import FunctionType
from typing import Any

from torch import nn
from torch._dynamo.eval_frame import innermost_fn

from mxcompile.models.names import PARALLEL, WRAPPERS

HOOKS = frozenset({"_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks"})
"""Module attributes with forward and backward hooks by number."""
HOOK_OPTIONS = frozenset(
    {"_forward_pre_hooks_with_kwargs", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"}
)
"""Module attributes with the call options of these hooks, by the same numbers."""
STATE_HOOKS = frozenset({
    "_state_dict_pre_hooks", "_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks",
})  # fmt: skip
"""Module attributes with state dict hooks by number."""
FSDP1 = "_fsdp_wrapped_module"
"""Attribute with the module that FSDP1 wraps."""


def user_model(model: nn.Module) -> nn.Module:
    """Returns the model inside wrappers that hold it whole: compiled or data parallel."""
    while True:
        if isinstance(inner := model._modules.get("_orig_mod"), nn.Module):
            model = inner
        elif type(model).__name__ in PARALLEL:
            model = model.get_submodule("module")
        else:
            return model


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Returns the class of `module` before ``fully_shard`` changed it."""
    for kind in type(module).__mro__:
        if not any(base.__name__ == "FSDPModule" for base in kind.__mro__):
            return kind
    return type(module)


def method_of(value: Any) -> Any:
    """Returns the method that `value` was compiled from, or `value` itself."""
    if not isinstance(value, FunctionType) or getattr(value, "_torchdynamo_disable", False):
        return value
    method = innermost_fn(value)
    return method if inspect.ismethod(method) else value


def unwrapped(module: nn.Module) -> nn.Module:
    """Returns the module inside the wrappers around `module`."""
    while True:
        children = (module._modules.get(name) for name in WRAPPERS)
        inner = next((child for child in children if child is not None), None)
        if inner is None:
            return module
        module = inner


def is_distributed(hook: Any, part: str = "") -> bool:
    """Whether `hook`, possibly inside partials and decorators, belongs to torch.distributed.

    part: the part of torch.distributed, ".tensor" for hooks of ``parallelize_module``. Default: any.
    """
    while isinstance(hook, functools.partial):
        hook = hook.func
    hook = inspect.unwrap(hook)
    owner = getattr(hook, "__self__", None)
    homes = getattr(hook, "__module__", None) or "", "" if owner is None else type(owner).__module__
    return any(home.startswith(f"torch.distributed{part}") for home in homes)
