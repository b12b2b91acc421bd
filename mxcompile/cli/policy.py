"""``mxcompile policy``: writes, checks, shows and imports policy files."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from mxcompile.cli.arguments import add_model, add_output, check_output, loaded, quiet, working
from mxcompile.errors import OptionError


def add_to(commands: Any) -> None:
    """Adds the command to the parser."""
    command = commands.add_parser("policy", help="write, check, read and import policy files")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION", help="the action")
    init = actions.add_parser(
        "init",
        help="write a policy to start from, for a model",
        description="Write a commented policy with the layers of a model. It decides as a preset does.",
    )
    add_model(init)
    init.add_argument("--preset", default="nvidia", help="preset to start from (default nvidia)")
    add_output(init, "where to write (default: to the terminal)")
    init.set_defaults(run=run_init)
    check = actions.add_parser(
        "check",
        help="validate a policy file; with a model, list the layers that each rule matches",
        description="Validate a policy file. With a model: list the layers of each rule; a rule that"
        " matches nothing, a name one letter off and a layer just under a size limit are mistakes. Exit"
        " status 1 if there is a mistake.",
    )
    check.add_argument("file", type=Path, help="the policy file")
    add_model(check, "--model")
    check.set_defaults(run=run_check)
    show = actions.add_parser(
        "show",
        help="print the decision of a policy for every layer of a model",
        description="Print precision and formats of every layer of a model, and the rule that decided.",
    )
    show.add_argument("policy", metavar="PRESET|FILE", help="policy to print")
    add_model(show, "--model", required=True)
    show.add_argument("--inference", action="store_true", help="forward only")
    show.set_defaults(run=run_show)
    other = actions.add_parser(
        "import",
        help="convert another tool's configuration into a policy",
        description="Convert a Transformer Engine debug file, an llm-compressor recipe or a torchao FQN map"
        " into a policy. Settings that a policy cannot express are listed, and noted in the file.",
    )
    other.add_argument("file", type=Path, help="the other tool's file")
    other.add_argument(
        "--from",
        dest="tool",
        metavar="TOOL",
        help="te, llm-compressor or torchao (default: detected from the content)",
    )
    add_output(other, "where to write (default: to the terminal)")
    other.set_defaults(run=run_import)
    schema = actions.add_parser("schema", help="print the JSON Schema of policy files, for editors")
    schema.set_defaults(run=run_schema)


def run_init(options: argparse.Namespace) -> int:
    """Runs ``policy init``. Returns the exit status."""
    from mxcompile.policy import Policy
    from mxcompile.rules import layers_of
    from mxcompile.rules.starter import starter

    check_output(options)
    policy = Policy.preset(options.preset)
    layers = layers_of(_report(options, policy).gemms)
    _write(starter(options.preset, layers, options.model), options)
    return 0


def run_check(options: argparse.Namespace) -> int:
    """Runs ``policy check``. Returns the exit status, 1 if the file is invalid or does not fit the model."""
    from mxcompile.errors import PolicyError
    from mxcompile.policy import Policy
    from mxcompile.rules import complaints, layers_of
    from mxcompile.rules.listing import matches

    try:
        policy = Policy.load(options.file)
    except PolicyError as error:
        print(error)
        return 1
    count = len(policy.rules)
    print(f"{options.file}: valid; preset {policy.base.name}, {count} rule{'s' * (count != 1)}")
    if options.model is None:
        return 0
    layers = layers_of(_report(options, Policy(base=policy.base)).gemms)
    print(matches(policy, layers))
    mistakes = complaints(policy, layers)
    if mistakes:
        print("\n" + "\n".join(mistakes))
    return 1 if mistakes else 0


def run_show(options: argparse.Namespace) -> int:
    """Runs ``policy show``. Returns the exit status."""
    from mxcompile.policy import Policy
    from mxcompile.rules.listing import decisions

    policy = Policy.resolve(options.policy)
    print(decisions(policy, _report(options, policy, training=not options.inference).gemms))
    return 0


def run_import(options: argparse.Namespace) -> int:
    """Runs ``policy import``. Returns the exit status."""
    from mxcompile.policy.importers import import_policy

    check_output(options)
    imported = import_policy(options.file, options.tool)
    _write(imported.text(), options)
    for note in imported.notes:
        print(f"not in the policy: {note}", file=sys.stderr)
    return 0


def run_schema(options: argparse.Namespace) -> int:
    """Runs ``policy schema``. Returns the exit status."""
    from mxcompile.policy.schema import json_schema

    print(json_schema(), end="")
    return 0


def _report(options: argparse.Namespace, policy: Any, training: bool = True) -> Any:
    from mxcompile.analysis.explain.explainer import explain

    with quiet(), working(f"tracing {options.model}"):
        model, args, kwargs = loaded(options)
        return explain(model, *args, policy=policy, training=training, strict=False, kwargs=kwargs)


def _write(text: str, options: argparse.Namespace) -> None:
    if options.output is None:
        print(text, end="")
        return
    try:
        # a file that somebody writes during the trace stays
        with options.output.open("w" if options.force else "x", encoding="utf-8") as file:
            file.write(text)
    except OSError as error:
        raise OptionError(f"{options.output}: cannot be written: {error.strerror}") from None
    print(f"written to {options.output}")
