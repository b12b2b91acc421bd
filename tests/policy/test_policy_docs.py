"""docs/policies.md: its files are read, its code runs, its commands print what it says they print.

``MXCOMPILE_ACCEPT=1`` writes what the commands print into the page instead.
"""

from __future__ import annotations

import contextlib
import io
import json
import os
import re
import shlex
from pathlib import Path

import pytest

from mxcompile.cli import main
from mxcompile.policy import Gemm, Match, Policy, Role, Saved, schema
from mxcompile.policy.presets import PRESETS

PAGE = Path(__file__).parents[2] / "docs" / "policies.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 256,
    "intermediate_size": 688, "num_hidden_layers": 4, "num_attention_heads": 4, "num_key_value_heads": 2,
    "vocab_size": 1000, "torch_dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path: Path, monkeypatch) -> Path:
    """A working directory with the model of the page."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def printed(command: str) -> str:
    """What the shell line `command` prints on both channels."""
    words = shlex.split(command)
    if words[0] == "cat":
        return Path(words[1]).read_text(encoding="utf-8")
    out = io.StringIO()
    target = words[words.index(">") + 1] if ">" in words else None
    assert words[0] == "mxcompile"
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
        assert main(words[1 : words.index(">")] if target else words[1:]) in (0, 1)
    if target is None:
        return out.getvalue()
    Path(target).write_text(out.getvalue(), encoding="utf-8")
    return ""


def session(text: str) -> str:
    """The console session `text` as it goes when its commands are run."""
    commands = [line for line in text.splitlines() if line.startswith("$ ")]
    lines = []
    for command in commands:
        lines += [command, *(line.rstrip() for line in printed(command.removeprefix("$ ")).splitlines())]
    return "\n".join(lines) + "\n"


def write_if_named(text: str) -> bool:
    """Write a block that begins with ``# name.yaml`` to that file; whether it does."""
    named = re.match(r"# (\S+\.yaml)\n", text)
    if named:
        Path(named[1]).write_text(text, encoding="utf-8")
    return named is not None


@pytest.mark.slow
def test_code_blocks_of_the_policy_page_run_as_written(folder: Path):
    accepted = PAGE.read_text(encoding="utf-8")
    for kind, text in FENCE.findall(accepted):
        match kind:
            case "yaml":
                if not write_if_named(text):
                    Path("unnamed.yaml").write_text(text, encoding="utf-8")
                    Policy.load("unnamed.yaml")
            case "python":
                exec(compile(text, str(PAGE), "exec"), {})
            case "console":
                goes = session(text)
                if os.environ.get("MXCOMPILE_ACCEPT") == "1":
                    accepted = accepted.replace(f"```console\n{text}```", f"```console\n{goes}```")
                else:
                    assert text == goes
            case _:
                raise AssertionError(f"a block of kind {kind}")
    if os.environ.get("MXCOMPILE_ACCEPT") == "1":
        PAGE.write_text(accepted, encoding="utf-8")
    Policy.load("policy.yaml")
    assert Policy.load("mine.yaml").base == PRESETS["nvidia"]


WORDS = {*schema.MATCH, *schema.USE, *schema.TOP, *schema.RULE, *PRESETS, *map(str, (*Role, *Gemm, *Saved))}
WORDS |= {"e4m3", "e5m2", "rceil", "floor", "ceil", "even", "1x32", "32x32"}
WORDS |= {"te", "llm-compressor", "torchao"}


@pytest.mark.parametrize("word", sorted(WORDS))
def test_the_page_has_every_word_of_the_language(word: str):
    assert f"`{word}`" in PAGE.read_text(encoding="utf-8")


def test_name_patterns_of_the_policy_page_match_as_documented():
    rows = re.findall(r"^\| `([^`]+)` \| ([^|]+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    patterns = {pattern.replace(r"\|", "|"): names for pattern, names in rows}
    facts = {
        "lm_head": (["lm_head"], ["lm_head.x", "x.lm_head", "LM_head"]),
        "model.layers.0.*": (["model.layers.0.mlp.up_proj"], ["model.layers.01.x", "model.layers.0"]),
        "*.q_proj": (["model.layers.3.self_attn.q_proj"], ["q_proj", "x.q_proj.y"]),
        "model.layers.?.mlp.*": (["model.layers.9.mlp.up"], ["model.layers.10.mlp.up"]),
        "model.layers.[0-3].*": (["model.layers.3.x"], ["model.layers.4.x", "model.layers.33.x"]),
        r"re:.*\.(q|k)_proj": (["a.q_proj", "a.b.k_proj"], ["a.q_proj.b", "q_proj"]),
    }
    assert {*facts} <= {*patterns}
    for pattern, (matched, others) in facts.items():
        match = Match(name=(pattern,))
        assert all(match.names(name) for name in matched)
        assert not any(match.names(name) for name in others)


@pytest.mark.parametrize("page", ["README.md", "docs/training.md", "docs/audit.md", "docs/first-hour.md"])
def test_policies_of_other_pages_are_valid(page: str, tmp_path: Path):
    text = (PAGE.parents[1] / page).read_text(encoding="utf-8")
    policies = re.findall(r"^```yaml.*?\n(.*?version: 1.*?)^```$", text, re.DOTALL | re.MULTILINE)
    assert policies
    for number, yaml in enumerate(policies):
        file = tmp_path / f"{number}.yaml"
        file.write_text(yaml, encoding="utf-8")
        assert Policy.load(file).rules
