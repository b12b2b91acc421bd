"""Folding: layers whose paths differ only in numbers become one row.

``model.layers.0.mlp.up_proj`` … ``model.layers.31.mlp.up_proj`` → ``model.layers.0-31.mlp.up_proj``

A folded name stands for exactly the layers that it spells out: ``0.experts.0`` and ``0.experts.1`` become
``0.experts.0-1``, and ``1.experts.0`` stays a row of its own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from mxcompile.report.data.record import GemmRecord

_Item = TypeVar("_Item")
_Key = TypeVar("_Key")
_Step = str | frozenset[int]
_Path = tuple[_Step, ...]
_Group = tuple[_Path, list[int]]
_ANY: frozenset[int] = frozenset()


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """Equal layers: their folded name, all their names, and the records of the first layer."""

    name: str
    names: tuple[str, ...]
    gemms: tuple[GemmRecord, ...]

    @property
    def count(self) -> int:
        """Number of layers."""
        return len(self.names)


def grouped(items: Iterable[_Item], key: Callable[[_Item], _Key]) -> dict[_Key, list[_Item]]:
    """Returns `items` in lists of equal `key`, by key, in the order of the first items."""
    groups: dict[_Key, list[_Item]] = {}
    for item in items:
        groups.setdefault(key(item), []).append(item)
    return groups


def fold(gemms: Iterable[GemmRecord]) -> list[Row]:
    """Returns `gemms` as rows of equal layers, in the order of the first GEMM of each row."""
    ordered = [*grouped(gemms, lambda gemm: (gemm.graph, gemm.name, gemm.role, gemm.source)).values()]
    features = [
        tuple(
            (g.role, g.gemm, g.batch, g.m, g.n, g.k, g.precision, g.formats, g.kernel, g.reason)
            for g in records
        )
        for records in ordered
    ]
    folded = _folded([records[0].name for records in ordered], features)
    return [
        Row(
            name=name,
            names=tuple(ordered[member][0].name for member in members),
            gemms=tuple(ordered[members[0]]),
        )
        for name, members in sorted(folded, key=lambda row: row[1][0])
    ]


def spelled(names: Iterable[str]) -> str:
    """Returns `names` folded and joined by commas: ``layers.0-31.up``."""
    names = list(names)
    return ", ".join(name for name, _ in _folded(names, [()] * len(names)))


def _folded(names: Sequence[str], features: Sequence[tuple[object, ...]]) -> Iterator[tuple[str, list[int]]]:
    """Yields each folded name of `names` with equal `features`, and the indices of its members."""
    alike: dict[tuple[object, ...], list[_Group]] = {}
    for index, (name, feature) in enumerate(zip(names, features, strict=True)):
        path = tuple(
            frozenset({int(step)}) if step.isdecimal() and str(int(step)) == step else step
            for step in name.split(".")
        )
        shape = tuple(_ANY if isinstance(step, frozenset) else step for step in path)
        alike.setdefault((shape, feature), []).append((path, [index]))
    for group in alike.values():
        for path, members in _merged(group):
            yield ".".join(_ranges(step) if isinstance(step, frozenset) else step for step in path), members


def _merged(groups: list[_Group]) -> list[_Group]:
    """Merges groups whose paths differ only in one number, the last number first. Returns the groups."""
    for column in reversed(range(len(groups[0][0]))):
        buckets: dict[_Path, list[_Group]] = {}
        for path, members in groups:
            buckets.setdefault(path[:column] + path[column + 1 :], []).append((path, members))
        groups = []
        for bucket in buckets.values():
            first = bucket[0][0]
            numbers = [step for path, _ in bucket if isinstance(step := path[column], frozenset)]
            joined = _ANY.union(*numbers) if numbers else first[column]
            members = sorted(member for _, some in bucket for member in some)
            groups.append(((*first[:column], joined, *first[column + 1 :]), members))
    return groups


def _ranges(numbers: frozenset[int]) -> str:
    """Returns ``0-2,5`` for ``{0, 1, 2, 5}``."""
    ordered = sorted(numbers)
    starts = [number for number in ordered if number - 1 not in numbers]
    ends = [number for number in ordered if number + 1 not in numbers]
    return ",".join(
        f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)
    )
