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
from helpers.eager_backend import EagerBackend

import mxcompile
from mxcompile import demo
from mxcompile.cli import demo as demo_command
from mxcompile.cli import main
from mxcompile.cli.main import COMMANDS
from mxcompile.cli.quiet import working
from mxcompile.lowering.targets import TARGETS
from mxcompile.policy import Policy

NAMES = [command.__name__.rpartition(".")[2] for command in COMMANDS]


def test_env_says_what_this_machine_can_do(capsys: pytest.CaptureFixture[str]):
    assert main(["env"]) == 0
    said = capsys.readouterr().out
    for name in ("python", "torch", "triton", "torchao", "C++ compiler"):
        assert f"\n{name}" in f"\n{said}"
    rows = {line.split()[0]: line for line in said.splitlines() if line.strip()}
    assert set(TARGETS) <= set(rows)
    assert rows["cpu"].rstrip().endswith("cpu")


def test_env_says_no_without_a_compiler(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """On a machine without a GPU nothing can be compiled then."""
    monkeypatch.setattr("shutil.which", lambda name: None)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["env"]) == 1
    assert "the CPU backend of torch.compile needs one" in capsys.readouterr().out


def test_a_valid_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    path = tmp_path / "policy.yaml"
    Policy.preset("ocp").dump(path)
    assert main(["policy", "check", str(path)]) == 0
    assert "valid; preset ocp, 0 rules" in capsys.readouterr().out


def test_a_broken_policy(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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
    ["demo", "--steps", "0"],
    ["demo", "--steps", "x"],
    ["env", "x"],
]


@pytest.mark.parametrize("arguments", MISUSE, ids=" ".join)
def test_misuse(arguments: list[str], capsys: pytest.CaptureFixture[str]):
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
    usage = f"usage: mxcompile {line.split()[0]}" if "-" in line else "usage: mxcompile"
    assert error.startswith(usage)


def test_an_error_of_ours_is_misuse(capsys: pytest.CaptureFixture[str]):
    assert main(["demo", "--policy", "nvida"]) == 2
    streams = capsys.readouterr()
    assert streams.err.startswith("mxcompile: ")
    assert "'nvida' (did you mean 'nvidia'?)" in streams.err
    assert "Traceback" not in streams.err


def test_a_device_that_is_not_there(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["demo", "--device", "cuda"]) == 2
    assert "unknown device 'cuda'" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["", *NAMES])
