"""``mxcompile codegen``: the kernels that a compile would run on a GPU that is not in this machine."""

from __future__ import annotations

import argparse
from typing import Any

from mxcompile.cli import arguments


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "codegen",
        help="generate and cross-compile the kernels for a GPU, without the GPU",
        description="Generate, cross-compile and count the kernels that a training step of a model would"
        " run on a GPU, on a machine without it. Exit status 1 if a kernel could not run there.",
    )
    arguments.add_model(command)
    arguments.add_policy(command)
    command.add_argument("--target", default="sm_100", help="the GPU (default sm_100)")
    command.add_argument("--inference", action="store_true", help="forward only")
    command.add_argument(
        "--compare",
        metavar="POLICIES",
        help="policies to compare, separated by commas: estimates side by side",
    )
    command.add_argument(
        "--rates", metavar="FILE", help="a JSON file of measured rates, which replace the built-in rates"
    )
    command.add_argument(
        "--attention", default="auto", help="backend of attentions without a mask: cudnn or flash"
    )
    command.add_argument(
        "--mesh", metavar="AXES", help="the code of rank 0 of a mesh that need not exist, such as dp=128,tp=8"
    )
    arguments.add_parallel(command)
    arguments.add_folder(command, "where to write wrappers, kernels, assembly, binaries and a summary")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status, 1 if a kernel could not run."""
    from mxcompile.offline import codegen, side_by_side

    arguments.check_folder(options.output)
    others = [] if options.compare is None else arguments.policies_of(options.compare)
    with arguments.quiet(), arguments.working(f"generating {options.target} code of {options.model}"):
        model, args, kwargs = (
            arguments.loaded(options) if options.mesh is None else arguments.of_ranks(options)
        )
        results = [
            codegen(
                model,
                *args,
                out_dir=None if number else options.output,
                training=not options.inference,
                policy=policy,
                kwargs=kwargs,
                **arguments.selected(options, "target", "rates", "attention", "mesh", "parallel"),
            )
            for number, policy in enumerate([options.policy, *others])
        ]
    print(results[0])
    if options.compare is not None:
        print(f"\n{side_by_side({result.report.summary.policy: result for result in results})}")
    return 1 if any(result.problems for result in results) else 0
