"""Steps of several ranks with the pass `gather` and without it, and what the ranks send."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from mxcompile.passes.gather import Gather


def with_and_without(steps: Callable[[], Any]) -> tuple[Any, Any]:
    """What `steps` gives with the pass, and then without it."""
    before = steps()
    Gather.apply = lambda self, graph: None  # type: ignore[method-assign]
    torch._inductor.config.fx_graph_cache = False  # its key does not know of this
    torch._functorch.config.enable_autograd_cache = False
    return before, steps()


@contextmanager
def sends(operation: str, sent: list[tuple[str, int]]) -> Iterator[None]:
    """Dtype and number of elements of what this rank gives Gloo for `operation`, by PyTorch's profiler.

    Of an exchange, rows of one tensor at a time.
    """
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True) as seen:
        yield
    events = [event for event in seen.profiler.kineto_results.events() if event.name() == f"gloo:{operation}"]
    sent.extend((event.dtypes()[0], math.prod(event.shapes()[0])) for event in events)
