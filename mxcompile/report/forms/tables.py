"""Tables and paragraphs of the text and Markdown forms.

Text is at most `WIDTH` columns wide: cells with names break into lines, other long cells lose their middle.
Markdown keeps whole cells and escapes all markup in them.
"""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Sequence
from typing import Any

from tabulate import MIN_PADDING, tabulate

WIDTH = 120

Table = list[list[str]]
"""Rows of cells; the first row has the headers."""

NAMES = ("layer", "weight", "tensor", "most harm in", "reason", "change")
"""Headers of columns whose cells break into lines and are never cut."""

_MARKUP = re.compile(r"[\\`*\[\]<>|~&]|(?<![^\W_])_|_(?![^\W_])")


def wrapped(paragraphs: Iterable[str]) -> list[str]:
    """Returns `paragraphs` as lines of at most `WIDTH` columns."""
    return [
        line
        for paragraph in paragraphs
        for line in textwrap.wrap(paragraph, WIDTH, subsequent_indent="  ", break_on_hyphens=False)
    ]


def page(paragraphs: Iterable[str], *tables: tuple[Table, Sequence[str]]) -> str:
    """Returns `paragraphs`, then the tables that have rows, each given with its flexible columns, as text."""
    shown = [drawn(fitted(table, flexible)) for table, flexible in tables if len(table) > 1]
    return "\n\n".join(["\n".join(wrapped(paragraphs)), *shown])


def section(title: str, table: Table, most: int | None, others: str) -> str:
    """Returns `title`, then at most `most` rows of `table` and the number of `others`, as text."""
    shown = [table[0], *table[1:][:most]]
    left_out = len(table) - len(shown)
    more = [f"… and {left_out} {others}"] if left_out else []
    return "\n".join([*wrapped([title]), "", drawn(fitted(shown, ("layer",))), *more])


def markdown_page(paragraphs: Iterable[str], *tables: Table) -> str:
    """Returns `paragraphs`, a heading and its list, then the tables that have rows, as Markdown."""
    heading, *facts = paragraphs
    shown = (markdown_table(table) for table in tables if len(table) > 1)
    return "\n\n".join(filter(None, [f"### {markdown(heading)}", bullets(facts), *shown])) + "\n"


def drawn(table: Table, form: str = "simple", **layout: Any) -> str:
    """Returns `table` as text. form, layout: table format and further arguments of `tabulate`."""
    return tabulate(table[1:], headers=table[0], tablefmt=form, disable_numparse=True, **layout)


def fitted(table: Table, flexible: Sequence[str]) -> Table:
    """Returns `table` with `flexible` columns narrowed, the widest first, until lines fit in `WIDTH`."""
    widths = [
        max([len(header) + MIN_PADDING, *map(_columns, cells)]) for header, *cells in zip(*table, strict=True)
    ]
    columns = [table[0].index(name) for name in flexible]
    for _ in range(sum(widths) + 2 * (len(widths) - 1) - WIDTH):
        widest = max(columns, key=widths.__getitem__)
        widths[widest] = max(widths[widest] - 1, 1)
    shorter = [_broken if header in NAMES else _short for header in table[0]]
    return [
        [fit(cell, width) for cell, width, fit in zip(row, widths, shorter, strict=True)] for row in table
    ]


def _columns(cell: str) -> int:
    return max(map(len, cell.split("\n")))


def _short(cell: str, width: int) -> str:
    if _columns(cell) <= width:
        return cell
    tail = (width - 1) * 2 // 3
    return f"{cell[: width - 1 - tail]}…{cell[-tail:]}"


def _broken(name: str, width: int) -> str:
    """Returns `name` in lines: one per listed name; long names break after dots and spaces if possible."""
    names = name.split(", ")
    if len(names) > 1 and len(name) > width:
        listed = [f"{item}," for item in names[:-1]] + names[-1:]
        return "\n".join(_broken(item, width) for item in listed)
    lines = [""]
    for step in re.findall(r".*?[., ]+|.+$", name):
        if lines[-1] and len(lines[-1]) + len(step.rstrip()) > width:
            lines.append("")
        lines[-1] += step
        while len(lines[-1].rstrip()) > width:
            lines[-1:] = [lines[-1][:width], lines[-1][width:]]
    return "\n".join(line.rstrip() for line in lines)


def markdown(text: str) -> str:
    """Returns `text` as one line of Markdown with all markup escaped."""
    return _MARKUP.sub(lambda sign: f"\\{sign[0]}" if sign[0] != "&" else "&amp;", " ".join(text.split()))


def bullets(sentences: Iterable[str]) -> str:
    """Returns `sentences` as a Markdown list."""
    return "\n".join(f"- {markdown(sentence)}" for sentence in sentences)


def markdown_table(table: Table) -> str:
    """Returns `table` as a GitHub table."""
    return drawn([[markdown(cell) for cell in row] for row in table], "github")
