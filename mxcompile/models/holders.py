"""Parameters by identity, known through the modules that hold them.

A weak reference to a parameter would be simpler, but ``torch.utils.swap_tensors`` refuses tensors that have
one. It is the way to change a parameter in place, and `nn.Module.to` may take it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable

from torch import Tensor, nn


class Holders:
    """The modules that hold parameters. A model that nobody else keeps is freed."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[weakref.ref[nn.Module], str]] = {}

    def holder(self, tensor: Tensor) -> tuple[nn.Module, str] | None:
        """Returns the module that holds `tensor` and its name there; None if that is not known."""
        reference, name = self._known.get(id(tensor), (None, ""))
        module = None if reference is None else reference()
        if module is None or module._parameters.get(name) is not tensor:
            return None  # it is another tensor, at the address of one that is gone or was replaced
        return module, name

    def add(self, modules: Iterable[nn.Module], only: Tensor | None = None) -> bool:
        """Note the parameters of `modules`; of all parameters `only` one, if it is given.

        Returns whether there are any.
        """
        holders = {
            id(parameter): (weakref.ref(module), name)
            for module in modules
            for name, parameter in module._parameters.items()
            if parameter is not None and (only is None or parameter is only)
        }
        self._known.update(holders)
        return bool(holders)
