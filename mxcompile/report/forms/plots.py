"""Plots with matplotlib, an optional dependency."""

from __future__ import annotations

from typing import Any

from mxcompile.errors import OptionError

SUFFIXES = (".png", ".svg")


def figure(**settings: Any) -> Any:
    """Returns an empty matplotlib figure with `settings`. Raises `OptionError` without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        raise OptionError("plots need matplotlib: pip install matplotlib") from None
    return Figure(layout="constrained", dpi=120, **settings)
