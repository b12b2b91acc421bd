"""What all importers share: formats told apart, errors, comments, and the command."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st
from import_checks import imported

from mxcompile.cli import main
from mxcompile.errors import PolicyError
from mxcompile.policy import Policy
from mxcompile.policy.importers import FORMATS, import_policy

FILES: dict[str, dict[str, Any]] = {
    "te": {
        "s": {
            "enabled": True,
            "layers": {"layer_types": ["fc1"]},
            "transformer_engine": {"DisableFP8Layer": {"enabled": True}, "LogTensorStats": {"enabled": True}},
        }
    },
    "llm-compressor": {"q_stage": {"q_modifiers": {"QuantizationModifier": {"scheme": "MXFP8"}}}},
    "torchao": {"head": None, "_default": {"_type": "Int8WeightOnlyConfig", "_data": {}}},
    "recipe": {"recipe": "DelayedScaling", "fp8_dpa": True},
}


def test_there_is_a_file_for_every_format():
    assert [*FILES] == [*FORMATS]


@pytest.mark.parametrize("name", FILES)
def test_import_detects_the_format_from_the_content(name: str, tmp_path: Path):
    assert imported(FILES[name], tmp_path).tool == FORMATS[name].TOOL
    assert imported(FILES[name], tmp_path) == imported(FILES[name], tmp_path, name)
    assert [key for key, module in FORMATS.items() if module.recognises(FILES[name])] == [name]


@pytest.mark.parametrize("text", ["version: 1\nrules: []\n", "[]", "5", "", "{}", '{"a": {"b": 1}}'])
def test_import_of_unknown_format_raises_policy_error(text: str, tmp_path: Path):
    with pytest.raises(PolicyError, match="neither of te, llm-compressor, torchao"):
        imported(text, tmp_path)


@pytest.mark.parametrize(
    ("text", "piece"),
    [
        (
            b"s: !!python/object/apply:os.mkdir [made]\n",
            ":1: the tag !!python/object/apply:os.mkdir is not allowed",
        ),
        (b"s: &a [*a]\n", ":1: an alias refers to a value that contains it"),
        (b"#" * 10_000_000, ": a policy has at most 262,144 bytes"),
        (b'{"a": null, "a": null}', ": duplicate key 'a': remove one"),
        (b'{"a": 1,\n "b"', ":2: not valid YAML"),
        (b"[" * 100_000, "nested more than 20 deep"),
        (b"\xff", ":1: not UTF-8 text"),
    ],
)
def test_a_file_that_cannot_be_read_is_one_clear_error(text: bytes, piece: str, tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "config.yaml"
    path.write_bytes(text)
    with pytest.raises(PolicyError) as caught:
        import_policy(path)
    assert str(caught.value).startswith(f"{path}:")
    assert piece in str(caught.value)
    assert [*tmp_path.iterdir()] == [path]


@pytest.mark.parametrize(
    ("tool", "message"),
    [
        (None, "cannot be read: No such file"),
        ("llmcompressor", r"unknown format 'llmcompressor' \(did you mean 'llm-compressor'\?\)"),
    ],
)
def test_a_missing_file_or_an_unknown_format_is_an_error(tool: str | None, message: str, tmp_path: Path):
    with pytest.raises(PolicyError, match=message):
        import_policy(tmp_path / "none.yaml", tool)


def test_comments_with_newlines_of_the_source_file_stay_comments(tmp_path: Path):
    section = {**FILES["te"]["s"], "Odd\nversion: 2\n": {"enabled": True}}
    result = imported({"s\n# \u2028rules: 5": section}, tmp_path)
    assert Policy.load(tmp_path / "written.yaml").to_dict()["version"] == 1
    assert any("is an unknown feature, and is left out" in note for note in result.notes)


def test_a_rule_that_others_leave_nothing_is_listed(tmp_path: Path):
    second = {**FILES["te"]["s"], "layers": {"layer_types": ["fc1_proj"]}}
    result = imported({**FILES["te"], "t": second}, tmp_path)
    assert len(result.policy.rules) == 1
    never = "t.layers: never reached: rule 1 of the policy matched all its layers before"
    assert any(never in note for note in result.notes)


def test_import_command_writes_policy_and_lists_entries_left_out(tmp_path: Path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("debug.yaml").write_text(yaml.safe_dump(FILES["te"]))
    assert main(["policy", "import", "debug.yaml"]) == 0
    printed = capsys.readouterr()
    assert Policy.from_dict(yaml.safe_load(printed.out)) == import_policy("debug.yaml").policy
    assert printed.err == (
        "not in the policy: line 9: s.transformer_engine.LogTensorStats: only collects statistics:"
        " see 'mxcompile audit'\n"
    )
    assert main(["policy", "import", "debug.yaml", "--from", "te", "-o", "p.yaml"]) == 0
    assert Path("p.yaml").read_text() == printed.out
    assert main(["policy", "import", "debug.yaml", "-o", "p.yaml"]) == 2
    assert main(["policy", "import", "debug.yaml", "--from", "torchao"]) == 2
    assert main(["policy", "check", "p.yaml"]) == 0


WORDS = st.sampled_from(
    [
        "enabled", "layers", "layer_types", "layer_numbers", "layer_name_regex_pattern", "transformer_engine",
        "FakeQuant", "DisableFP8GEMM", "gemms", "gemms_struct", "gemm", "tensors", "tensors_struct", "tensor",
        "fprop", "activation", "MXFP8E4M3", "q_stage", "q_modifiers", "QuantizationModifier", "scheme",
        "ignore", "config_groups", "targets", "weights", "input_activations", "num_bits", "type", "float",
        "MXFP8",
        "Linear", "re:a", "re:(", "_type", "_data", "FqnToConfig", "fqn_to_config", "_default",
        "MXFPInferenceConfig",
        "quantization_config", "modules_to_not_convert", "a.weight", "x",
    ]
)  # fmt: skip
DATA = st.recursive(
    st.none() | st.booleans() | st.integers(0, 64) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=25,
)


@settings(max_examples=300, deadline=None)
@given(data=DATA, name=st.sampled_from([*FORMATS]))
@example(data={"ignore": True, "config_groups": None}, name="llm-compressor")
def test_any_data_is_a_policy_or_one_error(data: Any, name: str, tmp_path_factory):
    try:
        imported(data, tmp_path_factory.getbasetemp(), name)
    except PolicyError as error:
        assert len(str(error).splitlines()) == 1  # noqa: PT017 - either is right
