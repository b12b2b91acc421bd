"""Restores the state that a run of a model changes.

Restored are parameters that a graph writes to, buffers and other tensors on modules, the names on modules,
and the state of the random number generators of torch, Python and NumPy. Gradients need no copy, because
``torch.autograd.grad`` does not change ``.grad``. Changes inside lists or objects of the model are not
restored.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from mxcompile.distributed.tensors import local
from mxcompile.models.wrappers import method_of
from mxcompile.storage.tensor import stored_parts


class Generators:
    """The state of the global random number generators of torch, Python and NumPy at construction."""

    def __init__(self) -> None:
        self._states = [(read, write, read()) for read, write in _accessors()]

    def moved(self) -> bool:
        """Whether random numbers were drawn since construction."""
        return any(not _equal(read(), state) for read, _, state in self._states)

    def restore(self) -> None:
        """Restores the state."""
        for _, write, state in self._states:
            write(state)


def _numpy() -> Any:
    """Returns ``numpy.random`` if the program has imported it, else None."""
    return sys.modules.get("numpy.random")


def _accessors() -> Iterator[tuple[Callable[[], Any], Callable[[Any], object]]]:
    """Yields the functions that read and write the state of each generator."""
    yield random.getstate, random.setstate
    yield torch.get_rng_state, torch.set_rng_state
    if torch.cuda.is_initialized():
        yield torch.cuda.get_rng_state_all, torch.cuda.set_rng_state_all
    if numpy := _numpy():
        yield lambda: numpy.get_state(legacy=False), numpy.set_state


def _equal(state: Any, other: Any) -> bool:
    pairs = zip(tree_leaves(state), tree_leaves(other), strict=True)
    return all(bool((a == b).all()) if hasattr(a, "all") else a == b for a, b in pairs)


@contextmanager
def drawing(seed: int | None) -> Iterator[None]:
    """Seeds the random number generators with `seed`, unless it is None. Restores them at the end."""
    before = Generators()
    try:
        if seed is not None:
            random.seed(seed)
            torch.manual_seed(seed)
            if numpy := _numpy():
                numpy.seed(seed)
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
        self._values: dict[int, tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]] = {}
        for _, names in self._names:
            for value in names.values():
                if isinstance(value, Tensor) and not isinstance(value, nn.Parameter):
                    self.add(value)
        self.generators = Generators()

    def add(self, tensor: Tensor) -> None:
        """Adds a copy of the values of `tensor`."""
        if id(tensor) not in self._values and not tensor.is_meta:
            whole = tensor.data  # keeps sizes and memory when `tensor` gets others
            parts = [(part, part.clone()) for part in stored_parts(local(whole))]
            self._values[id(tensor)] = tensor, whole, parts

    def restore(self) -> None:
        """Restores everything. Unchanged tensors are not written to."""
        self.generators.restore()
        for slots, names in self._names:
            if _identities(slots) != _identities(names):
                slots.clear()
                slots.update(names)
        for tensor, whole, parts in self._values.values():
            now = stored_parts(local(tensor.data))
            stays = all(_same_memory(part, before) for part, (before, _) in zip(now, parts, strict=True))
            if not stays or whole.layout is torch.sparse_coo:  # a write to it also unsets `is_coalesced`
                tensor.data = whole
            for part, values in parts:
                if not torch.equal(part, values):
                    part.copy_(values)


def _same_memory(part: Tensor, other: Tensor) -> bool:
    """Whether two plain tensors have the same sizes and elements. ``is_set_to`` does not take every dtype."""
    pairs = (part.shape, other.shape), (part.stride(), other.stride()), (part.data_ptr(), other.data_ptr())
    return all(mine == theirs for mine, theirs in pairs)


def _identities(names: dict[str, Any]) -> list[tuple[str, int]]:
    return [(name, id(value)) for name, value in names.items()]


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
