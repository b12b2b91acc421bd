"""Modules for tests, written short: a class says what it has in its first line, and has a forward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn


class Made(nn.Module):
    """Keywords of a subclass name its parts: the sizes of a linear layer, or a function that makes the part.

    Keywords of an instance are further parts, or plain attributes, as they are.
    """

    _parts: dict[str, Any] = {}  # noqa: RUF012 - subclasses have their own

    def __init_subclass__(cls, **parts: Any) -> None:
        super().__init_subclass__()
        cls._parts = cls._parts | parts

    def __init__(self, **parts: Any) -> None:
        super().__init__()
        built = {
            name: nn.Linear(*part) if isinstance(part, tuple) else part()
            for name, part in self._parts.items()
            if name not in parts
        }
        for name, part in (built | parts).items():
            setattr(self, name, part)


def calling(forward: Callable[..., Any], **parts: Any) -> nn.Module:
    """A module of `parts` whose forward is the function `forward` of it and its inputs."""
    return type("Written", (Made,), {"forward": forward})(**parts)
