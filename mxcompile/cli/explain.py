"""``mxcompile explain``: what would be quantized, why, and what it would cost, without running anything."""

from __future__ import annotations

import argparse
from typing import Any

from mxcompile.cli.arguments import add_model, add_output, add_policy, check_output


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "explain",
        help="report what would be quantized in a model, and why; runs nothing",
        description="Trace a model without memory for its weights and print the report a compile would give.",
    )
    add_model(command)
    add_policy(command)
    command.add_argument("--target", default="auto", help="cpu, sm_90, sm_100, gfx950, … (default auto)")
    command.add_argument("--inference", action="store_true", help="forward only")
    command.add_argument(
        "--compare",
        metavar="POLICIES",
        help="policies, separated by commas, to set side by side: share, saved bytes, estimated time",
    )
    add_output(command, "write the report; .txt .md .json .html chooses the form")
    command.add_argument(
        "--why",
        metavar="LAYER",
        help="say what the roles of these layers rest on: a glob over whole names, like a policy's",
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from mxcompile.cli.models import load_model
    from mxcompile.cli.quiet import quiet
    from mxcompile.explain.explainer import explain
    from mxcompile.report import form_of

    check_output(options, form_of)
    if options.compare is not None:
        return _compare(options)
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
    if options.why is not None:
        found = report.why(options.why)
        print("\n\n".join(map(str, found)) or f"no layer is called {options.why!r}")
        return 0 if found else 1
    if options.output is None:
        print(report)
    else:
        report.save(options.output)
        print(f"{report.summary.flop_share:.1%} of matmul FLOPs in MXFP8; written to {options.output}")
    return 0


def _compare(options: argparse.Namespace) -> int:
    """Print one row for each policy."""
    from mxcompile.cli.models import load_model
    from mxcompile.cli.quiet import quiet
    from mxcompile.errors import OptionError
    from mxcompile.explain.compare import compare
    from mxcompile.policy import Policy

    if options.output is not None:
        raise OptionError("--compare prints a table: it writes no report, leave out --output")
    policies = [Policy.resolve(word.strip()) for word in options.compare.split(",")]
    with quiet():
        loaded = load_model(options.model, meta=True, batch=options.batch, length=options.length)
        found = compare(
            loaded.model,
            *loaded.args,
            policies=policies,
            target=options.target,
            training=not options.inference,
            kwargs=loaded.kwargs,
        )
    print(found)
    return 0
