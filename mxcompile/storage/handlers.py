"""The table of the operators that act on an `MXTensor` without making it dense (see `operators`)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

Handler = Callable[..., Any]
"""Takes the operator and its arguments; returns the result, or `NotImplemented` for what breaks blocks up."""

HANDLERS: dict[Any, Handler] = {}


def handles(*ops: Any) -> Callable[[Handler], Handler]:
    """Returns a decorator that enters a function into `HANDLERS` for each of `ops`."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(ops, handler))
        return handler

    return register
