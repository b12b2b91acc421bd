"""How a report is written: as text, Markdown, JSON or a page of HTML.

A form reads `ReportData` and decides nothing. The page is loaded when it is first asked for: it needs
jinja2 and networkx.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from mxcompile.report.forms.json import to_json
from mxcompile.report.forms.text import to_markdown, to_text
from mxcompile.report.record import ReportData


def _text(report: ReportData) -> str:
    return f"{to_text(report)}\n"


def _html(report: ReportData) -> str:
    from mxcompile.report.forms.html import to_html

    return to_html(report)


def framed(page: str) -> str:
    """Returns the HTML `page` as part of another, for notebooks."""
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 40em; border: 0"></iframe>'


FORMS: dict[str, Callable[[ReportData], str]] = {
    ".txt": _text,
    ".md": to_markdown,
    ".json": to_json,
    ".html": _html,
}
"""How a report is written, by file suffix."""
