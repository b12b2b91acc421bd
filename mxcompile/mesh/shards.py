"""The shards of a rank's GEMMs, compared with the GEMMs of the whole model.

    fprop  [m, k]·[k, n]      dgrad  [m, n]·[n, k]      wgrad  [n, m]·[m, k]

Policies match the sizes of the whole layer, so a shard gets the decision of its layer. Scale blocks start at
the shard's own edge: if the shard's contraction dimension is not a multiple of 32, the last block is shorter
and its scales differ from the whole layer's.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mxcompile.formats import BLOCK, is_quantized
from mxcompile.graph.tags import GemmTag, Kind
from mxcompile.policy import Gemm, Policy
from mxcompile.report import GemmRecord

Size = tuple[int | None, int | None, int | None]

_SIZES = {str(Gemm.FPROP): "mnk", str(Gemm.DGRAD): "mkn", str(Gemm.WGRAD): "nkm"}
"""Sizes of fprop that become m, n and k, by GEMM."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """A shard of a GEMM on one rank.

    whole, local: (m, n, k) in the whole model and on this rank. notes: consequences of the sharding. experts:
    (experts on this rank, all experts) if ranks have different experts, else None.
    """

    name: str
    role: str
    gemm: str
    whole: Size
    local: Size
    notes: tuple[str, ...] = ()
    experts: tuple[int, int] | None = None


def shards(
    gemms: Sequence[GemmRecord],
    whole: Mapping[str, tuple[GemmTag, ...]],
    policy: Policy,
    experts: Mapping[str, tuple[int, int]],
) -> Iterator[Shard]:
    """Yields the GEMMs of a rank that are shards, or whose decision differs from the whole model's.

    whole: GEMMs of the whole model by layer name. experts: (on this rank, in total) by layer name.
    """
    for gemm in gemms:
        tag = next((tag for tag in whole.get(gemm.name, ()) if tag.kind is Kind.LINEAR), None)
        if tag is None or gemm.gemm not in _SIZES or gemm.role != tag.role:
            continue
        m, n, k = (getattr(tag, size) for size in _SIZES[gemm.gemm])
        size, local = (m, n, k), (gemm.m, gemm.n, gemm.k)
        notes = tuple(_notes(gemm, tag, size, policy))
        some = experts.get(gemm.name)
        if size != local or notes or some:
            yield Shard(
                name=gemm.name,
                role=gemm.role,
                gemm=gemm.gemm,
                whole=size,
                local=local,
                notes=notes,
                experts=some,
            )


def unmatched(gemms: Iterable[GemmRecord], whole: Mapping[str, tuple[GemmTag, ...]]) -> Iterator[str]:
    """Yields warnings about layers that exist only on the rank or only in the whole model."""
    here = {gemm.name for gemm in gemms}
    for names, where in (
        (whole.keys() - here, "in the whole model alone"),
        (here - whole.keys(), "on this rank alone"),
    ):
        if names:
            yield f"layers {where}: {', '.join(sorted(names))}"


def _notes(gemm: GemmRecord, tag: GemmTag, whole: Size, policy: Policy) -> Iterator[str]:
    wanted = policy.decide(tag.as_layer()).choice(Gemm(gemm.gemm)).precision
    if gemm.precision != wanted:
        yield f"{gemm.precision}, in the whole model {wanted}: {gemm.reason}"
        return
    if is_quantized(gemm.precision) and (gemm.k or 0) % BLOCK and not (whole[2] or 0) % BLOCK:
        yield f"the shard cuts blocks: its k, {gemm.k}, is not a multiple of {BLOCK}"
    if (gemm.m, gemm.n, gemm.k) != whole:
        local: dict[str, Any] = dict(zip(_SIZES[gemm.gemm], (gemm.m, gemm.n, gemm.k), strict=True))
        alone = policy.decide(replace(tag.as_layer(), **local)).choice(Gemm(gemm.gemm))
        if alone.precision != gemm.precision:
            yield f"a layer of the shard's size would be {alone.precision}: {alone.reason}"
