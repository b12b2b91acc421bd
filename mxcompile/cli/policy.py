"""``mxcompile policy``: work with policy files."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    command = commands.add_parser("policy", help="check policy files")
    actions = command.add_subparsers(dest="action", required=True, metavar="ACTION")
    check = actions.add_parser("check", help="validate a policy file")
    check.add_argument("file", type=Path)
    check.set_defaults(run=run_check)
    schema = actions.add_parser("schema", help="print the JSON Schema of policy files, for editors")
    schema.set_defaults(run=run_schema)


def run_check(options: argparse.Namespace) -> int:
    """``policy check``: exit status 1 if the file is not a valid policy."""
    from mxcompile.errors import PolicyError
    from mxcompile.policy import Policy

    try:
        policy = Policy.load(options.file)
    except PolicyError as error:
        print(error)
        return 1
    count = len(policy.rules)
    print(f"{options.file}: valid; preset {policy.base.name}, {count} rule{'s' * (count != 1)}")
    return 0


def run_schema(options: argparse.Namespace) -> int:
    """``policy schema``."""
    from mxcompile.policy import json_schema

    print(json_schema.text(), end="")
    return 0
