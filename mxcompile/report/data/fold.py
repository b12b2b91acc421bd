"""Folding: layers whose paths differ only in numbers become one row.

``model.layers.0.mlp.up_proj`` … ``model.layers.31.mlp.up_proj`` → ``model.layers.0-31.mlp.up_proj``

A folded name stands for exactly the layers that it spells out: ``0.experts.0`` and ``0.experts.1`` become
``0.experts.0-1``, and ``1.experts.0`` stays a row of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mxcompile.report.data.record import GemmRecord

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


def fold(gemms: Iterable[GemmRecord]) -> list[Row]:
    """Returns `gemms` as rows of equal layers, in the order of the first GEMM of each row."""
    layers: dict[tuple[object, ...], list[GemmRecord]] = {}
    for gemm in gemms:
        layers.setdefault((gemm.graph, gemm.name, gemm.role, gemm.source), []).append(gemm)
    ordered = list(layers.values())
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, records in enumerate(ordered):
        alike.setdefault(_likeness(records), []).append(index)
    folded = [
        (path, members)
        for group in alike.values()
        for path, members in _merged([(_path(ordered[i][0].name), [i]) for i in group])
    ]
    return [
        Row(
            name=_spelled(path),
            names=tuple(ordered[member][0].name for member in members),
            gemms=tuple(ordered[members[0]]),
        )
        for path, members in sorted(folded, key=lambda row: row[1][0])
    ]


def spelled(names: Iterable[str]) -> str:
    """Returns `names` folded and joined by commas: ``layers.0-31.up``."""
    alike: dict[tuple[object, ...], list[_Group]] = {}
    for name in names:
        path = _path(name)
        shape = tuple(_ANY if isinstance(step, frozenset) else step for step in path)
        alike.setdefault(shape, []).append((path, []))
    return ", ".join(_spelled(path) for group in alike.values() for path, _ in _merged(group))


def _likeness(records: list[GemmRecord]) -> tuple[object, ...]:
    """Returns the features that all layers of a row share."""
    path = _path(records[0].name)
    return tuple(_ANY if isinstance(step, frozenset) else step for step in path), tuple(
        (g.role, g.gemm, g.batch, g.m, g.n, g.k, g.precision, g.formats, g.kernel, g.reason) for g in records
    )


def _path(name: str) -> _Path:
    """Returns the parts of a dotted `name`; a number becomes a set that contains it."""
    return tuple(
        frozenset({int(step)}) if step.isdecimal() and str(int(step)) == step else step
        for step in name.split(".")
    )


def _merged(groups: list[_Group]) -> list[_Group]:
    """Merges groups whose paths differ only in one number, the last number first. Returns the groups."""
    for column in reversed(range(len(groups[0][0]))):
        buckets: dict[_Path, list[_Group]] = {}
        for path, members in groups:
            rest = path[:column] + path[column + 1 :]
            buckets.setdefault(rest, []).append((path, members))
        groups = [_joined(bucket, column) for bucket in buckets.values()]
    return groups


def _joined(groups: list[_Group], column: int) -> _Group:
    """Returns `groups` as one group. Their paths differ only in the part with index `column`."""
    path = groups[0][0]
    numbers = [step for other, _ in groups if isinstance(step := other[column], frozenset)]
    step = _ANY.union(*numbers) if numbers else path[column]
    members = sorted(member for _, members in groups for member in members)
    return (*path[:column], step, *path[column + 1 :]), members


def _spelled(path: _Path) -> str:
    return ".".join(_ranges(step) if isinstance(step, frozenset) else step for step in path)


def _ranges(numbers: frozenset[int]) -> str:
    """Returns ``0-2,5`` for ``{0, 1, 2, 5}``."""
    ordered = sorted(numbers)
    starts = [number for number in ordered if number - 1 not in numbers]
    ends = [number for number in ordered if number + 1 not in numbers]
    return ",".join(
        f"{start}" if start == end else f"{start}-{end}" for start, end in zip(starts, ends, strict=True)
    )
