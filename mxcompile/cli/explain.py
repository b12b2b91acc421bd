"""``mxcompile explain``: the GEMMs that a compile would quantize, the reasons and costs, without a run."""

from __future__ import annotations

import argparse
from typing import Any

from mxcompile.cli import arguments


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "explain",
        help="report the precision of every product of a model, and why; runs nothing",
        description="Trace a model without memory for its weights and print the report of its compile.",
    )
    arguments.add_model(command)
    arguments.add_policy(command)
    command.add_argument(
        "--target", default="auto", help="chip: cpu, sm_90, sm_100, gfx950, … (default auto)"
    )
    command.add_argument("--inference", action="store_true", help="forward only")
    command.add_argument(
        "--compare",
        metavar="POLICIES",
        help="policies to compare, separated by commas: share, saved bytes, estimated time",
    )
    command.add_argument(
        "--sweep",
        nargs="?",
        type=token_counts,
        const=(),
        metavar="TOKENS",
        help="estimate at these numbers of tokens, such as 256,4096; --output draws them, .png or .svg",
    )
    command.add_argument("--mesh", "--ranks", metavar="AXES", action=_MeshFlag, help=argparse.SUPPRESS)
    arguments.add_output(command, "write the report; .txt .md .json .html chooses the form")
    command.add_argument(
        "--why",
        metavar="LAYER",
        help="print the evidence for the roles of these layers: a glob over whole names, like a policy's",
    )
    command.set_defaults(run=run)


class _MeshFlag(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        parser.error("explain has no --mesh: use the command mesh, such as mxcompile mesh MODEL dp=128,tp=8")


def token_counts(text: str) -> tuple[int, ...]:
    """Returns the sorted numbers of a list with commas, such as ``256,4096``."""
    return tuple(sorted({arguments.positive(word.strip()) for word in text.split(",")}))


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status."""
    from mxcompile.analysis.compare import estimates
    from mxcompile.analysis.explain.explainer import explain
    from mxcompile.analysis.explain.sweep import TOKENS, sweep
    from mxcompile.policy import Policy
    from mxcompile.report import Report
    from mxcompile.report.forms.text import to_summary

    check = Report.form_of if options.sweep is None else arguments.check_picture
    arguments.check_output(options, check)
    if options.why is not None:
        reason = "--why prints the evidence for roles and nothing else"
        arguments.leave_out(options, reason, "output", "compare", "sweep")
    if options.compare is not None:
        arguments.leave_out(options, "--compare prints a table and nothing else", "output", "sweep")
    policies = None if options.compare is None else arguments.policies_of(options.compare)
    with arguments.quiet(), arguments.working(f"tracing {options.model}"):
        model, args, kwargs = arguments.loaded(options)
        named = {"target": options.target, "training": not options.inference, "kwargs": kwargs}
        if policies is not None:
            result: Any = estimates(model, *args, policies=policies, **named)
        else:
            result = explain(model, *args, policy=options.policy, **named)
    if policies is not None:
        print(result)
    elif options.why is not None:
        print("\n\n".join(map(str, result.why(options.why))))
    elif options.sweep is not None:
        swept = sweep(result, options.sweep or TOKENS)
        print(swept)
        if any(rule.match.min_m or rule.match.max_m for rule in Policy.resolve(options.policy).rules):
            print("rules with min_m or max_m were matched at the tokens of the inputs, not at each row's")
        if options.output is not None:
            swept.plot(options.output)
            print(f"drawn: {options.output}")
    else:
        arguments.show(result, options, f"{to_summary(result)}\n\n")
    return 0
