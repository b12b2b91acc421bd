"""Records that no captured graph has: of code that serves several layers, and code that is not compiled."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence

from mxcompile.plan.assumed import EagerProduct
from mxcompile.report import GemmRecord

NOT_COMPILED = "outside the compiled graphs"


def moved(gemms: Iterable[GemmRecord], first: Sequence[str], now: Sequence[str]) -> tuple[GemmRecord, ...]:
    """`gemms`, of a graph compiled with parameters at the paths `first`, for a call with those at `now`."""
    heads: dict[str, str] = {}
    for before, after in zip(first, now, strict=True):
        if before and after and before != after:
            old, new = _differing(before, after)
            heads[old] = new
    return tuple(dataclasses.replace(gemm, name=_renamed(gemm.name, heads)) for gemm in gemms)


def _differing(before: str, after: str) -> tuple[str, str]:
    """Two paths without what they have in common at the end."""
    old, new = before.split("."), after.split(".")
    while old and new and old[-1] == new[-1]:
        old.pop()
        new.pop()
    return ".".join(old), ".".join(new)


def _renamed(name: str, heads: dict[str, str]) -> str:
    steps = name.split(".")
    for end in range(len(steps), 0, -1):
        head = ".".join(steps[:end])
        if head in heads:
            return ".".join(part for part in (heads[head], *steps[end:]) if part)
    return name


def eager_records(products: Iterable[EagerProduct], *, training: bool) -> tuple[GemmRecord, ...]:
    """Records of products that ran outside of compiled graphs, with both gradients if `training`."""
    return tuple(
        GemmRecord(
            name=product.path,
            role="other",
            gemm=gemm,
            m=product.flops // 2,
            n=1,
            k=1,
            precision="bf16",
            reason=NOT_COMPILED,
            kernel=product.operator,
            source=product.source,
        )
        for product in products
        for gemm in (("fprop", "dgrad", "wgrad") if training else ("fprop",))
    )
