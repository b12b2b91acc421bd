"""The demonstration of serving: all that is measured, said and written, of small models."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import demo
import pytest
import torch
from demo import __main__ as command
from demo.training import batches
from helpers.eager_backend import EagerBackend

import mxcompile
from mxcompile import MXTensor

LABELS = ["bf16", "stored weights", "stored weights, mxfp8 activations"]


@pytest.fixture
def without_machine_code(monkeypatch: pytest.MonkeyPatch) -> None:
    """Graphs run as they are, after the passes."""
    compile_ = torch.compile

    def quick(model: Any, *, backend: Any = "inductor", options: Any = None, **kwargs: Any) -> Any:
        chosen: dict[Any, Any] = {"mxfp8": EagerBackend(**(options or {})), "inductor": "aot_eager"}
        return compile_(model, backend=chosen.get(backend, backend), **kwargs)

    monkeypatch.setattr(torch, "compile", quick)


SMALL = demo.Settings(layers=1, width=64, feed_forward=96, length=32, batch=2, steps=2)
WIDE = demo.Wide(
    layers=1, width=64, feed_forward=96, heads=2, key_value_heads=1, prompt=5, tokens=2, repeats=1
)


@pytest.mark.slow
def test_demo_serve_command_writes_its_files(
    without_machine_code: None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
):
    monkeypatch.setattr(demo, "quick_settings", lambda device, steps: SMALL)
    monkeypatch.setattr(demo, "Wide", lambda **_: WIDE)
    monkeypatch.chdir(tmp_path)
    assert command.main(["--serve", "--out", "out"]) == 0
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["serving.html", "serving.json"]
    data = json.loads((tmp_path / "out/serving.json").read_text(encoding="utf-8"))
    output = capsys.readouterr().out
    assert output.startswith("What ran with stored weights alone: ")
    for rows in data.values():
        assert [row["label"] for row in rows] == LABELS
        assert rows[1]["weight_bytes"] == rows[2]["weight_bytes"] < 0.9 * rows[0]["weight_bytes"]
    gaps = [row["logits_gap"] for row in data["quality"]]
    assert gaps[0] == 0 < gaps[1] < gaps[2] < 0.1
    for row in data["quality"]:
        assert f"{row['perplexity']:.4f}" in output
        assert 1 < row["perplexity"] < 2 * 256
    for row in data["speed"]:  # of milliseconds, whose difference a busy machine may turn round
        assert row["prefill_ms"] > 0
        assert math.isfinite(row["tokens_per_s"])
    assert "w: e4m3 1x32 stored" in output


@pytest.mark.parametrize("flag", [["--policy", "ocp"], ["--seeds", "3"]], ids=lambda flag: flag[0])
def test_serve_refuses_flags_that_are_for_training(flag: list[str], capsys: pytest.CaptureFixture[str]):
    assert command.main(["--serve", *flag]) == 2
    assert f"{flag[0]} is for training" in capsys.readouterr().err


def test_quality_measures_perplexity_and_gap_of_stored_values():
    """Perplexity and gap of the dense model of the stored values, from their definitions."""
    text = demo.Text(train=torch.arange(600) % 251, validation=torch.arange(700) * 7 % 253)
    model = demo.wide(WIDE)
    eager = (
        demo.Way(label="bf16", backend="eager"),
        demo.Way(label="stored", backend="eager", prepare=partial(_store, names=("up_proj",))),
    )
    before, after = demo.quality(model, SMALL, text, eager, count=1)
    assert isinstance(model.model.layers[0].mlp.up_proj.weight, MXTensor)
    window = next(batches(text.validation, replace(SMALL, batch=8), seed=1))
    logits = []
    for _ in range(2):
        logits.append(model(input_ids=window[:, :-1]).logits.double())
        model = demo.wide(WIDE)
    stored, dense = logits
    assert after.logits_gap == pytest.approx(float((stored - dense).norm() / dense.norm()), rel=1e-3)
    for quality, side_logits in ((before, dense), (after, stored)):
        chances = side_logits.softmax(-1).gather(-1, window[:, 1:, None])
        assert quality.perplexity == pytest.approx(math.exp(-chances.log().mean()), rel=1e-4)


def test_a_cache_in_mxfp8_is_measured():
    """Attention reads what the cast leaves of keys and values, prompt included; the weights stay."""
    text = demo.Text(train=torch.arange(600) % 251, validation=torch.arange(700) * 7 % 253)
    size = replace(WIDE, width=128)
    model = demo.wide(size)
    eager = (
        demo.Way(label="bf16", backend="eager"),
        demo.Way(label="cached", backend="eager", cached=True),
    )
    before, after = demo.quality(model, SMALL, text, eager, count=1)
    assert before.logits_gap == 0 < after.logits_gap < 0.1
    assert before.weight_bytes == after.weight_bytes
    (fast,) = demo.speed(model, size, eager[1:])
    assert fast.label == "cached"
    assert fast.prefill_ms > 0


def _store(model: Any, names: tuple[str, ...]) -> None:
    for name in names:
        layer = getattr(model.model.layers[0].mlp, name)
        layer.weight = torch.nn.Parameter(mxcompile.quantize(layer.weight.detach()), requires_grad=False)
