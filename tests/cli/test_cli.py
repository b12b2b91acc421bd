"""The command line: exit status 0 done, 1 the answer is no, 2 misuse; and what is said."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig

import mxcompile
from mxcompile.cli import main
from mxcompile.cli.arguments import working
from mxcompile.cli.main import COMMANDS
from mxcompile.lowering.cpu.features import features
from mxcompile.lowering.targets import TARGETS
from mxcompile.models.named import load_model
from mxcompile.policy import Policy

NAMES = [command.__name__.rpartition(".")[2] for command in COMMANDS]


def test_env_lists_versions_and_kernels_of_each_target(capsys: pytest.CaptureFixture[str]):
    assert main(["env"]) == 0
    output = capsys.readouterr().out
    for name in ("python", "torch", "triton", "torchao", "C++ compiler"):
        assert f"\n{name}" in f"\n{output}"
    rows = {line.split()[0]: line for line in output.splitlines() if line.strip()}
    assert set(TARGETS) <= set(rows)
    assert rows["cpu"].rstrip().endswith("cpu")
    multiplied = {"cpu_bf16": "BF16", "cpu_fp32": "FP32", "cpu": "BF16" if features().bf16 else "FP32"}
    for name, dtype in multiplied.items():
        assert f"the vendor's {dtype} GEMM" in rows[name]


def test_env_exits_with_1_without_gpu_and_compiler(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    """On a machine without a GPU nothing can be compiled then."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["env"]) == 1
    assert "the CPU backend of torch.compile needs one" in capsys.readouterr().out


def test_policy_check_accepts_a_valid_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "policy.yaml"
    Policy.preset("ocp").dump(path)
    assert main(["policy", "check", str(path)]) == 0
    assert "valid; preset ocp, 0 rules" in capsys.readouterr().out


