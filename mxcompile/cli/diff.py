"""``mxcompile diff``: the changes between two reports, or two audits; for continuous integration."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mxcompile.cli.arguments import share
from mxcompile.errors import OptionError, not_allowed

FailCondition = tuple[str, float]
"""A condition for exit status 1: a word of `_CONDITIONS`, and the value that must be exceeded."""


def decibels(text: str) -> float:
    """Returns a level, ``1.5`` or ``1.5dB``, as a number."""
    try:
        return float(text.lower().removesuffix("db"))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of dB, such as 25 or 25dB") from None


DEFAULT = [("fallback", 0.0), ("share-drop", 0.01)]
"""The conditions without ``--fail-on``."""

_CONDITIONS: dict[str, Callable[[str], float] | None] = {
    "fallback": None,
    "share-drop": share,
    "sqnr-drop": decibels,
}
"""Words of ``--fail-on``, and the parsers of their limits."""


def condition(text: str) -> FailCondition:
    """Returns the condition of the text ``fallback``, ``share-drop=1%`` or ``sqnr-drop=1dB``."""
    word, equals, limit = text.partition("=")
    if word not in _CONDITIONS:
        raise argparse.ArgumentTypeError(not_allowed("condition", word, _CONDITIONS))
    read = _CONDITIONS[word]
    if (read is None) == bool(equals):
        usage = f"{word} takes no limit" if read is None else f"{word} needs a limit, such as {word}=1"
        raise argparse.ArgumentTypeError(usage)
    most = 0.0 if read is None else read(limit)
    if not 0 <= most < math.inf:  # no fall exceeds NaN or infinity, and an equal report exceeds less than 0
        raise argparse.ArgumentTypeError(f"{word} must be a number of at least 0, found {limit!r}")
    return word, most


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "diff",
        help="list the changes between two reports, or two audits",
        description="Compare two reports or two audits of a model, written as JSON. Exit status 1 if a layer"
        " fell back to BF16, the quantized share of the FLOPs fell by more than a percentage point, or no"
        " layer is in both; --fail-on replaces the first two. Exit status 2 if a file is neither a report"
        " nor an audit.",
    )
    command.add_argument("old", type=Path, metavar="OLD.json", help="a report or an audit, as JSON")
    command.add_argument(
        "new", type=Path, metavar="NEW.json", help="a report or an audit, the same kind as OLD.json"
    )
    command.add_argument(
        "--format", choices=("text", "markdown"), default="text", help="form of the output (default text)"
    )
    command.add_argument(
        "--fail-on",
        type=condition,
        action="append",
        metavar="CONDITION",
        help="changes that fail: fallback, share-drop=1%% (of the quantized FLOPs) or, for audits,"
        " sqnr-drop=1dB (of a GEMM); may be repeated (default: fallback and share-drop=1%%)",
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status."""
    from mxcompile.analysis.audit.diff import compare_audits
    from mxcompile.analysis.audit.measure import Audit
    from mxcompile.report import Report
    from mxcompile.report.data import schema
    from mxcompile.report.diff import compare
    from mxcompile.report.files import load

    old, new = options.old, options.new
    kind, new_kind = (load(path, "file", schema.kind_of) for path in (old, new))
    if kind != new_kind:
        raise OptionError(
            f"{old} is of kind {kind}, {new} of kind {new_kind}: compare two reports or two audits"
        )
    of_numerics = None if kind == "report" else compare_audits(Audit.load(old), Audit.load(new))
    of_model = of_numerics.report if of_numerics else compare(Report.load(old), Report.load(new))
    conditions = options.fail_on or DEFAULT
    if of_numerics is None and any(word == "sqnr-drop" for word, _ in conditions):
        raise OptionError(
            "--fail-on sqnr-drop compares audits, and these files are reports: mxcompile audit writes audits"
        )
    changes = of_numerics or of_model
    print(changes.to_markdown() if options.format == "markdown" else changes)
    drops = {"fallback": len(of_model.fell_back), "share-drop": of_model.share_drop}
    drops |= {} if of_numerics is None else {"sqnr-drop": of_numerics.sqnr_drop}
    failed = of_model.is_unrelated or any(drops[word] > limit for word, limit in conditions)
    return 1 if failed else 0
