"""The contents of a checkpoint: elements and scales of a weight as one tensor, equal tensors folded."""

from __future__ import annotations

from dataclasses import dataclass

from mxcompile.checkpoint.files import Checkpoint
from mxcompile.checkpoint.layouts import weights_in
from mxcompile.report.data.fold import spelled


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorGroup:
    """Tensors with the same kind and shape.

    Attributes:
        name: Names of all tensors, folded.
        kind: Dtype, or precision and element format of stored weights.
        shape: Shape of the values of each tensor.
        count: Number of tensors.
        num_bytes: Bytes of all tensors together.
        precision: Precision of stored weights, "" for other tensors.
    """

    name: str
    kind: str
    shape: tuple[int, ...]
    count: int
    num_bytes: int
    precision: str = ""


def contents(checkpoint: Checkpoint) -> tuple[str, list[TensorGroup]]:
    """Returns the layout of stored weights ("none" without any), and all tensors of a checkpoint.

    Raises:
        CheckpointError: Tensors are inconsistent.
    """
    alike: dict[tuple[str, str, tuple[int, ...]], list[tuple[str, int]]] = {}
    layout, weights = weights_in(checkpoint)
    for weight in weights:
        kind = str(checkpoint.entries[weight.tensors[0]].dtype).removeprefix("torch.")
        if not weight.is_read:
            kind += ", not read"
        if weight.form is not None:
            kind = f"{weight.precision} {weight.form.elem}"
        size = sum(checkpoint.entries[name].num_bytes for name in weight.tensors)
        alike.setdefault((weight.precision, kind, weight.shape), []).append((weight.name, size))
    return layout, [
        TensorGroup(
            name=spelled(name for name, _ in members),
            kind=kind,
            shape=shape,
            count=len(members),
            num_bytes=sum(size for _, size in members),
            precision=precision,
        )
        for (precision, kind, shape), members in alike.items()
    ]
