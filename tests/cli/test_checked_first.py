"""What costs nothing is checked before what takes minutes, and every mistake is one sentence."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from mxcompile.cli import main

HERE = f"{__name__}:example"
MODELS_MADE: list[str] = []


def example():
    MODELS_MADE.append("made")
    return nn.Sequential(nn.Linear(64, 64)), (torch.randn(32, 64),), {}


@pytest.fixture(autouse=True)
def _fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    MODELS_MADE.clear()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    (tmp_path / "file").write_text("mine", encoding="utf-8")
    (tmp_path / "there.json").write_text("mine", encoding="utf-8")
    (tmp_path / "folder.json").mkdir()


REFUSED = {
    "file as a folder": (["-o", "file/x.json"], "cannot be written: ", "is a file"),
    "folder as a file": (["-o", "folder.json"], "folder.json is a directory", "name a file in it"),
    "existing": (["-o", "there.json"], "there.json exists", "--force"),
    "misspelt folder": (
        ["-o", "reprots/deep/x.json"],
        "cannot be written: there is no folder",
        "reprots/deep",
    ),
    "no such file system": (["-o", "/proc/x.json"], "cannot be written: /proc: "),
}
COMMANDS = {
    "explain": ["explain", HERE],
    "mesh": ["mesh", HERE, "dp=2"],
    "audit": ["audit", HERE],
    "tune": ["tune", HERE, "--min-sqnr", "10"],
    "blame": ["blame", HERE],
    "policy init": ["policy", "init", HERE],
}


@pytest.mark.parametrize("case", REFUSED)
@pytest.mark.parametrize("command", COMMANDS)
def test_an_output_that_cannot_be_written(command: str, case: str, capsys: pytest.CaptureFixture[str]):
    output, *parts = REFUSED[case]
    assert main([*COMMANDS[command], *output]) == 2
    error = capsys.readouterr().err
    assert error.startswith("mxcompile: ")
    assert error.count("\n") == 1
    assert all(part in error for part in parts)
    assert MODELS_MADE == []
    assert not Path("reprots").exists()
    assert Path("there.json").read_text(encoding="utf-8") == "mine"


def test_force_flag_overwrites_an_existing_file(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", HERE, "-o", "there.json", "--force"]) == 0
    assert json.loads(Path("there.json").read_text(encoding="utf-8"))["schema"] == 1


OTHERS = {
    "plots": (["audit", HERE, "--plots", "file"], "file is a file: name a folder"),
    "runs": (["blame", HERE, "--max-runs", "3"], "--max-runs must be a whole number of at least 8, found 3"),
    "policies": (
        ["blame", HERE, "--against", "nvidia"],
        "both policies are preset nvidia: name another policy with --policy or --against",
    ),
    "no bound": (["tune", HERE], "tune needs a bound: --min-sqnr (in dB), --max-loss-gap (a share), or both"),
    "a bound": (["tune", HERE, "--min-sqnr", "nan"], "--min-sqnr must be a finite number of dB, found nan"),
    "chip": (
        ["tune", HERE, "--min-sqnr", "1", "--target", "b200"],
        "--target is for a mix of precisions: name them in --among",
    ),
    "weights": (["tune", HERE, "--min-sqnr", "1", "--weights", "file"], "file: not a safetensors file"),
    "device": (["audit", HERE, "--device", "cuda"], "unknown device 'cuda'"),
    "codegen": (["codegen", HERE, "-o", "file"], "file is a file: name a folder"),
    "folder in a misspelt one": (["codegen", HERE, "-o", "reprots/x"], "there is no folder"),
}


@pytest.mark.parametrize("case", OTHERS)
def test_other_things_that_cannot_be(case: str, capsys: pytest.CaptureFixture[str]):
    arguments, reason = OTHERS[case]
    assert main(arguments) == 2
    assert reason in capsys.readouterr().err
    assert MODELS_MADE == []


@pytest.mark.parametrize("option", ["--length", "--batch"])
@pytest.mark.parametrize("value", ["-3", "0", "x", "1.5"])
def test_size_flags_refuse_numbers_below_one(option: str, value: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main(["explain", HERE, f"{option}={value}"])
    assert exit_.value.code == 2
    assert "is not a positive whole number" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["audit", "blame", "tune"])
def test_seeds_of_more_than_64_bits_are_refused(command: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main([command, HERE, f"--seed={1 << 64}"])
    assert exit_.value.code == 2
    assert "is not a whole number of 64 bits" in capsys.readouterr().err
    assert MODELS_MADE == []


NAMES = {
    "meta-llama/Llama-3.1-8B": "download its config.json and name the directory: nothing is downloaded here",
    "settings.toml": "settings.toml is a file of another kind",
    "src/model.py": "write src.model:NAME for a function in a Python file",
    "mine.py": "write mine:NAME for a function in a Python file",
    "nothing": "is neither package.module:factory",
    "gema": "there is no directory gema (did you mean 'gemma'?)",
}


@pytest.mark.parametrize("name", NAMES)
def test_wrong_model_argument_exits_with_a_sentence(name: str, capsys: pytest.CaptureFixture[str]):
    Path("settings.toml").write_text("[model]\n", encoding="utf-8")
    Path("mine.py").write_text("", encoding="utf-8")
    Path("gemma").mkdir()
    Path("gemma/config.json").write_text("{}", encoding="utf-8")
    assert main(["explain", name]) == 2
    error = capsys.readouterr().err
    assert NAMES[name] in error
    assert error.count("\n") == 1


def reading():
    """What ``from_pretrained`` does: it needs memory."""
    model, args, kwargs = example()
    assert torch.ones(()).item() == 1
    return model, args, kwargs


def broken():
    MODELS_MADE.append("broken")
    raise RuntimeError("no such luck")


@pytest.mark.parametrize("command", [["explain", "--policy", "bf16"], ["policy", "init"]])
def test_a_factory_that_needs_memory_gets_it(command: list[str], capsys: pytest.CaptureFixture[str]):
    assert main([*command, f"{__name__}:reading"]) == 0
    streams = capsys.readouterr()
    assert "bf16" in streams.out
    assert "cannot be created without memory for its weights (RuntimeError: Tensor.item()" in streams.err
    assert MODELS_MADE == ["made", "made"]


def test_a_factory_that_fails_is_run_once(capsys: pytest.CaptureFixture[str]):
    assert main(["explain", f"{__name__}:broken"]) == 2
    assert "RuntimeError: no such luck" in capsys.readouterr().err
    assert MODELS_MADE == ["broken"]


def config(tmp_path: Path, **settings: object) -> str:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(settings), encoding="utf-8")
    return str(folder)


CLIP = {
    "model_type": "clip",
    "architectures": ["CLIPModel"],
    "text_config": {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4,
        "vocab_size": 99, "max_position_embeddings": 77, "projection_dim": 32,
    },
    "vision_config": {
        "hidden_size": 48, "intermediate_size": 112, "num_hidden_layers": 1, "num_attention_heads": 4,
        "image_size": 32, "patch_size": 8, "projection_dim": 32,
    },
    "projection_dim": 32,
}  # fmt: skip


def test_a_pair_of_encoders_gets_both_inputs(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", config(tmp_path, **CLIP), "--inference"]) == 0
    output = capsys.readouterr().out
    assert "vision_model" in output
    assert "text_model" in output


def test_a_length_beyond_the_positions(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    assert main(["explain", config(tmp_path, **CLIP), "--length", "78"]) == 2
    assert "CLIPModel has 77 positions: --length must be at most that, found 78" in capsys.readouterr().err


def test_inputs_that_are_not_known(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    small = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    folder = config(tmp_path, model_type="wav2vec2", architectures=["Wav2Vec2Model"], **small)
    assert main(["explain", folder]) == 2
    assert "takes 'input_values', which cannot be made from a config.json" in capsys.readouterr().err


SLEEPER = """
import time
def example():
    print("making", flush=True)
    time.sleep(60)
"""


def test_ctrl_c_is_one_line(tmp_path: Path):
    (tmp_path / "sleeper.py").write_text(SLEEPER, encoding="utf-8")
    command = [sys.executable, "-m", "mxcompile", "explain", "sleeper:example"]
    settings = {"preexec_fn": lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)}  # a shell may ignore it
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = subprocess.Popen(command, cwd=tmp_path, **streams, **settings)
    assert running.stdout is not None
    assert running.stdout.readline() == "making\n"
    time.sleep(0.2)
    running.send_signal(signal.SIGINT)
    _, error = running.communicate(timeout=60)
    assert running.returncode == 130
    assert error.strip() == "mxcompile: interrupted"


def test_whoever_reads_the_output_may_have_enough(tmp_path: Path):
    shell = f"{sys.executable} -m mxcompile policy schema | head -n 1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", shell], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stderr == ""
    assert done.stdout.splitlines()[-1] in ("0", "141")
