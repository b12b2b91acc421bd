"""Several seeds of BF16, of policies and of a control that is bad on purpose: what a gap means.

    gap     loss / loss of BF16 with the same seed − 1, signed
    spread  (largest − smallest loss of BF16 over seeds) / their mean

A gap far below the spread is one that another seed outweighs; the control shows that a gap would be seen.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from mxcompile.demo.training import Run, Settings
from mxcompile.policy import Policy

BASELINE = "bf16"
CONTROL = "control: mxfp4"
GAP_LIMIT = 0.0025
"""Largest mean gap of a policy, as a share."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """A way to train. policy: None for Inductor alone."""

    label: str
    policy: Policy | None = None

    @property
    def backend(self) -> tuple[str, dict[str, Any] | None]:
        """What ``torch.compile`` is given: backend and options."""
        return ("inductor", None) if self.policy is None else ("mxfp8", {"policy": self.policy})


def variants(policies: Iterable[Policy]) -> list[Variant]:
    """BF16, each of `policies`, and the control: all that they quantize in 4 bits."""
    roles = ["qkv", "attn_out", "ffn_in", "ffn_out"]
    control = {"version": 1, "rules": [{"match": {"role": roles}, "use": "mxfp4"}]}
    named = [Variant(label=f"policy {p.label.removeprefix('preset ')}", policy=p) for p in policies]
    return [Variant(label=BASELINE), *named, Variant(label=CONTROL, policy=Policy.resolve(control))]


def quick_settings(device: str = "cpu", steps: int | None = None) -> Settings:
    """The size of the demonstration: a few minutes on two cores for three variants and two seeds."""
    return Settings(device=device, batch=16, steps=steps or 150, validate_every=25, validation_batches=8)


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """The runs of every variant, in the order of their seeds."""

    runs: tuple[Run, ...]

    def of(self, label: str) -> list[Run]:
        """The runs of one variant."""
        return [run for run in self.runs if run.label == label]

    @property
    def labels(self) -> list[str]:
        """Of the variants, in order."""
        return list(dict.fromkeys(run.label for run in self.runs))

    @property
    def policies(self) -> list[str]:
        """The variants between baseline and control."""
        return [label for label in self.labels if label not in (BASELINE, CONTROL)]

    def gaps(self, label: str, step: int | None = None) -> list[float]:
        """Gap of each run to BF16's of the same seed, after the last step or after `step`."""
        pairs = zip(self.of(label), self.of(BASELINE), strict=True)
        return [_loss(run, step) / _loss(base, step) - 1 for run, base in pairs]

    def gap(self, label: str) -> float:
        """Mean of `gaps`."""
        found = self.gaps(label)
        return sum(found) / len(found)

    @property
    def spread(self) -> float:
        """How far BF16's losses lie apart from seed to seed, as a share; 0 for one seed."""
        losses = [run.final for run in self.of(BASELINE)]
        return (max(losses) - min(losses)) / (sum(losses) / len(losses))


def _loss(run: Run, step: int | None) -> float:
    return run.final if step is None else run.validation[step]
