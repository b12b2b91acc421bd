"""``mxcompile mesh``: the graphs, traffic and memory of one rank of a mesh, on a machine without the mesh."""

from __future__ import annotations

import argparse
from typing import Any

from mxcompile.cli.arguments import (
    add_model,
    add_output,
    add_parallel,
    add_policy,
    check_output,
    check_picture,
    leave_out,
    of_ranks,
    positive,
    show,
)
from mxcompile.errors import OptionError


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser(
        "mesh",
        help="report what one rank of a mesh compiles, sends and holds; runs nothing",
        description="Trace a model as rank 0 of a mesh that need not exist, and print its shards, collectives"
        " and memory; or compare all meshes of so many ranks. Exit status 1 if none of them fits.",
    )
    add_model(command)
    command.add_argument(
        "mesh",
        metavar="AXES|RANKS",
        help="axes, such as dp=128,tp=8, which a factory may take: explain one rank; or a number of ranks,"
        " such as 1024: compare the meshes of so many ranks, which needs --links, the fastest first",
    )
    add_policy(command)
    command.add_argument("--target", default="auto", help="cpu, sm_90, sm_100, gfx950, … (default auto)")
    command.add_argument("--inference", action="store_true", help="forward only")
    add_parallel(command)
    command.add_argument(
        "--links",
        metavar="SPEEDS",
        help="estimate a step with these links, 10⁹ bytes/s each way of a GPU: nvlink=900,net=50",
    )
    command.add_argument(
        "--node", type=positive, metavar="GPUS", help="how many GPUs NVLink joins (default 8)"
    )
    command.add_argument(
        "--schedule", metavar="NAME", help="of an axis pp: 1F1B (default), GPipe, Interleaved1F1B"
    )
    command.add_argument(
        "--microbatches",
        type=positive,
        metavar="N",
        help="of a step, with an axis pp (default: as many as pp)",
    )
    command.add_argument(
        "--memory", type=float, metavar="GB", help="10⁹ bytes of a GPU, for RANKS (default by --target)"
    )
    add_output(command, "write the report, .txt or .json; of RANKS draw the meshes that fit, .png or .svg")
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Runs the command. Returns the exit status, 1 if no mesh of the given number of ranks fits."""
    from mxcompile.analysis.explain.rank import explain_rank, sweep_meshes
    from mxcompile.cli.quiet import quiet, working
    from mxcompile.mesh.report import form_of

    asked: dict[str, Any] = {
        "policy": options.policy,
        "target": options.target,
        "training": not options.inference,
        "parallel": options.parallel,
        "links": options.links,
        "node": options.node,
    }
    if not options.mesh.isdecimal():
        leave_out(options, "one mesh is explained whatever it needs", "memory")
        check_output(options, form_of)
        asked |= {"mesh": options.mesh, "schedule": options.schedule, "microbatches": options.microbatches}
        with quiet(), working(f"tracing {options.model} on one rank of {options.mesh}"):
            model, args, kwargs = of_ranks(options)
            report = explain_rank(model, *args, kwargs=kwargs, **asked)
        show(report, options)
        return 0
    if options.links is None:
        raise OptionError("meshes are sorted by time, which needs --links, such as nvlink=900,net=50")
    leave_out(options, "meshes of a number of ranks have no stages", "schedule", "microbatches")
    check_output(options, check_picture)
    with quiet():
        model, args, kwargs = of_ranks(options)
        swept = sweep_meshes(
            model, *args, kwargs=kwargs, ranks=int(options.mesh), memory_gb=options.memory, **asked
        )
    print(swept)
    if options.output is not None and swept.fitting:
        swept.plot(options.output)
        print(f"drawn: {options.output}")
    return 0 if swept.fitting else 1
