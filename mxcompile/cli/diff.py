"""``mxcompile diff``: what changed between two reports; for continuous integration."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "diff",
        help="what changed between two reports",
        description="Compare two reports of a model, written as JSON. Exit status 1 if a layer fell back from"
        " MXFP8, 0 if none did, 2 if a file is no report.",
    )
    command.add_argument("old", type=Path, metavar="OLD.json")
    command.add_argument("new", type=Path, metavar="NEW.json")
    command.add_argument("--format", choices=("text", "markdown"), default="text", help="default text")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from mxcompile.report import Report
    from mxcompile.report.diff import compare

    found = compare(Report.load(options.old), Report.load(options.new))
    print(found.to_markdown() if options.format == "markdown" else found)
    return 1 if found.fell_back else 0
