"""The targets: the chips of `mxcompile.lowering.chips` by name, and the one of a device."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator
from dataclasses import replace

import torch

from mxcompile.errors import TargetError, not_allowed
from mxcompile.lowering import chips
from mxcompile.lowering.chips.target import Target as Target

AUTO = "auto"
CPU_FP32 = "cpu_fp32"


def _found() -> Iterator[Target]:
    """The targets of every file of chips, CPUs first, then NVIDIA's, then AMD's."""
    for module in pkgutil.iter_modules(chips.__path__):
        yield from getattr(importlib.import_module(f"{chips.__name__}.{module.name}"), "TARGETS", ())


def _order(target: Target) -> tuple[bool, bool, int]:
    capability = target.arch if isinstance(target.arch, int) else 0
    return target.device != "cpu", isinstance(target.arch, str), capability


TARGETS = {target.name: target for target in sorted(_found(), key=_order)}
"""By name, the value of the option ``target``."""

CHIPS = {chip: target.name for target in TARGETS.values() for chip in target.peaks}
"""Targets by what their chips are called."""


def check(name: str) -> str:
    """The target called `name`, or the target of the chip called so; "auto" stays. Raises `TargetError`."""
    known = name if name == AUTO or name in TARGETS else CHIPS.get(_word(name))
    if known is None:
        raise TargetError(f"{not_allowed('target', name, [AUTO, *TARGETS])}, or a chip: {', '.join(CHIPS)}")
    return known


def _word(chip: str) -> str:
    return chip.lower().replace(" ", "")


def of_chip(name: str) -> Target:
    """The target of the chip called `name`, with the chip's own peaks, or the target of that name.

    Raises `TargetError`.
    """
    target = TARGETS[check(name)]
    return replace(target, peak=target.peaks.get(_word(name)) or target.peak)


def resolve(name: str, device: torch.device) -> Target:
    """The target called `name` for a graph on `device`; "auto" is what the device is.

    Raises `TargetError` if the device is of another kind. A chip without a row is served by its device's
    emulated lowering under its own name.
    """
    here = of_device(device)
    if name == AUTO:
        return here
    wanted = TARGETS[check(name)]
    if wanted.device != here.device:
        raise TargetError(
            f"target {name} does not run on {device}: the model is on {here.name}. Leave target 'auto'"
            " to compile for where the model is"
        )
    return wanted


def of_device(device: torch.device) -> Target:
    """Returns the target of `device`; a chip without a row is emulated under its own name.

    The memory of a device tells chips of one target apart: 80 GB is an H100's, 141 GB an H200's.
    """
    if device.type != "cuda":
        return TARGETS.get(device.type, Target(name=device.type, device=device.type))
    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", "").partition(":")[0]
    name = architecture or f"sm_{properties.major}{properties.minor}"
    target = TARGETS.get(name, Target(name=name, device="cuda"))
    peaks = [target.peak, *target.peaks.values()]
    memory_gb = properties.total_memory / 1e9
    nearest = min(filter(None, peaks), key=lambda peak: abs(peak.memory_gb - memory_gb), default=None)
    return replace(target, peak=nearest)
