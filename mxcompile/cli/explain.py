"""``mxcompile explain``: what would be quantized, why, and what it would cost, without running anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_model(command: argparse.ArgumentParser, name: str = "model", **settings: Any) -> None:
    """The arguments that name a model and its inputs: `name` with the `settings` of argparse."""
    command.add_argument(
        name,
        **settings,
        metavar="MODEL",
        help="package.module:factory, which returns (model, args, kwargs), or a directory with a config.json",
    )
    command.add_argument("--batch", type=int, default=1, help="of a config.json's inputs (default 1)")
    command.add_argument("--length", type=int, default=512, help="of a config.json's sequences (default 512)")


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "explain",
        help="report what would be quantized in a model, and why; runs nothing",
        description="Trace a model without memory for its weights and print the report a compile would give.",
    )
    add_model(command)
    command.add_argument("--policy", default="nvidia", metavar="PRESET|FILE", help="default nvidia")
    command.add_argument("--target", default="auto", help="cpu, sm_90, sm_100, gfx950, … (default auto)")
    command.add_argument("--inference", action="store_true", help="forward only")
    command.add_argument(
        "-o",
        "--output",
        type=Path,
        metavar="FILE",
        help="write the report; .txt .md .json .html chooses the form",
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from mxcompile.cli.models import load_model
    from mxcompile.cli.quiet import quiet
    from mxcompile.explain.explainer import explain
    from mxcompile.report import form_of

    if options.output is not None:
        form_of(options.output)
    with quiet():
        loaded = load_model(options.model, meta=True, batch=options.batch, length=options.length)
        report = explain(
            loaded.model,
            *loaded.args,
            policy=options.policy,
            target=options.target,
            training=not options.inference,
            kwargs=loaded.kwargs,
        )
    if options.output is None:
        print(report)
    else:
        report.save(options.output)
        print(f"{report.summary.flop_share:.1%} of matmul FLOPs in MXFP8; written to {options.output}")
    return 0
