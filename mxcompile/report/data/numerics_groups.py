"""Errors of an audit by role or by repeated block.

The error of a group is √(Σ FLOPs · rel_error² / Σ FLOPs) over its GEMMs. Its underflow is the mean over its
casts, weighted by FLOPs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

from mxcompile.report.data.numerics import GemmNumerics, Numerics, TensorNumerics
from mxcompile.report.data.outline import inner_block

OUTSIDE = "outside blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """GEMMs with a common role or block, and the casts whose first reader has the same.

    name: the role or block. flop_share: share of the FLOPs of all measured GEMMs. rel_error, underflow: see
    the module; underflow is None without casts. lowest_sqnr_db: lowest SQNR of a GEMM. worst: the GEMM with
    most harm.
    """

    name: str
    num_gemms: int
    flop_share: float
    rel_error: float
    lowest_sqnr_db: float
    underflow: float | None
    worst: GemmNumerics


@dataclass(slots=True)
class _Members:
    gemms: list[GemmNumerics] = field(default_factory=list)
    tensors: list[TensorNumerics] = field(default_factory=list)


def by_role(numerics: Numerics) -> list[Group]:
    """Returns a group for each role, sorted by harm, largest first."""
    return sorted(_grouped(numerics, lambda gemm: gemm.role), key=_harm, reverse=True)


def by_block(numerics: Numerics) -> list[Group]:
    """Returns a group for each repeated block, in the order of the model."""
    return _grouped(numerics, lambda gemm: inner_block(gemm.name) or OUTSIDE)


def _harm(group: Group) -> float:
    harm = group.flop_share * group.rel_error**2
    return math.inf if math.isnan(harm) else harm


def _grouped(numerics: Numerics, key: Callable[[GemmNumerics | TensorNumerics], str]) -> list[Group]:
    groups: dict[str, _Members] = {}
    for gemm in numerics.gemms:
        groups.setdefault(key(gemm), _Members()).gemms.append(gemm)
    for tensor in numerics.tensors:
        if key(tensor) in groups:
            groups[key(tensor)].tensors.append(tensor)
    total = sum(gemm.flops for gemm in numerics.gemms) or 1
    return [_group(name, members, total) for name, members in groups.items()]


def _group(name: str, members: _Members, total: int) -> Group:
    gemms, tensors = members.gemms, members.tensors
    flops = sum(gemm.flops for gemm in gemms)
    read = sum(tensor.flops for tensor in tensors)
    inside = Numerics(gemms=tuple(gemms))
    lowest = inside.lowest_sqnr_db
    assert lowest is not None
    return Group(
        name=name,
        num_gemms=len(gemms),
        flop_share=flops / total,
        rel_error=math.sqrt(sum(gemm.harm for gemm in gemms) / flops) if flops else 0.0,
        lowest_sqnr_db=lowest,
        underflow=sum(tensor.flops * tensor.underflow for tensor in tensors) / read if read else None,
        worst=inside.worst_gemms()[0],
    )
