"""Finds the module that holds a parameter, by the parameter's identity.

A weak reference to the parameter would be simpler, but ``torch.utils.swap_tensors``, which `nn.Module.to` may
use to change a parameter in place, rejects tensors with weak references.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn


class Holders:
    """Weak references to the modules of parameters, so that the model can be freed."""

    def __init__(self) -> None:
        self._references: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def holder(self, tensor: Tensor) -> tuple[nn.Module, str] | None:
        """Returns (module, name) for `tensor`, or None if no registered module holds it."""
        reference, name = self._references.get(id(tensor), (None, ""))
        module = None if reference is None else reference()
        if module is None or module._parameters.get(name) is not tensor:
            return None  # a new tensor may have the id of a freed or replaced one
        return module, name

    def add(self, modules: Iterable[nn.Module], only: Tensor | None = None) -> bool:
        """Registers the parameters of `modules`, or the parameter `only`. Returns whether there are any."""
        holders = {
            id(parameter): (weakref.ref(module), name)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and (only is None or parameter is only)
        }
        self._references.update(holders)
        return bool(holders)
