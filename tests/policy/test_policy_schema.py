"""The JSON Schema of policy files accepts what `Policy` accepts, and refuses what is broken in structure."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from policy_cases import CORPUS, VALID
from test_policy_values import POLICIES

from mxcompile.cli import main
from mxcompile.errors import PolicyError
from mxcompile.policy import Policy, schema
from mxcompile.policy.yaml_data import YamlProblem, load

jsonschema = pytest.importorskip("jsonschema")
VALIDATOR = jsonschema.Draft202012Validator(json.loads(schema.PATH.read_text(encoding="utf-8")))

NOT_STRUCTURE = (
    "shadowed: ",
    "types: fraction for version",
    "meaning: no size between",
    "meaning: more than the run",
    "meaning: more than all steps",
    "meaning: an empty range of steps",
    "meaning: a quantized GEMM of",
    "meaning: bad regular",
    "meaning: repetition",
    "meaning: regular",
    "hidden: name",
)
"""Mistakes that take more than the type of a value to see."""


def data_of(text: str | bytes) -> Any:
    """What a file's `text` holds; None where it is no data at all."""
    try:
        return load(text.encode() if isinstance(text, str) else text)[0]
    except YamlProblem:
        return None


STRUCTURE = {
    name: data
    for name, broken in CORPUS.items()
    if not name.startswith(NOT_STRUCTURE) and (data := data_of(broken.text)) is not None
}


def test_policy_schema_is_valid_json_schema():
    jsonschema.Draft202012Validator.check_schema(VALIDATOR.schema)


def test_schema_file_equals_the_generated_schema():
    assert schema.PATH.read_text(encoding="utf-8") == schema.json_schema()


def test_policy_schema_command_prints_the_schema(capsys):
    assert main(["policy", "schema"]) == 0
    assert capsys.readouterr().out == schema.json_schema()


@pytest.mark.parametrize("name", VALID)
def test_a_valid_policy_validates(name: str):
    VALIDATOR.validate(data_of(VALID[name][0]))


@settings(max_examples=60, deadline=None)
@given(written=POLICIES)
def test_every_policy_that_is_written_validates(written: Policy):
    VALIDATOR.validate(written.to_dict())


def test_most_of_the_corpus_is_about_structure():
    assert len(STRUCTURE) >= 75


@pytest.mark.parametrize("name", STRUCTURE)
def test_a_policy_broken_in_structure_does_not_validate(name: str):
    assert not VALIDATOR.is_valid(STRUCTURE[name])


def test_every_key_is_described_to_an_editor():
    keys = [*schema.MATCH.values(), *schema.USE.values()]
    assert all(key.json["description"].endswith(".") for key in keys)


TRIED: list[Any] = [
    None, True, 0, 1, 32, -1, 1.5, "", "a.*", "re:a", "qkv", "attn_scores", "mxfp8", "bf16", "e5m2", "floor",
    "32x32", "transcode", "Linear", "torch.Linear", [], ["qkv"], ["mxfp8"], [1], {}, {"name": "a"},
]  # fmt: skip


def accepted(policy: dict[str, Any]) -> bool:
    try:
        Policy.from_dict(policy)
    except PolicyError:
        return False
    return True


@pytest.mark.parametrize("key", schema.MATCH)
def test_schema_and_reader_agree_on_every_match_key(key: str):
    for value in TRIED:
        policy = {"version": 1, "rules": [{"match": {key: value}, "use": "bf16"}]}
        assert VALIDATOR.is_valid(policy) == accepted(policy), value


@pytest.mark.parametrize("key", schema.USE)
def test_schema_and_reader_agree_on_every_use_key(key: str):
    preset = "nvfp4" if key == "hadamard" else "nvidia"  # which has no transform
    for value in TRIED:
        for role in ("qkv", "attn_values"):
            rules = [{"match": {"role": role}, "use": {key: value}}]
            policy = {"version": 1, "preset": preset, "rules": rules}
            assert VALIDATOR.is_valid(policy) == accepted(policy), value


@pytest.mark.parametrize("key", schema.TOP)
def test_schema_and_reader_agree_on_every_top_key(key: str):
    for value in [*TRIED, "ocp", [{"match": {"name": "a"}, "use": "bf16"}], [{"match": {"name": "a"}}]]:
        policy = {"version": 1, key: value}
        assert VALIDATOR.is_valid(policy) == accepted(policy), value
