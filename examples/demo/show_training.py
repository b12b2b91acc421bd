"""Trains a small Llama in BF16, in MXFP8 and in a control with too few bits, and compares the losses.

On a CPU that multiplies BF16 slowly, the model and the baseline are FP32.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

import demo
from demo.compare import CONTROL, GAP_LIMIT, SeedComparison, variants
from demo.training import TrainingRun
from mxcompile.cli.arguments import device, quiet
from mxcompile.policy import Policy
from mxcompile.report.forms.tables import drawn


def train_all(options: argparse.Namespace, bar: Any) -> SeedComparison:
    """Trains every variant with every seed, with progress in `bar`. Returns the runs."""
    settings = demo.quick_settings(device(options.device), options.steps)
    plan = variants([Policy.resolve(name) for name in options.policy or ["nvidia"]], settings.baseline)
    seeds = options.seeds or 2
    bar.reset(total=len(plan) * seeds * settings.steps)
    bar.set_description("reading text")
    text = demo.standard_library()
    _say(
        bar,
        f"Llama of {settings.layers} layers, {settings.width} wide, on {len(text.train):,} bytes of Python"
        f" source; {len(plan)} ways × {seeds} seeds × {settings.steps} steps of"
        f" {settings.batch}×{settings.length} bytes, on {settings.device}.",
    )
    if note := demo.why_fp32(settings):
        _say(bar, note)

    runs: list[demo.TrainingRun] = []

    def progress(run: demo.TrainingRun, step: int) -> None:
        bar.set_description(f"{run.label}, seed {run.seed}", refresh=False)
        bar.set_postfix_str(f" loss {run.train[-1]:.3f}", refresh=False)
        bar.update()

    with quiet():
        for variant in plan:
            bar.set_description(f"{variant.label}, compiling")
            bar.set_postfix_str("")
            backend, backend_options = variant.backend
            torch._dynamo.reset()
            trainee = demo.Trainee(
                variant.label,
                settings,
                text,
                lambda model, backend=backend, backend_options=backend_options: torch.compile(  # type: ignore[misc]
                    model, backend=backend, options=backend_options
                ),
            )
            for seed in range(seeds):
                runs.append(trainee.run(seed, progress))
                _say(bar, _summary(runs[-1]))
    return demo.SeedComparison(runs=tuple(runs))


def _summary(run: TrainingRun) -> str:
    return f"{run.label}, seed {run.seed}: {run.final:.4f} nats a byte, {run.step_ms:.0f} ms a step"


def _say(bar: Any, text: str) -> None:
    """Prints a line above the bar."""
    bar.clear()
    print(text)
    sys.stdout.flush()
    bar.refresh()


def conclude(runs: SeedComparison, out: Path) -> int:
    """Prints reports, losses and the gap of the policies, and writes the files. Returns the exit status."""
    first = {label: runs.of(label)[0] for label in runs.labels}
    print()
    for label in runs.policies:
        print(f"{label}: {first[label].report}\n")
    headers = [
        "",
        *(f"seed {run.seed}" for run in runs.of(runs.labels[0])),
        "gap of each",
        "mean gap",
        "ms/step",
    ]
    print(drawn([headers, *(_row(runs, label) for label in runs.labels)]))

    written = _write(runs, out)
    print(f"\nwritten to {out}/: {', '.join(written)}")
    print(_of_seeds(runs))
    control = f"the control, {CONTROL.split()[-1]}, is {runs.gap(CONTROL):+.2%} off"
    print(f"{control}: {'a bad format looks like that' if runs.tells else 'a bad format is not seen yet'}.")
    worst = max((runs.gap(label) for label in runs.policies), key=abs)
    verdict = (
        f"{'within' if abs(worst) <= GAP_LIMIT else 'OUTSIDE'} {GAP_LIMIT:.2%} of {runs.baseline.upper()}"
    )
    print(f"mean validation gap {worst:+.3%}: {verdict if runs.tells else 'the runs are too short to tell'}")
    print(f"open {out / 'report.html'} in a browser")
    return 0 if runs.tells and abs(worst) <= GAP_LIMIT else 1


def _of_seeds(comparison: SeedComparison) -> str:
    """Returns a sentence about the spread of the baseline over the seeds."""
    name = comparison.baseline.upper()
    if comparison.spread is None:
        return f"with one seed, how far {name} itself moves from seed to seed is not known;"
    return f"{name} itself moves by {comparison.spread:.2%} from seed to seed;"


def _row(comparison: SeedComparison, label: str) -> list[str]:
    runs = comparison.of(label)
    gaps = [""] * 2
    if label != comparison.labels[0]:
        gaps = [", ".join(f"{gap:+.2%}" for gap in comparison.gaps(label)), f"{comparison.gap(label):+.2%}"]
    return [label, *(f"{run.final:.4f}" for run in runs), *gaps, f"{min(run.step_ms for run in runs):.0f}"]


def _write(comparison: SeedComparison, out: Path) -> list[str]:
    """Writes reports, losses and their plot. Returns the names of the files."""
    out.mkdir(parents=True, exist_ok=True)
    names = []
    for label in comparison.policies:
        report = comparison.of(label)[0].report
        stem = (
            "report" if label == comparison.policies[0] else f"report_{label.split()[-1].replace('/', '_')}"
        )
        for suffix in ("html", "json", "txt"):
            if report is not None:
                report.save(out / f"{stem}.{suffix}")
                names.append(f"{stem}.{suffix}")
    losses = [
        {
            "run": run.label,
            "seed": run.seed,
            "train": run.train,
            "validation": run.validation,
            "step_ms": run.step_ms,
        }
        for run in comparison.runs
    ]
    (out / "losses.json").write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")
    demo.plot(comparison, out / "losses.png")
    return [*names, "losses.json", "losses.png"]
