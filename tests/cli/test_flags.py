"""All commands speak alike: one flag means one thing, output goes to ``-o``, exit statuses are the same."""

from __future__ import annotations

import argparse
from collections import defaultdict

import pytest

from mxcompile.cli.main import EXIT_STATUS, every, parser

PARSERS = {
    command.prog.removeprefix("mxcompile").strip() or "mxcompile": command for command in every(parser())
}
LEAVES = {name: command for name, command in PARSERS.items() if command.get_default("run")}
WRITES_NOTHING = {"env", "diff", "inspect", "policy check", "policy show", "policy schema"}
NAMES_ITS_OUTPUT = {"convert"}


def options(name: str) -> list[argparse.Action]:
    return [action for action in LEAVES[name]._actions if action.option_strings and action.dest != "help"]


def test_the_walk_finds_all_commands():
    assert {"env", "explain", "mesh", "audit", "tune", "policy init", "policy import"} <= set(LEAVES)
    assert set(PARSERS) - set(LEAVES) == {"mxcompile", "policy"}


@pytest.mark.parametrize("name", LEAVES)
def test_output_is_asked_for_alike(name: str):
    actions = {flag: action for action in options(name) for flag in action.option_strings}
    assert ("-o" in actions) == ("--output" in actions) == (name not in WRITES_NOTHING | NAMES_ITS_OUTPUT)
    if "-o" not in actions:
        assert "--force" not in actions
        return
    output = actions["-o"]
    assert output is actions["--output"]
    assert output.metavar in ("FILE", "DIR")
    assert ("--force" in actions) == (output.metavar == "FILE")


def test_a_flag_means_the_same_everywhere():
    meanings = defaultdict(lambda: defaultdict(list))
    for name in LEAVES:
        for action in options(name):
            metavar = None if action.dest == "output" else action.metavar  # a file, or a folder of files
            for flag in action.option_strings:
                meanings[flag][action.dest, action.type, metavar, action.nargs].append(name)
    assert {flag: dict(values) for flag, values in meanings.items() if len(values) > 1} == {}


@pytest.mark.parametrize("name", PARSERS)
def test_help_of_every_command_lists_exit_statuses(name: str):
    assert EXIT_STATUS in " ".join(PARSERS[name].format_help().split())
    for action in PARSERS[name]._actions:
        assert action.help, (name, action.dest)
