"""Assigns calls to steps. A step ends when an optimizer of the model begins to step.

    forward … backward …  (again, for every micro-batch)  optimizer.step()  │  forward …      the next step

torch's global optimizer hook reports every optimizer of the process; an optimizer counts if it has a
parameter of a watched model. If it steps within the backward, the sample is written after the backward.
Several optimizers of a model share one step, because only a forward begins the next.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Steps:
    """The steps of the models of one watch.

    number: number of the current step. is_open: whether it has begun and not ended. ends: called once per
    step, before an optimizer changes weights.
    """

    def __init__(self, first: int, ends: Callable[[], None]) -> None:
        self.number = first
        self._ends = ends
        self._has_stepped = False
        self.is_open = False
        self._models: WeakSet[nn.Module] = WeakSet()
        self._counted: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()

    @property
    def next(self) -> int:
        """Number of the step of a forward that begins now."""
        return self.number + (self._has_stepped and not in_backward())

    def follow(self, model: nn.Module | None) -> None:
        """Counts the steps of optimizers of `model`, or of all optimizers if it is None."""
        if model is not None:
            self._models.add(model)
        self._counted.clear()

    def listen(self) -> None:
        """Registers the hook on optimizer steps, until the process ends."""
        register_optimizer_step_pre_hook(self._before_step)

    def begin(self) -> int:
        """Marks the begin of a forward. Returns the number of its step."""
        if self._has_stepped:
            self._close()
            self._has_stepped = False
            self.number += 1
        self.is_open = True
        return self.number

    def end(self) -> None:
        """Ends the step, as an optimizer's step does automatically."""
        self._close()
        self._has_stepped = True

    def check(self) -> None:
        """Calls `ends` for the work done until now. The step goes on until an optimizer steps."""
        if self.is_open:
            self._ends()

    def move_to(self, number: int) -> None:
        """Sets the step number of the next forward."""
        self.number = number
        self._has_stepped = False

    def _before_step(self, optimizer: Optimizer, *_: object) -> None:
        if not self.is_open or not self._is_ours(optimizer):
            return
        if not in_backward():
            self._close()
        elif not self._has_stepped:
            torch.autograd.Variable._execution_engine.queue_callback(self._close)
        self._has_stepped = True

    def _close(self) -> None:
        if self.is_open:
            self.is_open = False
            self._ends()

    def _is_ours(self, optimizer: Optimizer) -> bool:
        counted = self._counted.get(optimizer)
        if counted is None:
            owned = {id(parameter) for model in self._models for parameter in model.parameters()}
            stepped = (id(item) for group in optimizer.param_groups for item in group["params"])
            counted = self._counted[optimizer] = not owned or any(item in owned for item in stepped)
        return counted


def in_backward() -> bool:
    """Whether this thread runs a backward. A forward inside it is a recomputation of checkpointing."""
    return torch._C._current_graph_task_id() != -1
