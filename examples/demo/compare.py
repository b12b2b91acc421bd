"""Compares a baseline, policies and a deliberately bad control over several seeds, to judge a gap.

    gap     loss / loss of the baseline with the same seed − 1, signed
    spread  (largest − smallest loss of the baseline over seeds) / their mean

The baseline is BF16 under Inductor, or FP32 on a CPU that multiplies BF16 slowly.

A gap far below the spread is smaller than the effect of another seed. The control shows that the runs are
long enough to detect a bad format.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from demo.training import Settings, TrainingRun
from mxcompile.lowering.cpu.features import features
from mxcompile.lowering.targets import of_device
from mxcompile.policy import Policy

CONTROL = "control: mxfp4"
MXFP4_POLICY = {
    "version": 1,
    "rules": [{"match": {"role": ["qkv", "attn_out", "ffn_in", "ffn_out"]}, "use": "mxfp4"}],
}
"""Quantizes to 4 bits all layers that the presets quantize."""

GAP_LIMIT = 0.0025
"""Largest mean gap of a policy, as a share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A way to train. policy: policy of mxcompile, None for Inductor alone."""

    label: str
    policy: Policy | None = None

    @property
    def backend(self) -> tuple[str, dict[str, Any] | None]:
        """Returns the backend and options for ``torch.compile``."""
        return ("inductor", None) if self.policy is None else ("mxfp8", {"policy": self.policy})


def variants(policies: Iterable[Policy], baseline: str = "bf16") -> list[Variant]:
    """Returns the baseline, a variant for each of `policies`, and the control in 4 bits."""
    named = [Variant(label=f"policy {p.label.removeprefix('preset ')}", policy=p) for p in policies]
    return [Variant(label=baseline), *named, Variant(label=CONTROL, policy=Policy.resolve(MXFP4_POLICY))]


def quick_settings(device: str = "cpu", steps: int | None = None) -> Settings:
    """Returns the settings of the demonstration: minutes on two cores for three variants and two seeds."""
    slow = of_device(torch.device(device)).slow_dtypes
    return Settings(
        device=device,
        dtype=torch.float32 if torch.bfloat16 in slow else torch.bfloat16,
        batch=16,
        steps=steps or 150,
        validate_every=25,
        validation_batches=8,
    )


def why_fp32(settings: Settings) -> str:
    """Returns a line with the reason why runs of `settings` are in FP32; "" for other dtypes."""
    if settings.dtype is not torch.float32:
        return ""
    return (
        f"This CPU ({features().name}) has no instructions for BF16 products, so the model and its baseline"
        " are in FP32."
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class SeedComparison:
    """The runs of every variant, in the order of their seeds."""

    runs: tuple[TrainingRun, ...]

    def of(self, label: str) -> list[TrainingRun]:
        """Returns the runs of the variant `label`."""
        return [run for run in self.runs if run.label == label]

    @property
    def labels(self) -> list[str]:
        """Labels of the variants, in order."""
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def baseline(self) -> str:
        """The label of the first runs, to which all others are compared."""
        return self.labels[0]

    @property
    def policies(self) -> list[str]:
        """Labels of the variants other than baseline and control."""
        return [label for label in self.labels if label not in (self.baseline, CONTROL)]

    def gaps(self, label: str, step: int | None = None) -> list[float]:
        """Returns the gap of each run to the baseline with the same seed, after `step` or the last step."""
        pairs = zip(self.of(label), self.of(self.baseline), strict=True)
        return [_loss(run, step) / _loss(base, step) - 1 for run, base in pairs]

    def gap(self, label: str) -> float:
        """Returns the mean of `gaps`."""
        gaps = self.gaps(label)
        return sum(gaps) / len(gaps)

    @property
    def tells(self) -> bool:
        """Whether the control's mean gap exceeds `GAP_LIMIT`, so the runs can detect a bad format."""
        return self.gap(CONTROL) > GAP_LIMIT

    @property
    def spread(self) -> float | None:
        """Relative range of the baseline's final losses over the seeds; None for one seed."""
        losses = [run.final for run in self.of(self.baseline)]
        if len(losses) < 2:
            return None
        return (max(losses) - min(losses)) / (sum(losses) / len(losses))


def _loss(run: TrainingRun, step: int | None) -> float:
    return run.final if step is None else run.validation[step]
