"""Loss curves of the demo's model on the GPU of this machine: MXFP8 and FP8 beside BF16, seed by seed.

A row for each run has the validation losses in nats per byte by step, and the relative gap of the last loss
to BF16's. A gap above 1 % counts as wrong; in `parity.py`, on a CPU, chance moves a gap by 0.1 to 0.2 %.
Without a GPU it prints a line and measures nothing. Usage: python benchmarks/gpu_curves.py [--steps 1000]
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import common  # noqa: F401 - with the package `demo`
import demo
import gpu_common
import torch
from demo.training import build_model
from gpu_predicted import BF16, CompiledProgram, Row
from torch import Tensor, nn

import mxcompile
from mxcompile.lowering.targets import of_chip
from mxcompile.offline import Rates

POLICIES = ("nvidia", "fp8_delayed")
MOST = 0.01


class Autocast(nn.Module):
    """A model whose products run in BF16 by autocast, as in the demo."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: Tensor) -> Tensor:
        """Returns the logits [batch, length, vocabulary]."""
        with torch.autocast("cuda", torch.bfloat16):
            logits: Tensor = self.model(input_ids=input_ids).logits
        return logits


@dataclass(frozen=True, kw_only=True)
class CurveProgram(CompiledProgram):
    """A training run under the preset `kernel`."""

    settings: demo.Settings

    def code(self, target: str) -> mxcompile.CodegenResult:
        """Returns the code of forward and backward for `target`."""
        settings = replace(self.settings, device="meta")
        tokens = torch.empty(settings.batch, settings.length, dtype=torch.int64, device="meta")
        return mxcompile.codegen(
            Autocast(build_model(settings)), target=target, policy=self.kernel, kwargs={"input_ids": tokens}
        )

    def measure(self, rates: Rates, _: int) -> Iterator[Row]:
        """Yields a row with the losses, the step time, and its estimate without optimizer and host time."""
        run, base = curve(self.kernel, self.settings), curve(BF16, self.settings)
        gap = run.final / base.final - 1
        curves = {
            **self.about,
            "time_us": round(run.step_ms * 1e3),
            "validation": {step: round(loss, 4) for step, loss in run.validation.items()},
            "first_losses": [round(loss, 4) for loss in run.train[:10]],
            "gap": round(gap, 5),
            **self.expected(run.step_ms * 1e3, rates),
        }
        wrong = {} if abs(gap) <= MOST else {"wrong": f"the loss lies {gap:+.2%} from BF16's"}
        yield {**curves, **wrong}


@functools.cache
def text() -> demo.Text:
    """Returns the text to train on."""
    return demo.standard_library()


@functools.cache
def curve(policy: str, settings: demo.Settings) -> demo.TrainingRun:
    """Trains one model under `policy`. Returns the run."""
    torch._dynamo.reset()
    options: dict[str, Any] = {} if policy == BF16 else {"backend": "mxfp8", "options": {"policy": policy}}
    compiled = functools.partial(torch.compile, **options)
    return demo.train(policy, settings, text(), compiled, lambda *_: None)


def main() -> None:
    parser = gpu_common.parser(__doc__)
    parser.add_argument("--steps", type=int, default=1000)
    options = parser.parse_args()
    settings = demo.Settings(
        layers=4, width=512, heads=8, feed_forward=1408, length=256, steps=options.steps, device="cuda"
    )
    if options.small:
        settings = demo.Settings(device="cuda", steps=20)

    def programs(target: str) -> Iterator[CurveProgram]:
        shape = f"llama {settings.layers}×{settings.width}, {settings.steps} steps"
        for name in (BF16, *(name for name in POLICIES if name == "nvidia" or of_chip(target).fp8_tiles)):
            yield CurveProgram(part="curves", kernel=name, shape=shape, settings=settings)

    gpu_common.run(options, programs)


if __name__ == "__main__":
    main()
