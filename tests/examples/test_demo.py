"""The package `demo`: all that it says and writes, of small models and few steps."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import demo
import pytest
import torch
from demo import __main__ as command
from demo import show_training
from helpers.eager_backend import EagerBackend

import mxcompile


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--policy", "nvida"], "'nvida' (did you mean 'nvidia'?)"),
        (["--device", "cuda"], "unknown device 'cuda'"),
        (["-o", __file__], "is a file: name a folder"),
    ],
    ids=["policy", "device", "folder"],
)
def test_demo_refuses_wrong_arguments_with_a_message(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert command.main(arguments) == 2
    assert message in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def test_demo_trains_and_writes_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    compile_ = torch.compile

    def quick(model: Any, *, backend: str, options: dict[str, Any] | None) -> Any:
        return compile_(model, backend=EagerBackend(**(options or {})) if backend == "mxfp8" else "aot_eager")

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
    assert command.main(["--steps", "2", "--out", "out"]) in (0, 1)
    out = tmp_path / "out"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["out"]
    assert sorted(path.name for path in out.iterdir()) == [
        "losses.json", "losses.png", "report.html", "report.json", "report.txt",
    ]  # fmt: skip
    report = mxcompile.Report.from_json((out / "report.json").read_text(encoding="utf-8"))
    assert report.summary.flop_share > 0.5
    losses = json.loads((out / "losses.json").read_text(encoding="utf-8"))
    assert [(run["run"], run["seed"]) for run in losses] == [
        (label, seed) for label in ["bf16", "policy nvidia", "control: mxfp4"] for seed in (0, 1)
    ]
    assert all(len(run["train"]) == 2 and 0 < run["train"][-1] < 8 for run in losses)
    firsts = {run["seed"]: run["train"][0] for run in losses if run["run"] == "bf16"}
    assert firsts[0] != firsts[1]  # another seed has other weights and data
    for run in losses:  # and one seed the same in every precision
        assert run["train"][0] == pytest.approx(firsts[run["seed"]], rel=0.01)
    assert (out / "losses.png").read_bytes().startswith(b"\x89PNG")
    output = capsys.readouterr().out
    assert (out / "report.txt").read_text(encoding="utf-8").strip() in output
    assert "mean validation gap" in output
    assert output.rstrip().endswith(f"open {Path('out') / 'report.html'} in a browser")


def made_run(label: str, seed: int, *losses: float) -> demo.TrainingRun:
    return demo.TrainingRun(label=label, seed=seed, train=[3.0], validation=dict(enumerate(losses)))


def test_gaps_are_to_the_same_seed():
    comparison = demo.SeedComparison(
        runs=(
            made_run("bf16", 0, 3.0, 2.0), made_run("bf16", 1, 3.0, 2.1),
            made_run("policy nvidia", 0, 3.0, 2.02), made_run("policy nvidia", 1, 3.0, 2.1),
            made_run(demo.CONTROL, 0, 3.3, 2.2), made_run(demo.CONTROL, 1, 3.3, 2.31),
        )
    )  # fmt: skip
    assert comparison.policies == ["policy nvidia"]
    assert comparison.gaps("policy nvidia") == pytest.approx([0.01, 0.0])
    assert comparison.gap("policy nvidia") == pytest.approx(0.005)
    assert comparison.gaps(demo.CONTROL) == pytest.approx([0.1, 0.1])
    assert comparison.gaps(demo.CONTROL, step=0) == pytest.approx([0.1, 0.1])
    assert comparison.spread == pytest.approx(0.1 / 2.05)


@pytest.mark.parametrize(
    ("control", "seeds", "status", "conclusion"),
    [
        (2.2, 2, 0, "BF16 itself moves by 4.88% from seed to seed;"),
        (2.2, 2, 0, "gap +0.050%: within 0.25% of BF16"),
        (2.2, 1, 0, "with one seed, how far BF16 itself moves from seed to seed is not known;"),
        (2.0, 1, 1, "the control, mxfp4, is +0.00% off: a bad format is not seen yet."),
        (2.0, 2, 1, "gap +0.050%: the runs are too short to tell"),
    ],
)
def test_demo_conclusion_depends_on_gap_and_control(
    control: float,
    seeds: int,
    status: int,
    conclusion: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
):
    base = (2.0, 2.1)
    labels = {"bf16": 1.0, "policy nvidia": 1.0005, demo.CONTROL: control / 2}
    runs = [made_run(label, i, base[i] * by) for label, by in labels.items() for i in range(seeds)]
    assert show_training.conclude(demo.SeedComparison(runs=tuple(runs)), tmp_path) == status
    assert conclusion in capsys.readouterr().out
