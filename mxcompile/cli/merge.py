"""``mxcompile merge``: joins the reports of several ranks."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mxcompile.cli.arguments import add_output, check_output, show


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "merge",
        help="merge the reports of many ranks into one",
        description="Merge reports of one model, as JSON, of ranks or pipeline stages: every layer once.",
    )
    command.add_argument(
        "reports", type=Path, nargs="+", metavar="REPORT.json", help="reports of one model, as JSON"
    )
    add_output(command, "write the report; .txt .md .json .html chooses the form (default: print it)")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status."""
    from mxcompile.report import Report
    from mxcompile.report.forms.words import count

    check_output(options, Report.form_of)
    report = Report.merged([Report.load(path) for path in options.reports])
    layers = len({gemm.name for gemm in report.gemms})
    show(report, options, f"{count(len(options.reports), 'report')}, {count(layers, 'layer')}; ")
    return 0
