"""The JSON form: the fields of the report's dataclasses, a record per line. `report.data.schema` reads it."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from mxcompile.report.data.record import SCHEMA, ReportData


def to_json(report: ReportData) -> str:
    """Returns `report` as JSON, with kind and schema version."""
    records = ",\n  ".join(_json(gemm) for gemm in report.gemms)
    outlines = ",\n  ".join(_json(outline) for outline in report.graph)
    return (
        f'{{"schema": {SCHEMA},\n "kind": "report",\n "summary": {_json(report.summary)},\n'
        f' "gemms": [\n  {records}],\n "graph": [\n  {outlines}]}}\n'
    )


def _json(value: Any) -> str:
    return json.dumps(dataclasses.asdict(value), ensure_ascii=False)
