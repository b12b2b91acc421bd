"""``mxcompile explain``: what would be quantized, why, and what it would cost, without running anything."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcompile.cli.arguments import (
    add_model,
    add_output,
    add_policy,
    check_matplotlib,
    check_output,
    of_ranks,
    policies_of,
    positive,
    sizes,
)
from mxcompile.errors import OptionError, not_allowed

if TYPE_CHECKING:
    from mxcompile.report import Report


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
    command.add_argument(
        "--sweep",
        nargs="?",
        type=token_counts,
        const=(),
        metavar="TOKENS",
        help="estimate at these numbers of tokens, such as 256,4096; --output draws them, .png or .svg",
    )
    command.add_argument(
        "--mesh",
        metavar="AXES",
        help="explain one rank of a mesh that need not exist, such as dp=128,tp=8, which a factory may take",
    )
    command.add_argument(
        "--parallel",
        metavar="WAYS",
        help="how to parallelise a plain model on --mesh: fsdp, ep, tp=llama, several with commas",
    )
    command.add_argument(
        "--links",
        metavar="SPEEDS",
        help="estimate a step on --mesh with these links, 10⁹ bytes/s each way of a GPU: nvlink=900,net=50",
    )
    command.add_argument(
        "--node", type=positive, metavar="GPUS", help="how many GPUs NVLink joins (default 8)"
    )
    command.add_argument(
        "--schedule", metavar="NAME", help="of --mesh with an axis pp: 1F1B (default), GPipe, Interleaved1F1B"
    )
    command.add_argument(
        "--microbatches",
        type=positive,
        metavar="N",
        help="of a step, with an axis pp (default: as many as pp)",
    )
    command.add_argument(
        "--ranks",
        type=positive,
        metavar="N",
        help="with --sweep and --links: meshes of so many ranks that fit, fastest first; --output draws them",
    )
    command.add_argument(
        "--memory", type=float, metavar="GB", help="10⁹ bytes of a GPU, for --ranks (default by --target)"
    )
    add_output(command, "write the report; .txt .md .json .html chooses the form")
    command.add_argument(
        "--why",
        metavar="LAYER",
        help="say what the roles of these layers rest on: a glob over whole names, like a policy's",
    )
    command.set_defaults(run=run)


def token_counts(text: str) -> tuple[int, ...]:
    """``256,4096`` as numbers, ascending."""
    return tuple(sorted({positive(word.strip()) for word in text.split(",")}))


def _picture(path: Path) -> None:
    if path.suffix not in (".png", ".svg"):
        raise OptionError(f"plot {str(path)!r}: {not_allowed('suffix', path.suffix, ('.png', '.svg'))}")
    check_matplotlib()


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    from mxcompile.analysis.compare import estimates
    from mxcompile.analysis.explain.explainer import explain
    from mxcompile.cli.quiet import quiet, working
    from mxcompile.models.named import load_model
    from mxcompile.report import form_of
    from mxcompile.report.forms.text import to_summary

    if options.ranks is not None:
        return _meshes(options)
    if options.mesh is not None:
        return _rank(options)
    for name, value in {
        "--parallel": options.parallel,
        "--links": options.links,
        "--node": options.node,
        "--memory": options.memory,
        "--schedule": options.schedule,
        "--microbatches": options.microbatches,
    }.items():
        if value is not None:
            raise OptionError(f"{name} is about the ranks of a mesh: give --mesh, such as dp=128,tp=8")
    check_output(options, form_of if options.sweep is None else _picture)
    if options.why is not None:
        _check_alone(options)
    if options.compare is not None and options.output is not None:
        raise OptionError("--compare prints a table: it writes no report, leave out --output")
    policies = None if options.compare is None else policies_of(options.compare)
    with quiet(), working(f"tracing {options.model}"):
        loaded = load_model(options.model, **sizes(options))
        asked: dict[str, Any] = {
            "target": options.target,
            "training": not options.inference,
            "kwargs": loaded.kwargs,
        }
        if policies is not None:
            compared = estimates(loaded.model, *loaded.args, policies=policies, **asked)
        else:
            report = explain(loaded.model, *loaded.args, policy=options.policy, **asked)
    if policies is not None:
        print(compared)
        return 0
    if options.why is not None:
        print("\n\n".join(map(str, report.why(options.why))))
        return 0
    if options.sweep is not None:
        return _sweep(options, report)
    if options.output is None:
        print(report)
    else:
        report.save(options.output)
        print(f"{to_summary(report)}\n\nwritten to {options.output}")
    return 0


def _rank(options: argparse.Namespace) -> int:
    """Print the report of one rank of a mesh."""
    from mxcompile.analysis.explain.explainer import explain
    from mxcompile.cli.quiet import quiet, working
    from mxcompile.mesh.report import form_of

    others = {
        "--why": options.why,
        "--compare": options.compare,
        "--sweep": options.sweep,
        "--memory": options.memory,
    }
    for name, value in others.items():
        if value is not None:
            raise OptionError(f"--mesh prints the report of one rank: leave out {name}")
    check_output(options, form_of)
    with quiet(), working(f"tracing {options.model} on one rank of {options.mesh}"):
        asked: dict[str, Any] = {
            "policy": options.policy,
            "target": options.target,
            "training": not options.inference,
            "mesh": options.mesh,
            "parallel": options.parallel,
            "links": options.links,
            "node": options.node,
            "schedule": options.schedule,
            "microbatches": options.microbatches,
        }
        model, args, kwargs = of_ranks(options)
        report = explain(model, *args, kwargs=kwargs, **asked)
    if options.output is None:
        print(report)
    else:
        report.save(options.output)
        print(f"written to {options.output}")
    return 0


def _meshes(options: argparse.Namespace) -> int:
    """Print the meshes of --ranks that fit, the fastest first."""
    from mxcompile.analysis.explain.meshes import sweep_meshes
    from mxcompile.cli.quiet import quiet

    if options.sweep is None:
        raise OptionError("--ranks looks at all meshes of so many ranks: give --sweep too, or one --mesh")
    if options.links is None:
        raise OptionError("--ranks sorts meshes by time, which needs --links, such as nvlink=900,net=50")
    given = {
        "--mesh": options.mesh,
        "--why": options.why,
        "--compare": options.compare,
        "--schedule": options.schedule,
        "--microbatches": options.microbatches,
        "the tokens of --sweep": options.sweep or None,
    }
    for name, value in given.items():
        if value is not None:
            raise OptionError(f"--ranks prints a table of meshes: leave out {name}")
    check_output(options, _picture)
    asked: dict[str, Any] = {
        "ranks": options.ranks,
        "links": options.links,
        "target": options.target,
        "parallel": options.parallel,
        "policy": options.policy,
        "training": not options.inference,
        "node": options.node,
        "memory_gb": options.memory,
    }
    with quiet():
        model, args, kwargs = of_ranks(options)
        swept = sweep_meshes(model, *args, kwargs=kwargs, **asked)
    print(swept)
    if options.output is not None and swept.fitting:
        swept.plot(options.output)
        print(f"drawn: {options.output}")
    return 0 if swept.fitting else 1


def _sweep(options: argparse.Namespace, report: Report) -> int:
    """Print the estimates at other numbers of tokens, and draw them."""
    from mxcompile.analysis.explain.sweep import TOKENS, sweep
    from mxcompile.policy import Policy

    result = sweep(report, options.sweep or TOKENS)
    print(result)
    if any(rule.match.min_m or rule.match.max_m for rule in Policy.resolve(options.policy).rules):
        print("rules that ask for min_m or max_m were held against the tokens of the inputs alone")
    if options.output is not None:
        result.plot(options.output)
        print(f"drawn: {options.output}")
    return 0


def _check_alone(options: argparse.Namespace) -> None:
    """Raises `OptionError` if --why is given with what makes another output."""
    others = {"--output": options.output, "--compare": options.compare, "--sweep": options.sweep}
    for name, value in others.items():
        if value is not None:
            raise OptionError(f"--why prints what roles rest on and nothing else: leave out {name}")
