"""Pieces that several sections of the HTML form use."""

from __future__ import annotations

import linecache
from html import escape

from mxcompile.formats import is_quantized

SORTABLE = 'data-sort tabindex="0" role="columnheader" aria-sort="none"'
"""Attributes of a header whose column sorts its table."""


def tile(label: str, value: str, note: str = "", share: float | None = None) -> str:
    """A figure with its name, what to compare it with, and a bar for a share of 1."""
    bar = ""
    if share is not None:
        bar = f'<div class="bar"><i style="width:{min(max(share, 0), 1):.1%}"></i></div>'
    small = f"<small>{escape(note)}</small>" if note else ""
    return f'<div class="tile"><span>{escape(label)}</span><b>{escape(value)}</b>{bar}{small}</div>'


def role_badge(role: str) -> str:
    """A role with its colour."""
    return f'<span class="role role-{escape(role)}">{escape(role)}</span>'


def source_line(source: str) -> str:
    """``file:line``, with that line of the file where it is Python here."""
    if not source:
        return ""
    file, _, line = source.rpartition(":")
    code = linecache.getline(file, int(line)).strip() if file.endswith(".py") and line.isdecimal() else ""
    shown = f"<pre><code>{escape(code)}</code></pre>" if code else ""
    return f'<span class="source">{escape(source)}</span>{shown}'


def tone(precision: str) -> str:
    """The class that gives the precision of a record its look; "" for none."""
    return "quantized" if precision and is_quantized(precision) else escape(precision)
