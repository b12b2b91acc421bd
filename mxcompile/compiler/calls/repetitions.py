"""Values of a forward for its repetitions by activation checkpointing.

    first forward    inside regions        each region keeps the values of the calls in it, in their order
    repetition       of the inner region   the calls get these values, in the same order

A region is a call of ``torch.utils.checkpoint.checkpoint``. It can hold several calls of a layer and lie
inside other regions, so that its layers are repeated for each of them. Regions are found through torch's
saved-tensor hooks, and reentrant checkpoints through the frames of their autograd function.
"""

from __future__ import annotations

import inspect
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from typing import Any
from weakref import ReferenceType, WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils.checkpoint import CheckpointFunction, _CheckpointFrame

from mxcompile.compiler.session.frames import frames
from mxcompile.models.rebind import content
from mxcompile.watch.steps import in_backward

_KEPT: WeakKeyDictionary[Any, defaultdict[Hashable, list[Tensor]]] = WeakKeyDictionary()
"""Values by region."""
_READ: WeakKeyDictionary[Any, Counter[Hashable]] = WeakKeyDictionary()
"""Numbers of values read by repetition."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointRegions:
    """The checkpointed regions around a call, out to the innermost one that is repeated.

    first: regions whose first forward runs. repeated: the region that is repeated, or None. repetition: an
    object that differs between repetitions. trained: whether the first forward had gradients enabled.
    """

    first: tuple[Any, ...]
    repeated: Any = None
    repetition: Any = None
    trained: bool = False

    @classmethod
    def around(cls) -> CheckpointRegions:
        """Returns the regions around the call that runs."""
        regions: list[Any] = []
        for hook in _hooks():
            cells = getattr(inspect.unwrap(hook), "__closure__", None) or ()
            for value in (value for cell in cells for value in content(cell)):
                region = value() if isinstance(value, ReferenceType) else value
                if isinstance(region, _CheckpointFrame):
                    if region is not value:
                        return cls(first=(*regions,), repeated=region, repetition=hook, trained=True)
                    regions.append(region)
        if in_backward() or not torch.is_grad_enabled():  # a reentrant region
            for frame in frames():
                if frame.f_code is CheckpointFunction.forward.__code__:
                    regions.append(frame.f_locals["ctx"])
                elif frame.f_code is CheckpointFunction.backward.__code__:
                    region = frame.f_locals["ctx"]
                    return cls(first=(*regions,), repeated=region, repetition=region)
        return cls(first=(*regions,))

    def keep(self, key: Hashable, value: Tensor) -> None:
        """Keeps `value` for repetitions of the call."""
        for region in self.first:
            _KEPT.setdefault(region, defaultdict(list))[key].append(value)

    def kept(self, key: Hashable) -> Tensor | None:
        """Returns the value that the first forward of the call kept, or None if this is the first."""
        if self.repeated is None:
            return None
        values = _KEPT[self.repeated][key] if self.repeated in _KEPT else []
        read = _READ.setdefault(self.repetition, Counter())
        read[key] += 1
        return values[(read[key] - 1) % len(values)] if values else None  # a graph may be kept and run again


def _hooks() -> Iterator[Callable[..., Any]]:
    """Yields the pack functions of this thread's saved-tensor hooks, innermost first."""
    stack: Any = torch._C._autograd
    hooks = stack._top_saved_tensors_default_hooks(True)
    if hooks is not None and stack._saved_tensors_hooks_is_enabled():  # torch gives only the innermost
        stack._pop_saved_tensors_default_hooks()
        try:
            inner = [*_hooks()]
        finally:
            stack._push_saved_tensors_default_hooks(*hooks)
        yield hooks[0]
        yield from inner
