"""Whose run of a graph a delivery comes from: forward knows, backward is told by a node of autograd.

Several modules can run one compiled code, whose names are those of the module that it was compiled for. A
forward that checkpointing runs again has been counted.
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
"""How many nodes of views can lie between a result and the node of the compiled function."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Call:
    """One run of a compiled graph.

    recorder: takes what is measured. step: number. compiled, running: paths of the module that the code was
    compiled for, and of the one that it runs for. is_sampled: whether statistics are measured. is_repeated:
    whether forward has been counted before.
    """

    recorder: Any
    step: int
    compiled: str = ""
    running: str = ""
    is_sampled: bool = True
    is_repeated: bool = False

    def named(self, layer: str) -> str:
        """Returns the name in this call of the layer called `layer` in the compiled code."""
        inside = layer == self.compiled or layer.startswith(f"{self.compiled}.")
        return self.running + layer.removeprefix(self.compiled) if inside else layer


class _Running(threading.local):
    """The calls that are going on in this thread, the innermost last."""

    def __init__(self) -> None:
        self.calls: list[tuple[Call, bool]] = []


_RUNNING = _Running()


@contextmanager
def forward(call: Call) -> Iterator[None]:
    """Tallies that graphs deliver inside belong to the forward of `call`."""
    _RUNNING.calls.append((call, call.is_repeated))
    try:
        yield
    finally:
        _RUNNING.calls.pop()


def current() -> tuple[Call | None, bool]:
    """The innermost call that is going on, and whether what it delivers has been counted."""
    return _RUNNING.calls[-1] if _RUNNING.calls else (None, False)


def follow(call: Call, results: Any) -> None:
    """Let what the backward of `results` delivers come from `call`, whose forward gave them."""
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
    """The node of the compiled function in autograd's graph; None if no gradient flows through it."""
    given: Sequence[Any] = results if isinstance(results, list | tuple) else [results]
    nodes = [each.grad_fn for each in given if isinstance(each, Tensor) and each.grad_fn is not None]
    for _ in range(_DEPTH):
        for node in nodes:
            if _NODE in node.name():
                return node
        nodes = [after for node in nodes for after, _ in node.next_functions if after is not None]
    return None
