"""Maps statistics to the call that produced them. In backward the call comes from hooks on an autograd node.

Several modules can run one compiled graph, whose statistics have the layer names of the module it was
compiled for. A forward that activation checkpointing repeats is not counted again.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

_NODE = "CompiledFunctionBackward"
_DEPTH = 4
"""Largest number of view nodes between a result and the node of the compiled function."""


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
