"""Progress bars that write nowhere and keep their descriptions."""

from __future__ import annotations

import importlib
import io
from typing import Any

import pytest
from tqdm import tqdm


def recorded_bars(monkeypatch: pytest.MonkeyPatch, module: str) -> list[Any]:
    """The bars that `module` makes from here on; `descriptions` has their descriptions, oldest first."""
    bars: list[Any] = []

    class Bar(tqdm):  # type: ignore[type-arg]
        def __init__(self, **settings: Any) -> None:
            super().__init__(**{**settings, "disable": False, "file": io.StringIO()})
            self.descriptions = [self.desc]
            bars.append(self)

        def set_description(self, desc: str | None = None, refresh: bool | None = True) -> None:
            super().set_description(desc, refresh)
            self.descriptions.append(self.desc)

    monkeypatch.setattr(importlib.import_module(module), "tqdm", Bar)
    return bars
