"""Which step a call belongs to: a step ends when an optimizer of the model starts to step.

    forward … backward …  (again, for every micro-batch)  optimizer.step()  │  forward …      the next step

The hooks are torch's own, of all optimizers of the process; an optimizer counts if it has a parameter of a
watched model. One that steps within the backward has its sample written when the backward is over. Several
optimizers of one model are one step, for a step begins with a forward.
"""

from __future__ import annotations

from collections.abc import Callable
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook


class Steps:
    """The steps of the models that one watch looks at.

    number: of the current step. is_open: whether it has begun and not ended. ends: called before an optimizer
    changes weights, once a step.
    """

    def __init__(self, first: int, ends: Callable[[], None]) -> None:
        self.number = first
        self._ends = ends
        self._has_stepped = False
        self.is_open = False
        self._models: WeakSet[nn.Module] = WeakSet()
        self._known: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()

    def follow(self, model: nn.Module | None) -> None:
        """Count the steps of optimizers of `model`; without one, of all optimizers."""
        if model is not None:
            self._models.add(model)
        self._known.clear()

    def listen(self) -> None:
        """Hear of the steps of optimizers, from now to the end of the process."""
        register_optimizer_step_pre_hook(self._before_step)

    def begin(self) -> int:
        """A forward begins. Returns the number of the step that it belongs to."""
        if self._has_stepped:
            self._close()
            self._has_stepped = False
            self.number += 1
        self.is_open = True
        return self.number

    def end(self) -> None:
        """The step is over: what an optimizer's step says by itself."""
        self._close()
        self._has_stepped = True

    def check(self) -> None:
        """Everything of the step has run; the step goes on until an optimizer steps."""
        if self.is_open:
            self._ends()

    def move_to(self, number: int) -> None:
        """The next forward belongs to step `number`."""
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
        known = self._known.get(optimizer)
        if known is None:
            owned = {id(parameter) for model in self._models for parameter in model.parameters()}
            stepped = (id(each) for group in optimizer.param_groups for each in group["params"])
            known = self._known[optimizer] = not owned or any(each in owned for each in stepped)
        return known


def in_backward() -> bool:
    """Whether this thread runs a backward: a forward in there is checkpointing's, run again."""
    return torch._C._current_graph_task_id() != -1
