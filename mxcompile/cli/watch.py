"""``mxcompile watch``: a summary of the samples of a run, in a terminal or as a page."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import Any

from mxcompile.cli.arguments import add_output, check_output, positive

_POLL_S = 1.0


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "watch",
        help="summarize the samples of a watched run",
        description="Read the samples that a watch has written: NaN and Inf, the operands whose casts are"
        " worst, and the operands that changed most. Exit status 1 if the samples have NaN or Inf.",
    )
    command.add_argument(
        "file", type=Path, metavar="FILE", help="a file that a watch wrote: samples, or operands (.pt)"
    )
    command.add_argument(
        "-n", "--top", type=positive, default=10, metavar="N", help="show N operands (default: 10)"
    )
    command.add_argument(
        "--back", type=positive, default=10, metavar="N", help="compare with N samples before (default: 10)"
    )
    command.add_argument("-f", "--follow", action="store_true", help="print new samples as the file grows")
    add_output(command, "write a page with a map of layers and steps; .html (default: print a summary)")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status, 1 if a sample has NaN or Inf."""
    from mxcompile.report.files import form_of, save
    from mxcompile.watch import Dump
    from mxcompile.watch.summary import SampleFile, lines

    if options.file.suffix == ".pt":
        print("\n".join(Dump.load(options.file).lines()))
        return 0

    check_output(options, lambda path: form_of(path, {".html": None}, "page"))
    file = SampleFile.load(options.file)
    while True:
        if options.output is not None:
            save(options.output, file.page(), "page")
            print(f"{len(file.samples)} samples; written to {options.output}", flush=True)
        else:
            print("\n".join(lines(file, options.top, options.back)), flush=True)
        if not options.follow:
            return 1 if file.findings else 0
        while not file.has_grown():
            time.sleep(_POLL_S)
