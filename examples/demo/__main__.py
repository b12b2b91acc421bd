"""Train a small Llama in BF16, MXFP8 and MXFP4 and compare the losses: `make demo`.

With ``--serve``, train once and compare ways to serve: `make demo ARGS=--serve`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from demo import show_serving, show_training
from demo.progress import progress_bar
from mxcompile.cli.arguments import add_folder, check_plots, positive
from mxcompile.errors import MXCompileError


def main(arguments: list[str] | None = None) -> int:
    """Returns the exit status: 0, 1 if a gap is too large or the control's too small, 2 for invalid use."""
    options = _parser().parse_args(arguments)
    try:
        check_plots(options.output)
        with progress_bar("starting") as bar:
            if options.serve:
                show_serving.serve(options, bar)
                return 0
            runs = show_training.train_all(options, bar)
        return show_training.conclude(runs, options.output)
    except MXCompileError as error:
        print(f"demo: {error}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="demo",
        description="Train a small Llama on the Python standard library's source: in BF16, in MXFP8 and, as a"
        " control that should be seen to be worse, in MXFP4, each with the same seeds and data. Prints what"
        " was compiled and the losses, writes report.html, .json and .txt, losses.json and losses.png. Exit"
        " status 1 if the mean gap of the validation loss exceeds 0.25 %, or the control's does not.",
    )
    parser.add_argument(
        "--policy",
        action="append",
        metavar="PRESET|FILE",
        help="a preset (nvidia, ocp, hybrid) or a policy file; more than one is compared (default nvidia)",
    )
    parser.add_argument("--steps", type=positive, help="training steps per run (default 150)")
    parser.add_argument("--seeds", type=positive, help="runs of each (default 2)")
    parser.add_argument("--device", help="where to train, such as cuda (default: cuda if there is one)")
    add_folder(parser, "where to write (default demo_out)", default=Path("demo_out"))
    parser.add_argument(
        "--serve",
        action="store_true",
        help="instead: train once, then serve in BF16, with weights stored in MXFP8, and with activations in"
        " MXFP8 too; prints perplexity, the logits' gap, bytes and tokens a second",
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
