"""``mxcompile inspect``: the contents of a checkpoint, from its headers."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "inspect",
        help="list the tensors of a safetensors checkpoint",
        description="Print the tensors of a safetensors file, or of a directory of them: format"
        " (MXFP8, MXINT8, MXFP4 or NVFP4), layout, shapes and bytes. Headers are read and checked, values"
        " are not.",
    )
    command.add_argument("path", metavar="FILE", type=Path, help="a .safetensors file or a directory")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status."""
    from mxcompile.checkpoint.files import Checkpoint
    from mxcompile.checkpoint.layouts import contents
    from mxcompile.formats import labels
    from mxcompile.report.forms.tables import drawn, fitted
    from mxcompile.report.forms.words import byte_count, count

    checkpoint = Checkpoint.open(options.path)
    layout, groups = contents(checkpoint)
    precisions = labels(group.precision for group in groups)
    total = sum(group.num_bytes for group in groups)
    stored = sum(group.num_bytes for group in groups if group.precision)
    share = f", {stored / total:.1%} of it in {precisions}" if total else ""
    print(f"{options.path}: {count(len(checkpoint.files), 'file')}, {byte_count(total)}{share}")
    print(f"layout: {layout}\n")
    rows = [
        [g.name, g.kind, "×".join(map(str, g.shape)), str(g.count), byte_count(g.num_bytes)] for g in groups
    ]
    headers = ["tensor", "stored as", "shape", "number", "bytes"]
    print(drawn(fitted([headers, *rows], ("tensor",))))
    return 0
