"""``mxcompile demo``: train a small Llama in BF16, in MXFP8 and in too few bits, and compare the losses.

On a CPU that multiplies BF16 slowly it trains an FP32 model, beside FP32.

With ``--serve``, `demo_serve` instead.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxcompile.cli.arguments import add_folder, check_plots, device, positive
from mxcompile.cli.demo_serve import serve
from mxcompile.cli.progress import progress_bar

if TYPE_CHECKING:
    from mxcompile.demo import SeedComparison, TrainingRun


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "demo",
        help="train a small Llama in BF16 and in MXFP8 and compare",
        description="Train a small Llama on the Python standard library's source: in BF16, in MXFP8 and, as a"
        " control that should be seen to be worse, in MXFP4, each with the same seeds and data. Prints what"
        " was compiled and the losses, writes report.html, .json and .txt, losses.json and losses.png. Exit"
        " status 1 if the mean gap of the validation loss exceeds 0.25 %, or the control's does not.",
    )
    command.add_argument(
        "--policy",
        action="append",
        metavar="PRESET|FILE",
        help="a preset (nvidia, ocp, hybrid) or a policy file; more than one is compared (default nvidia)",
    )
    command.add_argument("--steps", type=positive, help="training steps per run (default 150)")
    command.add_argument("--seeds", type=positive, help="runs of each (default 2)")
    command.add_argument("--device", help="where to train, such as cuda (default: cuda if there is one)")
    add_folder(command, "where to write (default demo_out)", default=Path("demo_out"))
    command.add_argument(
        "--serve",
        action="store_true",
        help="instead: train once, then serve in BF16, with weights stored in MXFP8, and with activations in"
        " MXFP8 too; prints perplexity, the logits' gap, bytes and tokens a second",
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    with progress_bar("starting") as bar:
        if options.serve:
            serve(options, bar)
            return 0
        comparison = _trained(options, bar)
    return _conclude(comparison, options.output)


def _trained(options: argparse.Namespace, bar: Any) -> SeedComparison:
    """All runs."""
    check_plots(options.output)

    import torch

    from mxcompile import demo
    from mxcompile.cli.quiet import quiet
    from mxcompile.demo.compare import variants
    from mxcompile.policy import Policy

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
            backend, given = variant.backend
            torch._dynamo.reset()
            trainee = demo.Trainee(
                variant.label,
                settings,
                text,
                lambda model, backend=backend, given=given: torch.compile(  # type: ignore[misc]
                    model, backend=backend, options=given
                ),
            )
            for seed in range(seeds):
                runs.append(trainee.run(seed, progress))
                _say(bar, _said(runs[-1]))
    return demo.SeedComparison(runs=tuple(runs))


def _said(run: TrainingRun) -> str:
    return f"{run.label}, seed {run.seed}: {run.final:.4f} nats a byte, {run.step_ms:.0f} ms a step"


def _say(bar: Any, text: str) -> None:
    """A line above the bar."""
    bar.clear()
    print(text)
    sys.stdout.flush()
    bar.refresh()


def _conclude(runs: SeedComparison, out: Path) -> int:
    """Print the reports and the losses, write the files, and say the policies' gap."""
    from mxcompile.demo.compare import CONTROL, GAP_LIMIT
    from mxcompile.report.forms.tables import drawn

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
    """How far the baseline itself moves."""
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
    """Write reports, losses and their picture; returns the names of the files."""
    from mxcompile.demo import plot

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
    plot(comparison, out / "losses.png")
    return [*names, "losses.json", "losses.png"]
