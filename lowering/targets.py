"""The targets: one row a chip, which decides how the mx GEMMs of a graph are lowered for it.

``native``: Triton's ``tl.dot_scaled`` becomes the chip's block-scaled MMA. ``emulated``: operands are
dequantized, fused into their producers, and the vendor's BF16 GEMM multiplies them.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from mxcompile.errors import TargetError, not_allowed


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """A chip. device: torch device type. mma: instruction of the MX GEMM, "" where it is emulated."""

    name: str
    device: str
    mma: str = ""
    chips: str = ""

    @property
    def native(self) -> bool:
        """Whether the chip multiplies MX operands itself."""
        return bool(self.mma)


TARGETS = {
    target.name: target
    for target in (
        Target(name="cpu", device="cpu", chips="any CPU with a C++ compiler"),
        Target(name="sm_80", device="cuda", chips="A100"),
        Target(name="sm_89", device="cuda", chips="L4, L40S, RTX 40"),
        Target(name="sm_90", device="cuda", chips="H100, H200"),
        Target(name="sm_100", device="cuda", mma="tcgen05.mma block_scale", chips="B200, GB200"),
        Target(name="sm_103", device="cuda", mma="tcgen05.mma block_scale", chips="B300, GB300"),
        Target(name="sm_120", device="cuda", mma="mma.sync block_scale", chips="RTX 50"),
        Target(name="gfx942", device="cuda", chips="MI300"),
        Target(name="gfx950", device="cuda", mma="v_mfma_scale", chips="MI350"),
    )
}
"""By name, the value of the option ``target``."""

AUTO = "auto"


def check(name: str) -> str:
    """`name` if it is a target or "auto". Raises `TargetError`."""
    if name != AUTO and name not in TARGETS:
        raise TargetError(not_allowed("target", name, [AUTO, *TARGETS]))
    return name


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
    """What `device` is; a chip without a row is emulated under its own name."""
    if device.type != "cuda":
        return TARGETS.get(device.type, Target(name=device.type, device=device.type))
    properties = torch.cuda.get_device_properties(device)
    architecture = getattr(properties, "gcnArchName", "").partition(":")[0]
    name = architecture or f"sm_{properties.major}{properties.minor}"
    return TARGETS.get(name, Target(name=name, device="cuda"))