def test_help(name: str, capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as exit_:
        main([*name.split(), "--help"])
    assert exit_.value.code == 0
    said = capsys.readouterr().out
    assert said.startswith(f"usage: mxcompile {name}".rstrip())
    if not name:
        assert all(f"\n    {command} " in said for command in NAMES)


def test_version_and_module():
    """``python -m mxcompile`` is the same command."""
    done = subprocess.run(
        [sys.executable, "-m", "mxcompile", "--version"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, f"mxcompile {mxcompile.__version__}\n")


def test_demo(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Two steps of a smaller model, its graphs run without machine code: all that is said and written."""
    compile_ = torch.compile

    def quick(model: Any, *, backend: str, options: dict[str, Any] | None) -> Any:
        chosen = EagerBackend(**(options or {})) if backend == "mxfp8" else "aot_eager"
        return compile_(model, backend=chosen)

    monkeypatch.setattr(torch, "compile", quick)
    small = demo.Settings(
        layers=1,
        width=64,
        feed_forward=96,
        length=32,
        batch=2,
        validation_batches=2,
        steps=2,
        validate_every=1,
    )
    monkeypatch.setattr(demo, "quick_settings", lambda device, steps: small)
    monkeypatch.chdir(tmp_path)
    assert main(["demo", "--steps", "2", "--out", "out"]) in (0, 1)
    out = tmp_path / "out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == [
        "losses.json", "losses.png", "report.html", "report.json", "report.txt",
    ]  # fmt: skip
    report = mxcompile.Report.from_json((out / "report.json").read_text(encoding="utf-8"))
    assert report.summary.flop_share > 0.5
    losses = json.loads((out / "losses.json").read_text(encoding="utf-8"))
    labels = ["bf16", "policy nvidia", "control: mxfp4"]
    assert [(run["run"], run["seed"]) for run in losses] == [
        (each, seed) for each in labels for seed in (0, 1)
    ]
    assert all(len(run["train"]) == 2 and 0 < run["train"][-1] < 8 for run in losses)
    firsts = {run["seed"]: run["train"][0] for run in losses if run["run"] == "bf16"}
    assert firsts[0] != firsts[1]  # another seed has other weights and data
    for run in losses:  # and one seed the same in every precision
        assert run["train"][0] == pytest.approx(firsts[run["seed"]], rel=0.01)
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    said = capsys.readouterr().out
    assert (out / "report.txt").read_text(encoding="utf-8").strip() in said
    assert "mean validation gap" in said
    assert said.rstrip().endswith(f"open {Path('out') / 'report.html'} in a browser")


def small_model() -> tuple[torch.nn.Module, tuple[torch.Tensor], dict[str, Any]]:
    return torch.nn.Sequential(torch.nn.Linear(64, 64)), (torch.randn(32, 64),), {}


def test_explain_into_a_file_says_what_matters(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
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


def test_on_a_terminal_the_time_runs(monkeypatch: pytest.MonkeyPatch):
    terminal = io.StringIO()
    terminal.isatty = lambda: True  # type: ignore[method-assign]
    monkeypatch.setattr("sys.stderr", terminal)
    with working("tracing"):
        time.sleep(1.2)
    assert "tracing 00:01" in terminal.getvalue()


def made_run(label: str, seed: int, *losses: float) -> demo.TrainingRun:
    return demo.TrainingRun(label=label, seed=seed, train=[3.0], validation=dict(enumerate(losses)))


def test_gaps_are_to_the_same_seed():
    found = demo.SeedComparison(
        runs=(
            made_run("bf16", 0, 3.0, 2.0), made_run("bf16", 1, 3.0, 2.1),
            made_run("policy nvidia", 0, 3.0, 2.02), made_run("policy nvidia", 1, 3.0, 2.1),
            made_run(demo.CONTROL, 0, 3.3, 2.2), made_run(demo.CONTROL, 1, 3.3, 2.31),
        )
    )  # fmt: skip
    assert found.policies == ["policy nvidia"]
    assert found.gaps("policy nvidia") == pytest.approx([0.01, 0.0])
    assert found.gap("policy nvidia") == pytest.approx(0.005)
    assert found.gaps(demo.CONTROL) == pytest.approx([0.1, 0.1])
    assert found.gaps(demo.CONTROL, step=0) == pytest.approx([0.1, 0.1])
    assert found.spread == pytest.approx(0.1 / 2.05)


@pytest.mark.parametrize(
    ("control", "seeds", "status", "said"),
    [
        (2.2, 2, 0, "BF16 itself moves by 4.88% from seed to seed;"),
        (2.2, 2, 0, "gap +0.050%: within 0.25% of BF16"),
        (2.2, 1, 0, "with one seed, how far BF16 itself moves from seed to seed is not known;"),
        (2.0, 1, 1, "the control, mxfp4, is +0.00% off: a bad format is not seen yet."),
        (2.0, 2, 1, "gap +0.050%: the runs are too short to tell"),
    ],
)
def test_what_the_demo_concludes(
    control: float, seeds: int, status: int, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    base = (2.0, 2.1)
    labels = {"bf16": 1.0, "policy nvidia": 1.0005, demo.CONTROL: control / 2}
    runs = [made_run(label, i, base[i] * by) for label, by in labels.items() for i in range(seeds)]
    assert demo_command._conclude(demo.SeedComparison(runs=tuple(runs)), tmp_path) == status
    assert said in capsys.readouterr().out


def test_the_bar_of_the_demo_comes_before_its_imports():
    """It is there when nothing that takes seconds to import has been imported."""
    script = (
        "import sys, io, tqdm\n"
        "from mxcompile.cli import demo\n"
        "def begun(options, bar):\n"
        "    print(type(bar).__name__, 'torch' in sys.modules, 'transformers' in sys.modules)\n"
        "    raise SystemExit\n"
        "demo._trained = begun\n"
        "from mxcompile.cli import main\n"
        "main(['demo'])\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["Lines", "False", "False"]
