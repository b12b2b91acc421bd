"""``mxcompile demo``: train a small Llama in BF16 and MXFP8 and compare the losses."""

from __future__ import annotations

import argparse
import dataclasses
import json
from pathlib import Path
from typing import Any

from mxcompile.cli.arguments import check_plots, device, positive

GAP_LIMIT = 0.0025
CHANCE = 0.002
"""Standard deviation of one run's gap, to one digit: of six runs with seeds 0 to 2."""


def add_to(commands: Any) -> None:
    """Add the command to the parser."""
    command = commands.add_parser(
        "demo",
        help="train a small Llama in BF16 and in MXFP8 and compare",
        description="Train a small Llama on the Python standard library's source, in BF16 and in MXFP8 with"
        " the same seeds and data. Prints the compile report and both losses, writes report.json,"
        " report.txt, losses.json and losses.png. Exit status 1 if the validation gap exceeds 0.25 %.",
    )
    command.add_argument(
        "--policy",
        action="append",
        metavar="PRESET|FILE",
        help="a preset (nvidia, ocp, hybrid) or a policy file; more than one is compared (default nvidia)",
    )
    command.add_argument("--steps", type=positive, help="training steps per run")
    command.add_argument("--device", help="where to train, cpu or cuda (default: cuda if there is one)")
    command.add_argument(
        "-o", "--output", "--out", type=Path, default=Path("demo_out"), metavar="DIR", help="or demo_out"
    )
    command.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Run the command."""
    import torch
    from tqdm import tqdm

    from mxcompile import demo
    from mxcompile.cli.quiet import quiet
    from mxcompile.policy import Policy

    check_plots(options.output)
    policies = [Policy.resolve(name) for name in options.policy or ["nvidia"]]
    settings = demo.Settings(device=device(options.device))
    if options.steps:
        settings = dataclasses.replace(settings, steps=options.steps)
    text = demo.standard_library()
    print(
        f"Llama of {settings.layers} layers, {settings.width} wide, on {len(text.train):,} bytes of"
        f" Python source; {settings.steps} steps of {settings.batch}×{settings.length} bytes a run,"
        f" on {settings.device}."
    )
    print("Each run compiles first, which takes up to a minute.\n")

    runs: list[demo.Run] = []
    plans = [("bf16", "inductor", None), *((p.label, "mxfp8", p) for p in policies)]
    with quiet():
        for label, backend, policy in plans:
            name = label if policy is None else f"mxfp8 {label.removeprefix('preset ')}"
            torch._dynamo.reset()
            with tqdm(total=settings.steps, desc=f"{name:<14}", unit="step") as bar:

                def progress(run: demo.Run, step: int, bar: Any = bar) -> None:
                    bar.set_postfix_str(f"loss {run.train[-1]:.3f}", refresh=False)
                    bar.update(step - bar.n)

                def compiled(model: Any, backend: str = backend, policy: Any = policy) -> Any:
                    given = {"policy": policy} if policy else None
                    return torch.compile(model, backend=backend, options=given)

                runs.append(demo.train(name, settings, text, compiled, progress))
    return _conclude(runs, options.output)


def _conclude(runs: list[Any], out: Path) -> int:
    """Print the report and the losses, write the files, and say how far MXFP8 is from BF16."""
    from tabulate import tabulate

    from mxcompile import demo

    baseline = runs[0]
    print()
    for run in runs[1:]:
        if run.report is not None:
            print(f"{run.label}: {run.report}\n")
    rows = [
        [
            run.label,
            f"{run.train[-1]:.4f}",
            f"{run.final:.4f}",
            "" if run is baseline else f"{run.final / baseline.final - 1:+.3%}",
            f"{run.step_ms:.0f}",
        ]
        for run in runs
    ]
    headers = ["run", "train loss", "validation loss", "gap", "ms/step"]
    print(tabulate(rows, headers=headers, disable_numparse=True))

    out.mkdir(parents=True, exist_ok=True)
    for run in runs[1:]:
        if run.report is not None:
            name = "report" if run is runs[1] else f"report_{run.label.split()[-1].replace('/', '_')}"
            run.report.save(out / f"{name}.json")
            run.report.save(out / f"{name}.txt")
    losses = {
        run.label: {"train": run.train, "validation": run.validation, "step_ms": run.step_ms} for run in runs
    }
    (out / "losses.json").write_text(json.dumps(losses, indent=1) + "\n", encoding="utf-8")
    demo.plot(runs, out / "losses.png")
    print(f"\nwritten to {out}/: report.json, report.txt, losses.json, losses.png")

    worst = max(abs(run.final / baseline.final - 1) for run in runs[1:])
    verdict = "within" if worst <= GAP_LIMIT else "OUTSIDE"
    print(f"validation gap {worst:.3%}: {verdict} {GAP_LIMIT:.2%} of BF16")
    print(f"(one seed of a small model, which chance moves by about {CHANCE:.1%})")
    return 0 if worst <= GAP_LIMIT else 1
