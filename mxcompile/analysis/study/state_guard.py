"""Restores the state that a run of a model changes.

Restored are parameters that a graph writes to, buffers and other tensors on modules, the names on modules,
and the state of the random number generators of torch and Python. Gradients need no copy, because
``torch.autograd.grad`` does not change ``.grad``. Changes inside lists or objects of the model are not
restored.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from mxcompile.models.wrappers import method_of


class Generators:
    """The state of torch's and Python's random number generators at construction."""

    def __init__(self) -> None:
        self._random = random.getstate()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def moved(self) -> bool:
        """Whether random numbers were drawn since construction."""
        cuda = torch.cuda.get_rng_state_all() if self._cuda else []
        return (
            random.getstate() != self._random
            or not torch.equal(torch.get_rng_state(), self._cpu)
            or not all(map(torch.equal, cuda, self._cuda))
        )

    def restore(self) -> None:
        """Restores the state."""
        random.setstate(self._random)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def drawing(seed: int | None) -> Iterator[None]:
    """Seeds the random number generators with `seed`, unless it is None. Restores them at the end."""
    before = Generators()
    try:
        if seed is not None:
            random.seed(seed)
            torch.manual_seed(seed)
        yield
    finally:
        before.restore()


class SavedState:
    """The state of `model` and of the generators at construction. generators: the generators' state."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [
            (slots, dict(slots))
            for module in model.modules()
            for slots in (vars(module), module._parameters, module._buffers, module._modules)
        ]
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        for _, names in self._names:
            for value in names.values():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    self.add(value)
        self.generators = Generators()

    def add(self, tensor: Tensor) -> None:
        """Adds a copy of the values of `tensor`."""
        if id(tensor) not in self._values:
            self._values[id(tensor)] = tensor, tensor.detach().clone()

    def restore(self) -> None:
        """Restores everything. Unchanged tensors are not written to."""
        for slots, names in self._names:
            for name in [name for name in slots if name not in names]:
                del slots[name]
            slots.update({name: value for name, value in names.items() if slots.get(name) is not value})
        for tensor, values in self._values.values():
            if not torch.equal(tensor.detach(), values):
                tensor.data.copy_(values)
        self.generators.restore()


def fresh(arguments: Any) -> Any:
    """Returns a copy of a model's arguments, so that runs cannot affect each other.

    A tensor that occurs several times stays one tensor.
    """
    memo: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_leaf:
            memo.setdefault(id(value), value.detach().clone().requires_grad_())
        return copy.deepcopy(value, memo)

    return tree_map(copied, arguments)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Runs modules and methods that were compiled in place as plain code inside this context."""
    compiled = [
        (vars(module), name, value, plain)
        for module in model.modules()
        for name, value in vars(module).items()
        if (plain := None if name == "_compiled_call_impl" else method_of(value)) is not value
    ]
    try:
        for slots, name, _, plain in compiled:
            slots[name] = plain
        yield
    finally:
        for slots, name, value, _ in compiled:
            slots[name] = value
