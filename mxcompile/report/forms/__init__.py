"""The output forms of a report: text, Markdown, JSON and an HTML page.

A form renders `ReportData` and makes no decisions. The HTML page needs jinja2 and networkx, so its module is
imported on first use.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from typing import Any

from mxcompile.report.data.record import SCHEMA, ReportData
from mxcompile.report.forms.text import to_markdown, to_text


def to_json(report: ReportData) -> str:
    """Returns `report` as JSON, a record per line. `report.data.schema` reads it."""
    records = ",\n  ".join(_json(gemm) for gemm in report.gemms)
    outlines = ",\n  ".join(_json(outline) for outline in report.graph)
    return (
        f'{{"schema": {SCHEMA},\n "kind": "report",\n "summary": {_json(report.summary)},\n'
        f' "gemms": [\n  {records}],\n "graph": [\n  {outlines}]}}\n'
    )


def _json(value: Any) -> str:
    return json.dumps(dataclasses.asdict(value), ensure_ascii=False)


def _html(report: ReportData) -> str:
    from mxcompile.report.forms.html import to_html

    return to_html(report)


FORMS: dict[str, Callable[[ReportData], str]] = {
    ".txt": lambda report: f"{to_text(report)}\n",
    ".md": to_markdown,
    ".json": to_json,
    ".html": _html,
}
"""Functions that render a report, by file suffix."""
