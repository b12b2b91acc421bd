"""Options are read when ``torch.compile`` is called: what changes later changes nothing that is compiled."""

from __future__ import annotations

import copy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.blocks import FeedForward
from torch import nn

from mxcompile import Backend
from mxcompile.compiler import backend
from mxcompile.compiler.reporting import attempts
from mxcompile.compiler.session.options import Options
from mxcompile.errors import OptionError

QUANTIZED, KEPT = "version: 1\npreset: nvidia\n", "version: 1\npreset: bf16\n"


@pytest.fixture
def received(monkeypatch: pytest.MonkeyPatch) -> list[Options]:
    """The options of each graph that Dynamo asks the backend to compile; none is."""
    received_options: list[Options] = []

    def kept(gm: Any, _: Any, options: Options, *_others: Any, **_names: Any) -> Any:
        received_options.append(options)
        return gm.forward

    monkeypatch.setattr(backend, "compile_graph", kept)
    monkeypatch.setattr(attempts, "check_call", lambda *_: None)  # it reports that nothing was compiled
    return received_options


def compiled(options: Any, **settings: Any) -> Any:
    return torch.compile(FeedForward(), backend="mxfp8", options=options, **settings)


X = torch.zeros(4, 64)


def presets(received: list[Options]) -> list[str]:
    return [options.policy.base.name for options in received]


def test_an_edited_policy_file_is_a_new_policy(received: list[Options], tmp_path: Path):
    """Of the same name, for a model of the same class; what it says twice is compiled once."""
    path = tmp_path / "policy.yaml"
    for text in (QUANTIZED, KEPT, KEPT, QUANTIZED):
        path.write_text(text, encoding="utf-8")
        compiled({"policy": str(path)})(X)
    assert presets(received) == ["nvidia", "bf16"]


def test_a_policy_file_is_read_before_the_first_call(received: list[Options], tmp_path: Path):
    path = tmp_path / "policy.yaml"
    path.write_text(QUANTIZED, encoding="utf-8")
    run = compiled({"policy": path})
    path.write_text("no policy", encoding="utf-8")
    run(X)
    run(torch.zeros(7, 64))
    assert set(presets(received)) == {"nvidia"}
    assert len(received) == 2  # for another number of rows


CHANGES: dict[str, Callable[[dict[str, Any]], None]] = {
    "preset": lambda options: options["policy"].update(preset="bf16"),
    "rule": lambda options: options["policy"]["rules"][0]["use"].update(fprop="bf16"),
    "option": lambda options: options.update(strict=True),
    "inductor": lambda options: options["inductor"]["aot_inductor.metadata"].update(key="another"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_dict_is_for_later_models(change: str, received: list[Options]):
    rule = {"match": {"name": "up"}, "use": {"fprop": "mxfp8"}}
    options = {
        "policy": {"version": 1, "preset": "nvidia", "rules": [rule]},
        "inductor": {"aot_inductor.metadata": {"key": "one"}},
    }
    before = compiled(options)
    expected = Options.parse(None, copy.deepcopy(options))
    CHANGES[change](options)
    before(X)
    compiled(options)(X)
    assert received == [expected, Options.parse(None, options)]
    assert received[0] != received[1]


def test_models_with_equal_options_share_code(received: list[Options], tmp_path: Path):
    """By content, from wherever it comes."""
    path = tmp_path / "policy.yaml"
    path.write_text(QUANTIZED, encoding="utf-8")
    for policy in (path, str(path), "nvidia", {"version": 1, "preset": "nvidia"}):
        compiled({"policy": policy})(X)
    assert len(received) == 1


def test_a_copy_of_a_compiled_model_has_its_options(received: list[Options]):
    policy = {"version": 1, "preset": "hybrid"}
    run = compiled({"policy": policy})
    policy["preset"] = "bf16"
    copy.deepcopy(run)(X)
    assert presets(received) == ["hybrid"]


def test_a_backend_has_options_of_its_own():
    settings = {"aot_inductor.metadata": {"key": "one"}}
    value = Backend(inductor=settings)
    settings["aot_inductor.metadata"]["key"] = "another"
    assert dict(value.options.inductor) == {"aot_inductor.metadata": {"key": "one"}}
    with pytest.raises(OptionError, match=r"torch.compile got options: pass this to Backend"):
        value(torch.fx.symbolic_trace(nn.Identity()), [X], options={"strict": True})


def test_other_backends_receive_their_options_unchanged():
    calls: list[Any] = []

    def other(gm: Any, _: Any, **arguments: Any) -> Any:
        calls.append(arguments)
        return gm.forward

    options = {"policy": "of its own"}
    torch.compile(FeedForward(), backend=other, options=options)(X)
    assert calls[0]["options"] is options


PROGRAM = """
import pathlib, sys
import torch
path = pathlib.Path(sys.argv[1])
path.write_text("version: 1\\npreset: hybrid\\n")
run = torch.compile(torch.nn.Linear(64, 64), backend="mxfp8", options={"policy": str(path)})
path.write_text("version: 1\\npreset: bf16\\n")
from mxcompile.compiler import backend
from mxcompile.compiler.reporting import attempts
backend.compile_graph = lambda gm, _, options, *others, **names: print(options.policy.base.name) or gm.forward
run(torch.zeros(4, 64))
"""


@pytest.mark.slow
def test_options_are_read_early_in_the_first_call_of_a_process(tmp_path: Path):
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "policy.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["hybrid"], done.stderr
