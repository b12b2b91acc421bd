"""Finds the weak references that a compile keeps to the user's tensors.

``torch.utils.swap_tensors`` rejects tensors with weak references. Dynamo drops its own at the end of a
compile, but from torch 2.15 on only for backends given by name, not for a `Backend`.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any

from torch._dynamo.output_graph import OutputGraph
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.compiler.session.frames import TORCH, frames

Tables = tuple[MutableMapping[Any, Any], ...]


def weak_references() -> Tables:
    """Returns the tables of weak references to inputs, which guards read until the compile ends."""
    context = TracingContext.try_get()
    if context is None:
        return ()
    describers = (mode.fake_tensor_converter.meta_converter.describer for mode in _modes(context))
    return (
        context.tensor_to_context,
        *(table for describer in describers for table in (describer.lookup_tensor, describer.lookup_storage)),
    )


def _modes(context: TracingContext) -> Iterator[FakeTensorMode]:
    """Yields the fake tensor mode of the backend, and Dynamo's mode of the same graph."""
    if context.fake_mode is not None:
        yield context.fake_mode
    for frame in frames():
        if not frame.f_code.co_filename.startswith(TORCH):
            continue  # a read of a user frame's locals keeps its objects alive
        owner = frame.f_locals.get("self")
        if isinstance(owner, OutputGraph):
            if isinstance(mode := getattr(owner, "_old_fake_mode", None), FakeTensorMode):
                yield mode
            return
