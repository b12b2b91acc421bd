"""``mxcompile tune``: finds the policy that keeps most of a model quantized within an error bound."""

from __future__ import annotations

import argparse
from typing import Any

from mxcompile.cli.arguments import add_output, check_output, quiet, selected, share, show_policy
from mxcompile.cli.audit import add_measured, measured, noted


def words(text: str) -> tuple[str, ...]:
    """Returns the words of a list with commas, such as ``mxfp4,mxfp8``."""
    return tuple(word.strip() for word in text.split(","))


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "tune",
        help="find the policy that quantizes most within an error bound",
        description="Run a model with one layer at a time quantized, find layers and GEMMs that must stay in"
        " BF16 for the bound, and write the policy with the reasons. Exit status 1, and no file, if no policy"
        " fulfils it.",
    )
    add_measured(command)
    command.add_argument(
        "--min-sqnr", type=float, metavar="DB", help="lowest allowed SQNR of a quantized GEMM, in dB"
    )
    command.add_argument(
        "--max-loss-gap",
        type=share,
        metavar="SHARE",
        help="largest allowed gap of the loss to BF16, such as 0.002 or 0.2%%",
    )
    command.add_argument(
        "--among",
        type=words,
        default=(),
        metavar="PRECISIONS",
        help="precisions and presets, separated by commas: each layer gets the cheapest within the bound",
    )
    command.add_argument(
        "--target", default="auto", help="chip whose costs decide with --among: sm_90, gfx950, …"
    )
    add_output(command, "write the policy (default: print it)")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status, 1 if no policy is within the bound."""
    from mxcompile.analysis.tune import Bounds, check_mix, tune

    check_output(options)
    Bounds(min_sqnr=options.min_sqnr, max_loss_gap=options.max_loss_gap)  # checks them
    check_mix(options.among, options.target)
    with quiet(), measured(options) as loaded:
        result = tune(
            loaded.model,
            *loaded.args,
            kwargs=loaded.kwargs,
            **selected(options, "min_sqnr", "max_loss_gap", "policy", "among", "target"),
        )
    return show_policy(noted(result, loaded), options, success=result.met)
