"""``mxcompile blame``: finds the layers that make the difference between policies, and excludes them."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from mxcompile.cli.arguments import add_output, check_output, positive, quiet, selected, share, show_policy
from mxcompile.cli.audit import add_measured, measured, noted


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "blame",
        help="find the layers and GEMMs that make the difference between two policies",
        description="Run a model with single layers and GEMMs under one policy and the rest under another,"
        " print the effect of each on the gradients, the loss and the output, the worst first, and write a"
        " policy without the worst. The model is not changed. Exit status 1 if no GEMM makes a difference,"
        " or the model is not finite without the policy either.",
    )
    add_measured(command)
    command.add_argument(
        "--against", default="bf16", metavar="PRESET|FILE", help="policy to compare with (default bf16)"
    )
    command.add_argument(
        "--of",
        choices=("gradients", "loss", "output"),
        help="the quantity to compare (default: the gradients if there is a loss, else the output)",
    )
    command.add_argument(
        "--remove",
        type=share,
        default=0.5,
        metavar="SHARE",
        help="share of the difference that the policy removes (default 50%%)",
    )
    command.add_argument(
        "--max-runs", type=positive, default=64, metavar="RUNS", help="most runs of the model (default 64)"
    )
    command.add_argument(
        "--repeats",
        type=positive,
        help="runs of each part, with other random numbers (default 3 if the model draws any, else 1)",
    )
    add_output(command, "write the policy without the worst (default: print it)")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status, 1 if no GEMM makes a difference."""
    from mxcompile.analysis.blame import blame, check, check_different
    from mxcompile.policy import Policy

    check_output(options)
    check(options.max_runs, options.repeats, options.remove)
    policy, against = Policy.resolve(options.policy), Policy.resolve(options.against)
    check_different(policy, against)
    with quiet(), measured(options) as loaded:
        result = blame(
            loaded.model,
            *loaded.args,
            policy=policy,
            against=against,
            announce=lambda sentence: print(sentence, file=sys.stderr),
            kwargs=loaded.kwargs,
            **selected(options, "of", "remove", "max_runs", "repeats"),
        )
    return show_policy(noted(result, loaded), options, success=bool(result.parts))
