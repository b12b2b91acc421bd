"""FSDP's private state: the groups of FSDP2, and the mixed precision of a copy of a model.

FSDP casts parameters, inputs and outputs between graphs.

    FSDP2    a module's `MixedPrecisionPolicy` names the dtype of its gathers, inputs and outputs
    FSDP1    a flat parameter has a dtype for forward; the root casts inputs, other modules on request

During and after a call, FSDP2 holds some parameters in the dtype of the gather and others in their own. A
copy has all of them in the dtype of the gather, whenever it is made. With a torch version whose state has
another layout, `states` raises `AttributeError`, and a copy has the dtypes that the model has at this moment.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from mxcompile.models.names import joined, user_path, within
from mxcompile.models.wrappers import FSDP1, unwrapped

log = logging.getLogger(__name__)

Group = tuple[Any, list[tuple[str, Any]]]
"""An FSDP2 parameter group, and its parameters as (user's path, FSDPParam)."""


def states(root: nn.Module) -> Iterator[tuple[str, Any, list[Group]]]:
    """Yields (path, state, groups) for every module of `root` with an FSDP2 state.

    A state of several modules counts for its first module.
    """
    paths = {id(module): path for path, module in root.named_modules()}
    for path, module in root.named_modules():
        state = getattr(module, "_get_fsdp_state", lambda: None)()
        if state is None or state._modules[0] is not module:
            continue
        param_groups = getattr(state, "_fsdp_param_groups", None)
        if param_groups is None:  # torch before 2.12; later torch refuses this name for several groups
            single = getattr(state, "_fsdp_param_group", None)
            param_groups = [] if single is None else [single]
        members: list[Group] = []
        for group in param_groups:
            infos = ((entry._module_info, entry) for entry in group.fsdp_params)
            entries = [
                (user_path(joined(paths[id(info.module)], info.param_name)), entry)
                for info, entry in infos
                if id(info.module) in paths
            ]
            members.append((group, entries))
        yield path, state, members


def groups(root: nn.Module) -> Iterator[Group]:
    """Returns the parameter groups of all states."""
    return (group for *_, state_groups in states(root) for group in state_groups)


@dataclass(frozen=True, kw_only=True, slots=True)
class MixedPrecision:
    """Casts of one state of FSDP.

    modules: those whose forward FSDP surrounds. parameters: dtype in forward, by the id of the tensor that a
    module holds now. inputs, outputs: dtypes of floating-point values, or None without a cast.
    """

    modules: tuple[nn.Module, ...]
    parameters: dict[int, torch.dtype] = field(default_factory=dict)
    inputs: torch.dtype | None = None
    outputs: torch.dtype | None = None

    def cast_values(self, copy_of: Callable[[nn.Module], nn.Module]) -> None:
        """Adds hooks to the copies of the modules that cast inputs and outputs."""
        for module in map(copy_of, self.modules):
            if self.inputs is not None:  # partials: equal hooks compare as equal (`plan.repeats`)
                module.register_forward_pre_hook(partial(_cast_inputs, self.inputs), with_kwargs=True)
            if self.outputs is not None:
                module.register_forward_hook(partial(_cast_outputs, self.outputs))


def mixed_precision(model: nn.Module) -> tuple[MixedPrecision, ...]:
    """Returns the casts of every FSDP state in `model`."""
    try:
        return (*_fsdp2(model), *_fsdp1(model))
    except AttributeError as error:
        log.warning("cannot read FSDP's mixed precision in torch %s: %s", torch.__version__, error)
        return ()


def in_forward(fake: Tensor, dtype: torch.dtype | None) -> Tensor:
    """Returns `fake`, the copy of a parameter, in the `dtype` in which FSDP gathers it, if there is one."""
    if dtype is None or fake.dtype == dtype or not fake.is_floating_point():
        return fake
    with torch.no_grad():
        converted = fake.to(dtype)
    is_parameter = isinstance(fake, nn.Parameter)
    return nn.Parameter(converted, requires_grad=fake.requires_grad) if is_parameter else converted


def _fsdp2(model: nn.Module) -> Iterator[MixedPrecision]:
    for _, state, groups in states(model):
        mixed = state._mp_policy
        entries = [entry for _, named in groups for _, entry in named if entry.mp_policy.param_dtype]
        owners = [(entry._module_info.module, entry._module_info.param_name) for entry in entries]
        ids = (id(getattr(*owner)) for owner in owners)  # of shards now, or of gathered values
        yield MixedPrecision(
            modules=tuple(state._modules),
            parameters=dict(zip(ids, (entry.mp_policy.param_dtype for entry in entries), strict=True)),
            inputs=mixed.param_dtype if mixed.cast_forward_inputs else None,
            outputs=mixed.output_dtype,
        )


def _fsdp1(model: nn.Module) -> Iterator[MixedPrecision]:
    root = None
    for path, module in model.named_modules():
        if FSDP1 not in module._modules:
            continue
        is_root = root is None or not within(path, root)
        root = path if is_root else root
        mixed: Any = module.mixed_precision
        casts = mixed.cast_root_forward_inputs if is_root else mixed.cast_forward_inputs
        yield MixedPrecision(modules=(unwrapped(module),), inputs=mixed.param_dtype if casts else None)


def _cast_inputs(dtype: torch.dtype, _: nn.Module, args: Any, kwargs: Any) -> Any:
    return floats_to(dtype, (args, kwargs))


def _cast_outputs(dtype: torch.dtype, _: nn.Module, __: Any, output: Any) -> Any:
    return floats_to(dtype, output)


def floats_to(dtype: torch.dtype, values: Any) -> Any:
    """Returns `values` with all floating-point tensors converted to `dtype`."""
    return tree_map_only(
        Tensor, lambda value: value.to(dtype) if value.is_floating_point() else value, values
    )
