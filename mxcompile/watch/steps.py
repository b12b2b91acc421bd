"""Assigns statistics to calls, and calls to steps. A step ends when an optimizer of the model begins to step.

    forward … backward …  (again, for every micro-batch)  optimizer.step()  │  forward …      the next step

torch's global optimizer hook reports every optimizer of the process; an optimizer counts if it has a
parameter of a watched model. If it steps within the backward, the sample is written after the backward.
Several optimizers of a model share one step, because only a forward begins the next.

In backward the call comes from hooks on an autograd node. Several modules can run one compiled graph, whose
statistics have the layer names of the module it was compiled for. A forward that activation checkpointing
repeats is not counted again.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

log = logging.getLogger(__name__)

_PATIENCE = 3
"""Steps of optimizers of other parameters, without one of the model, before a warning."""
_NODE = "CompiledFunctionBackward"
_DEPTH = 4
"""Largest number of view nodes between a result and the node of the compiled function."""


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
        self._counted: WeakSet[Optimizer] = WeakSet()
        self._others = 0

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
        if optimizer in self._counted:
            return True
        owned = {id(parameter) for model in self._models for parameter in model.parameters()}
        stepped = (id(item) for group in optimizer.param_groups for item in group["params"])
        if not owned or any(item in owned for item in stepped):
            self._counted.add(optimizer)
            return True
        self._others += 1  # it may get parameters of the model later
        if self._others == _PATIENCE and not self._counted:
            log.warning(
                "no optimizer with a parameter of the model has stepped, but others have. Rules with steps"
                " and watches count no step of theirs: if one steps copies of the weights, call Watch.step()"
                " after its steps"
            )
        return False


def in_backward() -> bool:
    """Whether this thread runs a backward. A forward inside it is a recomputation of checkpointing."""
    return torch._C._current_graph_task_id() != -1


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One run of a compiled graph.

    recorder: `Recorder` that takes the statistics. step: step number. compiled, running: path of the module
    that the code was compiled for, and of the module that runs it. is_sampled: whether statistics are
    measured. is_repeated: whether the forward has been counted before.
    """

    recorder: Any
    step: int
    compiled: str = ""
    running: str = ""
    is_sampled: bool = True
    is_repeated: bool = False

    def named(self, layer: str) -> str:
        """Returns the name in the running module of a layer named `layer` in the compiled code."""
        inside = layer == self.compiled or layer.startswith(f"{self.compiled}.")
        return self.running + layer.removeprefix(self.compiled) if inside else layer


class _Running(threading.local):
    """The active calls of this thread, the innermost last, each with whether it was counted before."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, bool]] = []


_RUNNING = _Running()


@contextmanager
def forward(call: Call) -> Iterator[None]:
    """Assigns the statistics delivered in this context to the forward of `call`."""
    _RUNNING.calls.append((call, call.is_repeated))
    try:
        yield
    finally:
        _RUNNING.calls.pop()


def current() -> tuple[Call | None, bool]:
    """Returns the innermost active call, and whether its statistics were counted before."""
    return _RUNNING.calls[-1] if _RUNNING.calls else (None, False)


def follow(call: Call, results: Any) -> None:
    """Registers hooks that assign the statistics of the backward of `results` to `call`."""
    node = _node(results)
    if node is None:
        return

    def before(_: Any) -> None:
        _RUNNING.calls.append((call, False))

    def after(*_: Any) -> None:
        _RUNNING.calls.pop()

    node.register_prehook(before)
    node.register_hook(after)


def _node(results: Any) -> Any:
    """Returns the compiled function's node in the autograd graph; None if no gradient flows through it."""
    outputs: Sequence[Any] = results if isinstance(results, list | tuple) else [results]
    nodes = [x.grad_fn for x in outputs if isinstance(x, Tensor) and x.grad_fn is not None]
    for _ in range(_DEPTH):
        for node in nodes:
            if _NODE in node.name():
                return node
        nodes = [after for node in nodes for after, _ in node.next_functions if after is not None]
    return None
