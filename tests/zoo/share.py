"""How many of the zoo's projections and feed-forward layers go to MXFP8, by count.

Counted are the linear layers that a plain eager run calls and whose expectation says MXFP8. Left out are
those that `known_misfits` lists, and all of an animal that `explain` does not get through.
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import torch
from animal import QUANTIZED, Animal, Build, expectation
from checks import fold
from disguise import PLAIN
from eager_run import eager_run
from known import known_misfits


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """layers: that should be in MXFP8. left_out: of them, which are not."""

    layers: int
    left_out: int


def share_of(animal: Animal) -> Share:
    """Of one animal."""
    torch.manual_seed(0)
    with warnings.catch_warnings(action="ignore"):
        model, args, kwargs = animal.make(Build(attention=animal.attentions[0]))
        layers = eager_run(model.eval(), args, kwargs).layers
    ours = [name for name in layers if (e := expectation(name, animal.expectations)) and e.quantized]
    listed = known_misfits(animal.name, PLAIN)
    if any(misfit.layer == "explain" for misfit in listed):
        return Share(layers=len(ours), left_out=len(ours))
    out = {misfit.layer for misfit in listed if misfit.problem not in QUANTIZED}
    return Share(layers=len(ours), left_out=sum(fold(name) in out for name in ours))
