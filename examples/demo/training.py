"""Trains a small Llama on real text, repeatedly with one compile.

The text is the source of Python's standard library, one token per byte. Runs with one seed share initial
weights, data order and schedule, and differ only in the precision of the linear layers. Weights are FP32;
products and activations are BF16 by autocast, or FP32 if the CPU multiplies BF16 slowly.
"""

from __future__ import annotations

import math
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.errors import OptionError
from mxcompile.report import Report, clear_reports, reports

VOCABULARY = 256
BASELINES = {torch.bfloat16: "bf16", torch.float32: "fp32"}
"""Labels of runs without mxcompile, by the dtype of their products."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Size of the model, of the data and of the run. Defaults take about a minute on two cores.

    dtype: dtype of products and activations; BF16 uses autocast, FP32 does not.

    The gap of a single seed varies by 0.1 to 0.2 % with chance, for all widths, learning rates, warm-ups and
    lengths that were tried; `benchmarks/parity.py` averages over seeds.
    """

    layers: int = 2
    width: int = 128
    heads: int = 4
    feed_forward: int = 352
    length: int = 128
    batch: int = 32
    steps: int = 500
    learning_rate: float = 5e-4
    warmup: int = 30
    betas: tuple[float, float] = (0.9, 0.95)
    validation_batches: int = 16
    validate_every: int = 50
    seed: int = 0
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16

    @property
    def baseline(self) -> str:
        """Label of the runs without mxcompile."""
        return BASELINES[self.dtype]


@dataclass(kw_only=True)
class TrainingRun:
    """One training run.

    train: loss of every step. validation: validation loss by step. step_ms: median time of a step. report:
    report of the compile, None for the baseline and if an earlier run compiled the same model.
    """

    label: str
    seed: int = 0
    train: list[float] = field(default_factory=list)
    validation: dict[int, float] = field(default_factory=dict)
    step_ms: float = 0.0
    report: Report | None = None

    @property
    def final(self) -> float:
        """Validation loss after the last step, in nats per byte."""
        return self.validation[max(self.validation)]


@dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """Text for training and validation as int64 tokens, one per byte."""

    train: Tensor
    validation: Tensor


def standard_library(limit_bytes: int = 12_000_000) -> Text:
    """Returns the source of Python's standard library: every tenth file for validation, others to train on.

    Raises `OptionError` if this Python was installed without it.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    skipped = {"site-packages", "test", "tests", "__pycache__", "idlelib", "lib2to3"}
    files = sorted(f for f in root.rglob("*.py") if not skipped & set(f.relative_to(root).parts))
    splits: dict[bool, list[bytes]] = {True: [], False: []}
    total = 0
    for index, file in enumerate(files):
        content = file.read_bytes()
        total += len(content)
        splits[index % 10 == 9].append(content)
        if total > limit_bytes:
            break
    if total < 1_000_000:
        raise OptionError(f"found only {total} bytes of Python source below {root}")
    train, validation = (
        torch.frombuffer(bytearray(b"".join(splits[held_out])), dtype=torch.uint8).long()
        for held_out in (False, True)
    )
    return Text(train=train, validation=validation)


def batches(tokens: Tensor, settings: Settings, seed: int) -> Iterator[Tensor]:
    """Yields random windows of `tokens` [batch, length + 1] without end; `seed` fixes them on all devices."""
    generator = torch.Generator().manual_seed(seed)
    while True:
        starts = torch.randint(len(tokens) - settings.length - 1, (settings.batch,), generator=generator)
        windows = torch.stack([tokens[s : s + settings.length + 1] for s in starts.tolist()])
        yield windows.to(settings.device)


def build_model(settings: Settings) -> nn.Module:
    """Returns a Llama of this size with FP32 weights. Raises `OptionError` without transformers."""
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise OptionError(
            "the demo needs transformers and matplotlib: pip install 'mxcompile[demo]'"
        ) from None
    torch.manual_seed(settings.seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=settings.width,
        intermediate_size=settings.feed_forward,
        num_hidden_layers=settings.layers,
        num_attention_heads=settings.heads,
        num_key_value_heads=settings.heads,
        max_position_embeddings=settings.length,
        tie_word_embeddings=False,
        use_cache=False,
    )
    model: nn.Module = LlamaForCausalLM(config)
    return model.to(settings.device)


class Trainee:
    """A model that is compiled once and trained repeatedly, each time from the initial weights of a seed.

    compile_model: returns the callable to train; the compile happens at the first step. build: returns the
    model with its initial weights. Raises `OptionError` without transformers.
    """

    def __init__(
        self,
        label: str,
        settings: Settings,
        text: Text,
        compile_model: Callable[[nn.Module], Callable[..., Any]],
        build: Callable[[Settings], nn.Module] = build_model,
    ) -> None:
        self._label = label
        self._settings = settings
        self._text = text
        self._build = build
        self._model = build(settings)
        self._compiled = compile_model(self._model)

    def run(self, seed: int, progress: Callable[[TrainingRun, int], None]) -> TrainingRun:
        """Trains with `seed`; calls `progress` with (run, step) after each step. Losses: nats per byte."""
        settings = replace(self._settings, seed=seed)
        self._model.load_state_dict(self._build(settings).state_dict())
        run = TrainingRun(label=self._label, seed=seed)
        optimizer = torch.optim.AdamW(
            self._model.parameters(), lr=settings.learning_rate, betas=settings.betas, weight_decay=0.1
        )
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: _factor(step, settings))
        data = batches(self._text.train, settings, seed)
        clear_reports()
        times = []
        for step in range(1, settings.steps + 1):
            start = time.perf_counter()
            loss = _loss(self._compiled, next(data), settings.dtype)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self._model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad(set_to_none=True)
            run.train.append(loss.item())  # waits for the device
            times.append(time.perf_counter() - start)
            if run.report is None and reports():
                run.report = reports()[0]
            if step % settings.validate_every == 0 or step == settings.steps:
                run.validation[step] = validate(self._compiled, settings, self._text)
            progress(run, step)
        run.step_ms = sorted(times)[len(times) // 2] * 1e3
        return run


def train(
    label: str,
    settings: Settings,
    text: Text,
    compile_model: Callable[[nn.Module], Callable[..., Any]],
    progress: Callable[[TrainingRun, int], None],
    build: Callable[[Settings], nn.Module] = build_model,
) -> TrainingRun:
    """Returns one run of a new `Trainee` with the seed of `settings`."""
    return Trainee(label, settings, text, compile_model, build).run(settings.seed, progress)


def _factor(step: int, settings: Settings) -> float:
    """Returns the learning rate ÷ its peak: linear warm-up, then a cosine to zero."""
    if step < settings.warmup:
        return (step + 1) / settings.warmup
    rest = (step - settings.warmup) / max(1, settings.steps - settings.warmup)
    return 0.5 * (1 + math.cos(math.pi * rest))


def _loss(compiled: Callable[..., Any], window: Tensor, dtype: torch.dtype) -> Tensor:
    with torch.autocast(window.device.type, torch.bfloat16, enabled=dtype is torch.bfloat16):
        logits = compiled(input_ids=window[:, :-1]).logits
    return nn.functional.cross_entropy(logits.float().flatten(0, 1), window[:, 1:].flatten())


def validate(compiled: Callable[..., Any], settings: Settings, text: Text) -> float:
    """Returns the mean loss over fixed batches. Gradients stay enabled, which avoids a second compile."""
    data = batches(text.validation, settings, seed=1)
    losses = [_loss(compiled, next(data), settings.dtype).item() for _ in range(settings.validation_batches)]
    return sum(losses) / len(losses)
