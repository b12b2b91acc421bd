"""The contents of a checkpoint: its tensors, elements and scales as one, equal ones folded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.layouts import weights_in
from mxcompile.report.fold import spelled


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Tensors of one kind and shape.

    Attributes:
        name: Names of all tensors, folded.
        kind: Their dtype, or precision and elements of stored weights.
        shape: Shape of the values of each.
        count: Number of tensors.
        num_bytes: Bytes of all together.
        precision: Precision of stored weights, "" for other tensors.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    count: int
    num_bytes: int
    precision: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Contents:
    """The contents of a checkpoint.

    Attributes:
        path: Its path.
        layout: Layout of its stored weights, "none" if it has none.
        num_files: Number of files.
        num_bytes: Bytes of all tensors.
        stored_bytes: Bytes of stored weights.
        groups: Its tensors.
    """

    path: Path
    layout: str
    num_files: int
    num_bytes: int
    stored_bytes: int
    groups: tuple[TensorGroup, ...]


def contents(path: str | Path) -> Contents:
    """Returns the contents of the checkpoint at `path`, from its headers. Raises `CheckpointError`."""
    checkpoint = Checkpoint.open(path)
    alike: dict[tuple[str, str, tuple[int, ...]], list[tuple[str, int]]] = {}
    layout, weights = weights_in(checkpoint)
    for weight in weights:
        elements = checkpoint.entries[weight.tensors[0]]
        kind = str(elements.dtype).removeprefix("torch.")
        if not weight.is_read:
            kind += ", not read"
        if weight.form is not None:
            kind = f"{weight.precision} {weight.form.elem}"
        size = sum(checkpoint.entries[name].num_bytes for name in weight.tensors)
        alike.setdefault((weight.precision, kind, weight.shape), []).append((weight.name, size))
    groups = tuple(
        TensorGroup(
            name=spelled(name for name, _ in members),
            kind=kind,
            shape=shape,
            count=len(members),
            num_bytes=sum(size for _, size in members),
            precision=precision,
        )
        for (precision, kind, shape), members in alike.items()
    )
    return Contents(
        path=checkpoint.path,
        layout=layout,
        num_files=len(checkpoint.files),
        num_bytes=sum(group.num_bytes for group in groups),
        stored_bytes=sum(group.num_bytes for group in groups if group.precision),
        groups=groups,
    )
