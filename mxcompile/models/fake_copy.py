"""Copies a model to fake tensors as its author wrote it, without wrappers that distribute or compile it.

``fully_shard``, ``parallelize_module``, ``DistributedDataParallel`` and ``FullyShardedDataParallel`` add
classes, wrapper modules, hooks and sharded parameters to a model. The copy has the original class, no
wrappers, no hooks of ``torch.distributed``, and whole parameters in the dtypes of FSDP's gathers. Modules are
copied attribute by attribute, because wrapped modules reject ``copy.deepcopy``, which does not copy closures
either (see `rebind`). A compiled method in an attribute (``model.forward = torch.compile(model.forward)``)
becomes the copy's own plain method.

`rewrapped` puts activation checkpoint wrappers back. Roles and decisions do not depend on these wrappers, but
saved activations and recomputed GEMMs do.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map

from mxcompile.errors import ModelError
from mxcompile.models.fakes import Faker
from mxcompile.models.fsdp import in_forward, mixed_precision
from mxcompile.models.names import user_path
from mxcompile.models.rebind import Rebinder
from mxcompile.models.wrappers import (
    FSDP1,
    HOOKS,
    STATE_HOOKS,
    is_distributed,
    plain_class,
    unwrapped,
    user_model,
)

log = logging.getLogger(__name__)

_COMPILED = "_compiled_call_impl"
_STATES = "__composable_api_state_key"
"""Prefix of the module attributes that hold the state of torch.distributed's composable APIs."""


def fake_copy(
    model: nn.Module,
    mode: FakeTensorMode,
    *,
    fake: Callable[[Tensor], Tensor] | None = None,
    drops: Callable[[Callable[..., Any]], bool] = is_distributed,
) -> nn.Module:
    """Returns an unwrapped copy of `model` on fake tensors; shared objects stay shared.

    fake: converts a tensor to a fake of `mode`. Default: a fake of the whole tensor. drops: whether to leave
    out a hook. Objects that cannot be copied (process groups, locks) are shared with the model.
    """
    model = user_model(model)
    modules, fake = [m for m in model.modules() if unwrapped(m) is m], fake or Faker(mode)
    memo: dict[int, Any] = {id(module): object.__new__(plain_class(module)) for module in modules}
    memo |= {id(module): memo[id(unwrapped(module))] for module in model.modules()}
    casts = mixed_precision(model)
    dtypes = {key: dtype for cast in casts for key, dtype in cast.parameters.items()}
    for module in modules:
        for value in (*module._parameters.values(), *module._buffers.values(), *vars(module).values()):
            if isinstance(value, Tensor) and id(value) not in memo:
                memo[id(value)] = in_forward(fake(value), dtypes.get(id(value)))
    copied = Rebinder(memo)
    with _AsFakes(fake, memo):
        for module in modules:
            attributes = vars(memo[id(module)])
            for key, value in vars(module).items():
                if key.startswith(_STATES):
                    continue
                if key == _COMPILED:
                    attributes[key] = None
                elif key in HOOKS | STATE_HOOKS:
                    hooks = {number: hook for number, hook in value.items() if not drops(hook)}
                    attributes[key] = type(value)(copied(hooks))
                elif key == "_modules":
                    copies = ((name, None if m is None else memo[id(m)]) for name, m in value.items())
                    attributes[key] = dict(copies)
                else:
                    attributes[key] = copied(value)
        for module in model.modules():
            _unflatten(module, memo, fake)
    for cast in casts:
        cast.cast_values(lambda module: memo[id(module)])
    copied_model: nn.Module = memo[id(model)]
    return copied_model


def checkpointed_copy(model: nn.Module, mode: FakeTensorMode) -> nn.Module:
    """Returns a `fake_copy` of `model` with its checkpoint wrappers."""
    return rewrapped(fake_copy(model, mode), model)


def rewrapped(copied: nn.Module, model: nn.Module) -> nn.Module:
    """Wraps in `copied`, an unwrapped copy of `model`, every module that `model` checkpoints."""
    for path, wrapper in reversed([*user_model(model).named_modules()]):  # those inside others first
        if not isinstance(wrapper, CheckpointWrapper):
            continue
        parent, _, name = user_path(path).rpartition(".")
        owner = copied.get_submodule(parent)
        wrapped = CheckpointWrapper(owner.get_submodule(name))
        wrapped.checkpoint_impl, wrapped.checkpoint_fn = wrapper.checkpoint_impl, wrapper.checkpoint_fn
        for key in STATE_HOOKS:  # they differ for each wrapper, which would prevent folding of equal layers
            vars(wrapped)[key].clear()
        if name:
            owner._modules[name] = wrapped
        else:
            copied = wrapped
    return copied


def fake_values(value: Any, mode: FakeTensorMode) -> Any:
    """Returns a copy of `value`, the arguments of a model, with fakes for tensors at any depth.

    Arguments that cannot be copied (generators, locks, files) are shared with the caller.
    """
    memo: dict[int, Any] = {}

    def copied(part: Any, instead: Callable[[Any, Exception], Any]) -> Any:
        try:
            with _AsFakes(Faker(mode), memo):
                return copy.deepcopy(part, memo)
        except ModelError:
            raise
        except Exception as error:  # copies run code of the objects' classes
            return instead(part, error)

    def shared(part: Any, error: Exception) -> Any:
        log.info("an argument of type %s is not copied: %s", type(part).__name__, error)
        return part

    def by_leaves(whole: Any, _: Exception) -> Any:
        memo.clear()  # containers keep their identity only if everything in them can be copied
        return tree_map(lambda leaf: copied(leaf, shared), whole)

    return copied(value, by_leaves)


def _unflatten(module: nn.Module, memo: dict[int, Any], fake: Callable[[Tensor], Tensor]) -> None:
    """Restores in the copies the parameters that FSDP1 has flattened in `module`."""
    handle = module.__dict__.get("_handle") if FSDP1 in module._modules else None
    if handle is None:
        return
    flat = handle.flat_param
    if not hasattr(flat, "_param_infos"):
        raise ModelError(
            f"cannot read FSDP1's flat parameters in torch {torch.__version__}: use FSDP2 (fully_shard)"
        )
    dtype = getattr(handle, "_fwd_bwd_param_dtype", flat.dtype)
    whole: dict[tuple[int, str], Tensor] = {}
    for info, shape in zip(flat._param_infos, flat._shapes, strict=True):
        empty = nn.Parameter(torch.empty(shape, dtype=dtype, device="meta"), flat.requires_grad)
        whole[id(info.module), info.param_name] = fake(empty)
    for info in flat._shared_param_infos:
        whole[id(info.module), info.param_name] = whole[id(info.prim_module), info.prim_param_name]
    for (owner, name), parameter in whole.items():
        memo[owner].__dict__.pop(name, None)  # during a call FSDP1 stores a view of the flat parameter there
        memo[owner]._parameters[name] = parameter


class _AsFakes(TorchFunctionMode):
    """Makes deep copies of tensors return fakes."""

    def __init__(self, fake: Callable[[Tensor], Tensor], memo: dict[int, Any]) -> None:
        super().__init__()
        self._fake = fake
        self._memo = memo

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (Tensor.__deepcopy__, nn.Parameter.__deepcopy__):
            fake = self._fake(args[0])
            self._memo[id(args[0])] = fake
            return fake
        if func is Tensor.clone:  # from a parameter's __deepcopy__; FSDP2 may have freed the storage
            return self._fake(args[0])
        return func(*args, **(kwargs or {}))