def test_policy_check_names_line_and_nearest_word(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "policy.yaml"
    path.write_text("version: 1\nrules:\n  - match: {role: qvk}\n    use: mxfp8\n", encoding="utf-8")
    assert main(["policy", "check", str(path)]) == 1
    streams = capsys.readouterr()
    assert "policy.yaml:3" in streams.out + streams.err
    assert "unknown role 'qvk' (did you mean 'qkv'?)" in streams.out + streams.err


MISUSE = [
    [],
    ["polcy"],
    ["policy"],
    ["policy", "check"],
    ["watch", "-n", "0", "x"],
    ["watch", "-n", "x", "x"],
    ["env", "x"],
    ["diff", "x", "x", "--fail-on", "share-drop=nan"],
    ["diff", "x", "x", "--fail-on", "share-drop=inf"],
    ["diff", "x", "x", "--fail-on", "sqnr-drop=-1dB"],
]


@pytest.mark.parametrize("arguments", MISUSE, ids=" ".join)
def test_wrong_arguments_exit_with_status_2(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(arguments)
    assert exit_.value.code == 2
    assert "usage: mxcompile" in capsys.readouterr().err


MISSPELT = {
    "explian": "unknown command 'explian' (did you mean 'explain'?); allowed: env, explain,",
    "policy chek x": "unknown action 'chek' (did you mean 'check'?)",
    "explain m --polcy ocp": "unrecognized arguments: --polcy (did you mean '--policy'?)",
    "audit m --devise=cuda": "unrecognized arguments: --devise=cuda (did you mean '--device'?)",
    "audit m --by roles": "unknown value 'roles' (did you mean 'role'?); allowed: role, block, underflow",
}


@pytest.mark.parametrize("line", MISSPELT)
def test_a_misspelt_word_gets_the_nearest_and_the_usage_of_its_command(
    line: str, capsys: pytest.CaptureFixture[str]
):
    with pytest.raises(SystemExit) as exit_:
        main(line.split())
    assert exit_.value.code == 2
    error = capsys.readouterr().err
    assert MISSPELT[line] in error
    assert error.startswith(f"usage: mxcompile {line.split()[0]}" if "-" in line else "usage: mxcompile")


def test_an_error_of_ours_is_misuse(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", f"{__name__}:small_model", "--policy", "nvida"]) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith("mxcompile: ")
    assert "'nvida' (did you mean 'nvidia'?)" in streams.err
    assert "Traceback" not in streams.err


TOO_LONG = "n" * 300

UNREADABLE = {
    "inspect": ["inspect", TOO_LONG],
    "explain": ["explain", TOO_LONG],
    "explain factory": ["explain", f"{TOO_LONG}:model"],
    "explain into": ["explain", f"{__name__}:small_model", "-o", f"{TOO_LONG}.html"],
    "convert": ["convert", TOO_LONG, "out"],
    "diff": ["diff", TOO_LONG, TOO_LONG],
    "watch": ["watch", TOO_LONG],
    "watch nested": ["watch", "nested.json"],
    "explain nested": ["explain", "nested.json"],
}


@pytest.mark.parametrize("name", UNREADABLE)
def test_a_file_that_cannot_be_read_is_an_error_of_one_line(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    Path("nested.json").write_text("[" * 100_000, encoding="utf-8")
    assert main(UNREADABLE[name]) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith("mxcompile: ")
    assert streams.err.count("\n") == 1


SIZES = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 1}


@pytest.mark.parametrize("size", ["1" + "0" * 18, "9" * 20])
def test_a_batch_beyond_64_bits_is_an_error_of_one_line(
    size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    LlamaConfig(**SIZES).save_pretrained(tmp_path)
    assert main(["explain", str(tmp_path), "--batch", size]) == 2
    error = capsys.readouterr().err
    assert "cannot make inputs of this size" in error
    assert error.count("\n") == 1


WRONG_CONFIGS = {
    "has no model_type 'lama' (did you mean 'llama'?)": {"model_type": "lama"},
    "Field 'hidden_size' expected int, got str": {"hidden_size": "wide"},
}


@pytest.mark.parametrize("message", WRONG_CONFIGS)
def test_a_wrong_config_is_an_error_of_one_line(
    message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    raw = {"model_type": "llama", **WRONG_CONFIGS[message]}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert main(["explain", str(tmp_path)]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert len(error) < 400


def test_an_architecture_that_is_not_a_model_is_not_called(tmp_path: Path):
    """Without one, the configuration's own model is taken, as for unknown names."""
    raw = {"model_type": "llama", "architectures": ["Trainer"], "vocab_size": 32, **SIZES}
    (tmp_path / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    assert type(load_model(str(tmp_path)).model).__name__ == "LlamaForCausalLM"


def test_inspect_of_a_file_without_tensors(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    save_file({}, tmp_path / "none.safetensors")
    assert main(["inspect", str(tmp_path / "none.safetensors")]) == 0
    assert "1 file, 0 B" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["", *NAMES])
def test_help_flag_shows_usage_of_each_command(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main([*name.split(), "--help"])
    assert exit_.value.code == 0
    output = capsys.readouterr().out
    assert output.startswith(f"usage: mxcompile {name}".rstrip())
    if not name:
        assert all(f"\n    {command} " in output for command in NAMES)


def test_running_the_module_prints_the_version():
    command = [sys.executable, "-m", "mxcompile", "--version"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, f"mxcompile {mxcompile.__version__}\n")


def small_model() -> tuple[torch.nn.Module, tuple[torch.Tensor], dict[str, Any]]:
    return torch.nn.Sequential(torch.nn.Linear(64, 64)), (torch.randn(32, 64),), {}


def small_model_on_meta() -> tuple[torch.nn.Module, tuple[torch.Tensor], dict[str, Any]]:
    model, (x,), _ = small_model()
    return model.to("meta"), (x.to("meta"),), {}


@pytest.mark.parametrize("command", ["audit", "blame", "tune --min-sqnr 20"])
def test_model_on_meta_where_values_are_needed_is_an_error_of_one_line(
    command: str, capsys: pytest.CaptureFixture[str]
):
    name, *flags = command.split()
    assert main([name, f"{__name__}:small_model_on_meta", *flags]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("mxcompile: cannot run")
    assert "use explain" in line


def test_explain_into_a_file_prints_summary_and_warnings(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    command = ["explain", f"{__name__}:small_model", "--policy", "bf16", "--target", "b200"]
    assert main(command) == 0
    whole = capsys.readouterr()
    assert main([*command, "-o", str(tmp_path / "x.html")]) == 0
    short = capsys.readouterr()
    summary, _, _ = whole.out.partition("\n\n")
    assert re.sub(r"\d+ ms", "", summary) == re.sub(r"\d+ ms", "", short.out.partition("\n\n")[0])
    assert "warning: this model is FP32" in short.out
    assert short.out.endswith(f"written to {tmp_path / 'x.html'}\n")
    assert whole.err == short.err == ""  # no bar where nobody watches


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_output_whose_encoding_lacks_a_sign_shows_a_question_mark(
    encoding: str, monkeypatch: pytest.MonkeyPatch
):
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding=encoding, write_through=True))
    with pytest.raises(SystemExit) as end:
        main(["explain", "--help"])
    assert end.value.code == 0
    sign = "…" if encoding == "utf-8" else "?"
    assert f"gfx950, {sign} (default auto)" in written.getvalue().decode(encoding)


def test_on_a_terminal_the_time_runs(monkeypatch: pytest.MonkeyPatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", terminal)
    patience = time.monotonic() + 60
    with working("tracing"):
        while "tracing 00:01" not in terminal.getvalue() and time.monotonic() < patience:
            time.sleep(0.1)
    assert "tracing 00:01" in terminal.getvalue()
