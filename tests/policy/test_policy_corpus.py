"""Broken policy files: each is one `PolicyError`, in one line, with the place and what is meant."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st
from policy_cases import CORPUS, EXECUTABLE, VALID, shadowed

from mxcompile.errors import PolicyError
from mxcompile.policy import Policy


def written(folder: Path, text: str | bytes) -> Path:
    path = folder / "policy.yaml"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


ENDLESS_S = 20
"""Processor time after which a file counts as one that hangs its reader; the slowest takes half a second."""


@pytest.mark.parametrize("name", CORPUS)
def test_a_broken_policy_is_one_clear_error(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    broken = CORPUS[name]
    path = written(tmp_path, broken.text)
    start = time.process_time()
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    assert time.process_time() - start < ENDLESS_S
    error, message = caught.value, str(caught.value)

    prefix = f"{path}: " if broken.line is None else f"{path}:{broken.line}: "
    assert message.startswith(prefix)
    text = message.removeprefix(prefix)
    assert broken.piece in text
    assert len(text.splitlines()) == 1
    assert len(text) < 400
    if broken.nearest is not None:
        assert f"(did you mean {broken.nearest!r}?)" in text
    else:
        assert "did you mean" not in text
    assert error.__cause__ is None
    assert error.__context__ is None or error.__suppress_context__
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize("name", EXECUTABLE)
def test_the_executable_policies_run_in_a_careless_loader(name: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    yaml.unsafe_load(EXECUTABLE[name].text)
    assert (tmp_path / "executed").exists()


@pytest.mark.parametrize("name", VALID)
def test_a_valid_policy_loads(name: str, tmp_path: Path):
    text, num_rules = VALID[name]
    assert len(Policy.load(written(tmp_path, text)).rules) == num_rules


def test_a_shadow_that_takes_too_many_steps_to_show_is_let_pass(tmp_path: Path):
    names = ", ".join(f"n{i}" for i in range(800))
    modules = ", ".join(f"M{i}" for i in range(800))
    text = shadowed("{name: '*'}", f"{{name: [{names}], module: [{modules}]}}")
    assert len(Policy.load(written(tmp_path, text)).rules) == 2


@pytest.mark.parametrize("expression", ["(a+)+", "(a|aa)+", "(a*)*b", ".*" * 12 + "b", "(a?){40}a{40}"])
def test_an_expression_that_backtracks_for_ever_is_not_tried_when_a_file_is_read(
    expression: str, tmp_path: Path
):
    path = written(tmp_path, shadowed(f"{{name: 're:{expression}'}}", f"{{name: {'a' * 40}c}}"))
    start = time.process_time()
    assert len(Policy.load(path).rules) == 2
    assert time.process_time() - start < ENDLESS_S


@pytest.mark.parametrize(
    ("name", "piece"),
    [
        ("missing.yaml", "cannot be read: No such file or directory"),
        ("folder", "cannot be read: Is a directory"),
        ("/dev/zero", "at most 262,144 bytes"),
    ],
)
def test_policy_path_that_is_not_a_file_raises_policy_error(name: str, piece: str, tmp_path: Path):
    (tmp_path / "folder").mkdir()
    path = tmp_path / name
    with pytest.raises(PolicyError) as caught:
        Policy.load(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert piece in str(caught.value)


def num_error_lines(make: Callable[[], Policy]) -> int:
    """Of the `PolicyError` that `make` raises; 0 if it makes a policy."""
    try:
        make()
    except PolicyError as error:
        return len(str(error).splitlines())
    return 0


FRAGMENTS = [
    "version", "preset", "rules", "match", "use", "role", "qkv", "name", "min_k", "mxfp8", "1", ":",
    ": ", "- ", "\n", "\n  ", "\n    ", "{", "}", "[", "]", ", ", "&a ", "*a", "!!int ", "? ", "'",
    '"', "#", "|", "~", "%", "\t", "\\x", "é", "\ufeff", "\0",
]  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(raw=st.binary(max_size=60) | st.lists(st.sampled_from(FRAGMENTS)).map(lambda p: "".join(p).encode()))
def test_any_bytes_are_a_policy_or_one_error(raw: bytes, tmp_path_factory):
    folder = tmp_path_factory.getbasetemp()
    assert num_error_lines(lambda: Policy.load(written(folder, raw))) <= 1


WORDS_OR_JUNK = st.sampled_from([f for f in FRAGMENTS if f.isalpha()]) | st.text(max_size=5)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | WORDS_OR_JUNK
DATA = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(SCALARS, inner, max_size=3),
)


@settings(max_examples=300, deadline=None)
@given(rule=DATA, top=DATA)
def test_any_data_is_a_policy_or_one_error(rule: object, top: object):
    whole_rule = {"match": rule, "use": top}
    assert num_error_lines(lambda: Policy.from_dict(top)) <= 1
    assert num_error_lines(lambda: Policy.from_dict({"version": 1, "rules": [rule]})) <= 1
    assert num_error_lines(lambda: Policy.from_dict({"version": 1, "rules": [whole_rule]})) <= 1
