"""``mxcompile mesh``: the graphs, traffic and memory of one rank of a mesh, on a machine without the mesh."""

from __future__ import annotations

import argparse
from typing import Any

from mxcompile.cli import arguments
from mxcompile.errors import OptionError


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "mesh",
        help="report the shards, collectives and memory of one rank of a mesh; runs nothing",
        description="Trace a model as rank 0 of a mesh that need not exist, and print its shards, collectives"
        " and memory; or compare all meshes of a number of ranks. Exit status 1 if no mesh fits.",
    )
    arguments.add_model(command)
    command.add_argument(
        "mesh",
        metavar="AXES|RANKS",
        help="axes, such as dp=128,tp=8, which a factory may take: explain one rank; or a number of ranks,"
        " such as 1024: compare all meshes of 1024 ranks, the fastest first, which needs --links",
    )
    arguments.add_policy(command)
    command.add_argument(
        "--target", default="auto", help="chip: cpu, sm_90, sm_100, gfx950, … (default auto)"
    )
    command.add_argument("--inference", action="store_true", help="forward only")
    arguments.add_parallel(command)
    command.add_argument(
        "--links",
        metavar="SPEEDS",
        help="estimate a step with these link speeds, 10⁹ bytes/s a GPU each way: nvlink=900,net=50",
    )
    command.add_argument(
        "--node",
        type=arguments.positive,
        metavar="GPUS",
        help="number of GPUs that NVLink connects (default 8)",
    )
    command.add_argument(
        "--schedule",
        metavar="NAME",
        help="pipeline schedule, with an axis pp: 1F1B (default), GPipe, Interleaved1F1B",
    )
    command.add_argument(
        "--microbatches",
        type=arguments.positive,
        metavar="N",
        help="micro-batches of a step, with an axis pp (default: the size of pp)",
    )
    command.add_argument(
        "--memory",
        dest="memory_gb",
        type=float,
        metavar="GB",
        help="memory of a GPU in 10⁹ bytes, with RANKS (default: memory of --target)",
    )
    arguments.add_output(
        command, "write the report, .txt or .json; with RANKS draw the meshes that fit, .png or .svg"
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status, 1 if no mesh of the given number of ranks fits."""
    from mxcompile.analysis.explain.rank import explain_rank, sweep_meshes
    from mxcompile.mesh import RankReport

    named = arguments.selected(options, "policy", "target", "parallel", "links", "node")
    named["training"] = not options.inference
    if not options.mesh.isdecimal():
        arguments.leave_out(
            options, "a memory limit selects among the meshes of RANKS, and this is one mesh", "memory_gb"
        )
        arguments.check_output(options, RankReport.form_of)
        named |= arguments.selected(options, "mesh", "schedule", "microbatches")
        with arguments.quiet(), arguments.working(f"tracing {options.model} on one rank of {options.mesh}"):
            model, args, kwargs = arguments.of_ranks(options)
            report = explain_rank(model, *args, kwargs=kwargs, **named)
        arguments.show(report, options)
        return 0
    if options.links is None:
        raise OptionError(
            "meshes of a number of ranks are sorted by time: give --links, such as nvlink=900,net=50"
        )
    arguments.leave_out(options, "meshes of a number of ranks have no pipeline", "schedule", "microbatches")
    arguments.check_output(options, arguments.check_picture)
    with arguments.quiet():
        model, args, kwargs = arguments.of_ranks(options)
        swept = sweep_meshes(
            model, *args, kwargs=kwargs, ranks=int(options.mesh), memory_gb=options.memory_gb, **named
        )
    print(swept)
    if options.output is not None and swept.fitting:
        swept.plot(options.output)
        print(f"drawn: {options.output}")
    return 0 if swept.fitting else 1
