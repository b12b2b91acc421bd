"""The entry point of the command line: selects the command and converts errors to exit statuses.

`EXIT_STATUS` lists them.
"""

from __future__ import annotations

import argparse
import io
import os
import re
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from mxcompile import __version__
from mxcompile.cli import (
    audit,
    blame,
    codegen,
    convert,
    diff,
    env,
    explain,
    inspect,
    merge,
    mesh,
    policy,
    tune,
    watch,
)
from mxcompile.errors import MXCompileError, nearest, not_allowed

COMMANDS = (env, explain, mesh, diff, merge, audit, tune, blame, watch, codegen, policy, convert, inspect)

EXIT_STATUS = "exit status: 0 success, 1 a negative result, 2 wrong usage, 130 interrupted"


class Parser(argparse.ArgumentParser):
    """A parser that suggests the nearest known word, with the usage of the right command."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses like argparse, but unknown arguments are errors of this command, not of its parent."""
        options, unknown = super().parse_known_args(args, namespace)
        if unknown:
            flags = self._option_string_actions
            words = (f"{word}{nearest(word.partition('=')[0], flags)}" for word in unknown)
            self.error(f"unrecognized arguments: {' '.join(words)}")
        return options, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            noun = action.metavar if isinstance(action.metavar, str) else "value"
            raise argparse.ArgumentError(action, not_allowed(noun.lower(), value, action.choices))


def parser() -> argparse.ArgumentParser:
    """Returns the parser with all commands."""
    root = Parser(
        prog="mxcompile",
        description='Train and serve PyTorch models in OCP MXFP8: torch.compile(model, backend="mxfp8").',
    )
    root.add_argument("--version", action="version", version=f"mxcompile {__version__}")
    commands = root.add_subparsers(dest="command", required=True, metavar="COMMAND", help="the command")
    for command in COMMANDS:
        command.add_to(commands)
    for subparser in every(root):
        subparser.epilog = EXIT_STATUS
    return root


def every(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """Yields `parser` and the parsers of its commands and their actions."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                yield from every(inner)


def _in_flags(message: str, root: argparse.ArgumentParser, command: str) -> str:
    """Returns `message` with flags of `command` in place of Python arguments in backquotes."""
    parsers = (candidate for candidate in every(root) if candidate.prog.split()[1:2] == [command])
    actions = (action for candidate in parsers for action in candidate._actions if action.option_strings)
    flags = {action.dest: max(action.option_strings, key=len) for action in actions}
    return re.sub(r"`(\w+)`", lambda name: flags.get(name[1], name[0]), message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command. Returns the exit status."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # its encoding may lack "×"; stderr never fails
    root = parser()
    options = root.parse_args(arguments)
    try:
        status = int(options.run(options))
        sys.stdout.flush()
        return status
    except MXCompileError as error:
        print(f"mxcompile: {_in_flags(str(error), root, options.command)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("\nmxcompile: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # the reader of the output, such as `head`, has exited
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except OSError as error:  # a path that cannot even be looked up: too long, or in a folder without rights
        where = "" if error.filename is None else f"{error.filename}: "
        print(f"mxcompile: {where}{error.strerror or error}", file=sys.stderr)
        return 2
