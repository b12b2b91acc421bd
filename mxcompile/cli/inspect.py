"""``mxcompile inspect``: the contents of a checkpoint, from its headers."""

from __future__ import annotations

import argparse
from collections import defaultdict
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
    from mxcompile.checkpoint.layouts import weights_in
    from mxcompile.formats import labels
    from mxcompile.report.data.fold import spelled
    from mxcompile.report.forms.tables import drawn, fitted
    from mxcompile.report.forms.words import byte_count, count

    checkpoint = Checkpoint.open(options.path)
    layout, weights = weights_in(checkpoint)
    sizes = {w.name: sum(checkpoint.entries[name].num_bytes for name in w.tensors) for w in weights}
    alike: defaultdict[tuple[str, str], list[str]] = defaultdict(list)
    for weight in weights:
        kind = str(checkpoint.entries[weight.tensors[0]].dtype).removeprefix("torch.")
        kind += "" if weight.is_read else ", not read"
        kind = kind if weight.form is None else f"{weight.precision} {weight.form.elem}"
        alike[kind, "×".join(map(str, weight.shape))].append(weight.name)
    precisions = labels(weight.precision for weight in weights)
    total, stored = sum(sizes.values()), sum(sizes[weight.name] for weight in weights if weight.stored)
    share = f", {stored / total:.1%} of it in {precisions}" if total else ""
    print(f"{options.path}: {count(len(checkpoint.files), 'file')}, {byte_count(total)}{share}")
    print(f"layout: {layout}\n")
    rows = [
        [spelled(names), kind, shape, str(len(names)), byte_count(sum(map(sizes.__getitem__, names)))]
        for (kind, shape), names in alike.items()
    ]
    headers = ["tensor", "stored as", "shape", "number", "bytes"]
    print(drawn(fitted([headers, *rows], ("tensor",))))
    return 0
