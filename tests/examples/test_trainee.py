"""Runs of the demo's trainee: each from the first weights it is given, and from those again."""

from __future__ import annotations

import demo
import torch
from demo.training import build_model
from torch import nn

SETTINGS = demo.Settings(layers=1, width=32, feed_forward=64, heads=2, length=16, batch=2, steps=2)
TEXT = demo.Text(train=torch.arange(600) % 251, validation=torch.arange(700) * 7 % 253)


def halved(settings: demo.Settings) -> nn.Module:
    model = build_model(settings)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(0.5)
    return model


def losses(trainee: demo.Trainee) -> list[float]:
    return trainee.run(0, lambda run, step: None).train


def test_a_run_begins_with_the_weights_that_it_was_given():
    plain, changed = (
        demo.Trainee("", SETTINGS, TEXT, lambda model: model, build) for build in (build_model, halved)
    )
    first = losses(plain)
    assert losses(changed) != first
    assert losses(plain) == first
