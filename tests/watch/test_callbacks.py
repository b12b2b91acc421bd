"""Callbacks for trainers of other libraries: they number steps and close the watch."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from helpers.eager_backend import EagerBackend
from watched_models import Model, batch, samples

from mxcompile.errors import OptionError
from mxcompile.watch import Watch, for_lightning, for_transformers


def test_callback_for_transformers_numbers_steps_and_closes(tmp_path: Path):
    from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

    model, watch = Model(), Watch(tmp_path / "run.jsonl", every=1)
    compiled = torch.compile(model, backend=EagerBackend(root=model, watch=watch))
    callback = for_transformers(watch)
    assert isinstance(callback, TrainerCallback)
    arguments = TrainingArguments(str(tmp_path), use_cpu=True), TrainerState(global_step=7), TrainerControl()
    callback.on_train_begin(*arguments)
    compiled(batch(0)).sum().backward()
    assert watch.current_step == 7
    callback.on_train_end(*arguments)
    assert [*samples(tmp_path / "run.jsonl")] == [7]


def test_callback_for_lightning_numbers_steps_and_closes(monkeypatch: pytest.MonkeyPatch):
    """Its callbacks derive from its class and know the trainer's step."""
    library = ModuleType("pytorch_lightning")
    library.Callback = type("Callback", (), {})
    monkeypatch.setitem(sys.modules, "lightning.pytorch", None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", library)
    watch = Watch(print)
    callback = for_lightning(watch)
    assert isinstance(callback, library.Callback)
    callback.on_train_start(SimpleNamespace(global_step=3), None)
    assert watch.current_step == 3
    callback.on_train_end(None, None)
    monkeypatch.setitem(sys.modules, "pytorch_lightning", None)
    with pytest.raises(OptionError, match="needs Lightning"):
        for_lightning(watch)
