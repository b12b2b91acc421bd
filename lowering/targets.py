"""The targets by name, from the files of `mxcompile.lowering.chips`, and the target of a device."""

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


def _targets() -> Iterator[Target]:
    for module in pkgutil.iter_modules(chips.__path__):
        yield from getattr(importlib.import_module(f"{chips.__name__}.{module.name}"), "TARGETS", ())


def _order(target: Target) -> tuple[bool, bool, int]:
    capability = target.arch if isinstance(target.arch, int) else 0
    return target.device != "cpu", isinstance(target.arch, str), capability


TARGETS = {target.name: target for target in sorted(_targets(), key=_order)}
"""Targets by name, the value of the option ``target``: CPUs, then NVIDIA's by capability, then AMD's."""

CHIPS = {chip: target.name for target in TARGETS.values() for chip in target.peaks}
"""Names of targets by the names of their chips."""


def check(name: str) -> str:
    """Returns the name of the target that `name`, a target or a chip, stands for; "auto" for "auto".

    Raises:
        TargetError: `name` is not a target and not a chip.
    """
    target = name if name == AUTO or name in TARGETS else CHIPS.get(_key(name))
    if target is None:
        raise TargetError(f"{not_allowed('target', name, [AUTO, *TARGETS])}, or a chip: {', '.join(CHIPS)}")
    return target


def _key(chip: str) -> str:
    return chip.lower().replace(" ", "")


def of_chip(name: str) -> Target:
    """Returns the target of the chip `name` with the chip's own peak rates, or the target `name`.

    Raises:
        TargetError: `name` is not a target and not a chip.
    """
    target = TARGETS[check(name)]
    return replace(target, peak=target.peaks.get(_key(name)) or target.peak)


def resolve(name: str, device: torch.device) -> Target:
    """Returns the target called `name` for a graph on `device`; for "auto", the target of `device`.

    Raises:
        TargetError: There is no such target, or it is for another kind of device.
    """
    here = of_device(device)
    if name == AUTO:
        return here
    target = TARGETS[check(name)]
    if target.device != here.device:
        raise TargetError(
            f"target {name} does not run on {device}: the model is on {here.name}. Leave target 'auto'"
            " to compile for where the model is"
        )
    return target


def of_device(device: torch.device) -> Target:
    """Returns the target of `device`. A chip that no file describes is emulated under its own name.

    Chips of one target differ by their memory: an H100 has 80 GB, an H200 has 141 GB.
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
