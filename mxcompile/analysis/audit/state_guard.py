"""Leaving no trace: what running a model changes besides its outputs is put back.

Kept: parameters that a graph writes to, buffers and other tensors on modules, what modules hold under each
name, and the state of the random number generators of torch and Python. Gradients need no keeping: they are
asked for with ``torch.autograd.grad``, which leaves ``.grad`` alone. Not kept: what the model changes inside
lists or objects of its own.
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
    """The state of the random number generators of torch and Python when this was made."""

    def __init__(self) -> None:
        self._random = random.getstate()
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []

    def moved(self) -> bool:
        """Whether anything was drawn since."""
        cuda = torch.cuda.get_rng_state_all() if self._cuda else []
        return (
            random.getstate() != self._random
            or not torch.equal(torch.get_rng_state(), self._cpu)
            or not all(map(torch.equal, cuda, self._cuda))
        )

    def restore(self) -> None:
        """Put the generators back."""
        random.setstate(self._random)
        torch.set_rng_state(self._cpu)
        if self._cuda:
            torch.cuda.set_rng_state_all(self._cuda)


@contextmanager
def drawing(seed: int | None) -> Iterator[None]:
    """Random numbers drawn inside follow from `seed`, unless it is None; then the generators are restored."""
    before = Generators()
    try:
        if seed is not None:
            random.seed(seed)
            torch.manual_seed(seed)
        yield
    finally:
        before.restore()


class Kept:
    """The state of `model` and of the generators when this was made. generators: their state alone."""

    def __init__(self, model: nn.Module) -> None:
        self._names = [(held, dict(held)) for module in model.modules() for held in _namespaces(module)]
        self._values: dict[int, tuple[Tensor, Tensor]] = {}
        for _, names in self._names:
            for value in names.values():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    self.add(value)
        self.generators = Generators()

    def add(self, tensor: Tensor) -> None:
        """Keep the values of `tensor` too."""
        if id(tensor) not in self._values:
            self._values[id(tensor)] = tensor, tensor.detach().clone()

    def restore(self) -> None:
        """Put everything back; only what has changed is written to."""
        for held, names in self._names:
            for name in [name for name in held if name not in names]:
                del held[name]
            held.update({name: value for name, value in names.items() if held.get(name) is not value})
        for tensor, values in self._values.values():
            if not torch.equal(tensor.detach(), values):
                tensor.data.copy_(values)
        self.generators.restore()


def _namespaces(module: nn.Module) -> list[dict[str, Any]]:
    """Where `module` holds things by name."""
    return [vars(module), module._parameters, module._buffers, module._modules]


def fresh(arguments: Any) -> Any:
    """A copy of the arguments of a model: whatever a run does to them, the next finds them as they were.

    Tensors that are one stay one.
    """
    memo: dict[int, Any] = {}

    def copied(value: Any) -> Any:
        if isinstance(value, Tensor) and not value.is_leaf:
            memo.setdefault(id(value), value.detach().clone().requires_grad_())
        return copy.deepcopy(value, memo)

    return tree_map(copied, arguments)


@contextmanager
def uncompiled(model: nn.Module) -> Iterator[None]:
    """Modules and methods that were compiled in place run their own code in here."""
    compiled = [
        (vars(module), name, value, plain)
        for module in model.modules()
        for name, value in vars(module).items()
        if (plain := None if name == "_compiled_call_impl" else method_of(value)) is not value
    ]
    try:
        for attributes, name, _, plain in compiled:
            attributes[name] = plain
        yield
    finally:
        for attributes, name, value, _ in compiled:
            attributes[name] = value
