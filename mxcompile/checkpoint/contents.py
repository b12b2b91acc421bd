"""The contents of a checkpoint: its tensors, elements and scales as one, equal ones folded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.layouts import named
from mxcompile.report.fold import spelled


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Tensors of one kind and shape.

    name: of all, folded. kind: dtype, or "mxfp8" and the elements. count, num_bytes: of all together.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    count: int
    num_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """A checkpoint. layout: of its MXFP8 weights, "none" if it has none. mxfp8_bytes: of those."""

    path: Path
    layout: str
    num_files: int
    num_bytes: int
    mxfp8_bytes: int
    groups: tuple[TensorGroup, ...]


def contents(path: str | Path) -> Contents:
    """Returns the contents of the checkpoint at `path`, from its headers. Raises `CheckpointError`."""
    checkpoint = Checkpoint.open(path)
    alike: dict[tuple[str, tuple[int, ...]], list[tuple[str, int]]] = {}
    layout, weights = named(checkpoint)
    for weight in weights:
        elements = checkpoint.entries[weight.elements]
        kind = str(elements.dtype).removeprefix("torch.")
        size = elements.num_bytes
        if weight.scales:
            kind = f"mxfp8 {'e4m3' if 'e4m3' in kind else 'e5m2'}"
            size += checkpoint.entries[weight.scales].num_bytes
        alike.setdefault((kind, elements.shape), []).append((weight.name, size))
    groups = tuple(
        TensorGroup(
            name=spelled(name for name, _ in members),
            kind=kind,
            shape=shape,
            count=len(members),
            num_bytes=sum(size for _, size in members),
        )
        for (kind, shape), members in alike.items()
    )
    return Contents(
        path=checkpoint.path,
        layout=layout,
        num_files=len(checkpoint.files),
        num_bytes=sum(group.num_bytes for group in groups),
        mxfp8_bytes=sum(group.num_bytes for group in groups if group.kind.startswith("mxfp8")),
        groups=groups,
    )
