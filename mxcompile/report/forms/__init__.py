"""The output forms of a report: text, Markdown, JSON and an HTML page.

A form renders `ReportData` and makes no decisions. The HTML page needs jinja2 and networkx, so its module is
imported on first use.
"""

from __future__ import annotations

from collections.abc import Callable
from html import escape

from mxcompile.report.data.record import ReportData
from mxcompile.report.forms.json import to_json
from mxcompile.report.forms.text import to_markdown, to_text


def _text(report: ReportData) -> str:
    return f"{to_text(report)}\n"


def _html(report: ReportData) -> str:
    from mxcompile.report.forms.html import to_html

    return to_html(report)


def framed(page: str) -> str:
    """Returns the HTML `page` in an iframe, for notebooks."""
    return f'<iframe srcdoc="{escape(page)}" style="width: 100%; height: 40em; border: 0"></iframe>'


FORMS: dict[str, Callable[[ReportData], str]] = {
    ".txt": _text,
    ".md": to_markdown,
    ".json": to_json,
    ".html": _html,
}
"""Functions that render a report, by file suffix."""
