"""The record of a stored weight from policy to checkpoint, and the table of a model's weights.

policy ─▶ decision for a parameter ─▶ tensor of a checkpoint ─▶ tensors of a file ─▶ row of the table
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from mxcompile.formats import Format, Tile, labels, stored_precision
from mxcompile.report.data.fold import spelled
from mxcompile.report.forms.tables import drawn, fitted
from mxcompile.report.forms.words import byte_count
from mxcompile.storage.cast import empty


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """One weight: the format in which it is stored, or the reason why it is not quantized.

    Attributes:
        name: Path of the parameter, or name of the weight in its checkpoint.
        shape: Shape of the values.
        dtype: Dtype of the values; None if the checkpoint does not contain it.
        held_bytes: Bytes of the weight as the model has it; None for a tensor of `dtype` and `shape`.
        role: Role of the weight's layers; if they differ, the first.
        reason: Why the weight is stored quantized, or why not.
        form: Format of qdata and scales; None for a weight that is not quantized.
        block_dim: Negative dimension of the values along which blocks run.
        is_table: Whether an embedding reads its rows.
        keeps_table: Whether the parameter stays beside the stored copy, because an embedding reads it.
        num_global_scales: Number of global scales, if the format has them; each expert can have its own.
        sqnr_db: Measured signal-to-quantization-noise ratio in dB, or None.
        tensors: Names of the weight's tensors in the file: elements, then scales, then the global scale.
        is_read: Whether the model has a parameter for it.
        file_tile: Tile of the scales in the file, or None. An `MXTensor` has a copy of them for each row.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype | None = None
    held_bytes: int | None = None
    role: str = ""
    reason: str = ""
    form: Format | None = None
    block_dim: int = -1
    is_table: bool = False
    keeps_table: bool = False
    num_global_scales: int = 1
    sqnr_db: float | None = None
    tensors: tuple[str, ...] = ()
    is_read: bool = True
    file_tile: Tile | None = None

    @property
    def stored(self) -> bool:
        """Whether the weight is stored quantized."""
        return self.form is not None

    @property
    def precision(self) -> str:
        """Name of the precision in which the weight is stored, "" if it is not quantized."""
        return "" if self.form is None else str(stored_precision(self.form))

    @property
    def bytes_bf16(self) -> int:
        """Bytes of the values in BF16."""
        return 2 * torch.Size(self.shape).numel()

    @property
    def num_bytes(self) -> int:
        """Bytes of qdata and scales, or of the values of a weight that is not quantized."""
        dtype = self.dtype or torch.bfloat16
        dense = dtype.itemsize * torch.Size(self.shape).numel()
        if self.form is None:
            return dense if self.held_bytes is None else self.held_bytes
        stored = empty(self.shape, self.block_dim, self.form, dtype, "meta")
        more = 0 if stored.global_scale is None else (self.num_global_scales - 1) * 4
        return stored.stored_bytes + more + dense * self.keeps_table

    def to_dict(self) -> dict[str, Any]:
        """Returns the row of the table as JSON data."""
        return {
            "name": self.name, "role": self.role, "shape": [*self.shape], "stored": self.stored,
            "reason": self.reason, "num_bytes": self.num_bytes, "bytes_bf16": self.bytes_bf16,
            "sqnr_db": self.sqnr_db, "precision": self.precision,
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """The decisions for the weights of a model's linear layers and embeddings.

    ``print`` shows a table with equal weights folded into one row.

    Attributes:
        weights: One record for each weight.
    """

    weights: tuple[StoredWeight, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes of the stored weights."""
        return sum(weight.num_bytes for weight in self.weights if weight.stored)

    @property
    def bytes_bf16(self) -> int:
        """Bytes of the stored weights in BF16."""
        return sum(weight.bytes_bf16 for weight in self.weights if weight.stored)

    def __str__(self) -> str:
        stored = [weight for weight in self.weights if weight.stored]
        share = f", {self.num_bytes / self.bytes_bf16:.1%} of their bytes in BF16" if stored else ""
        counted = f"{len(stored)} of {len(self.weights)} weights"
        precisions = labels(weight.precision for weight in stored)
        head = f"{counted} in {precisions}: {byte_count(self.num_bytes)}{share}"
        if stored and len(stored) < len(self.weights):
            every = sum(weight.num_bytes for weight in self.weights)
            bf16 = sum(weight.bytes_bf16 for weight in self.weights)
            head += f"\nall {len(self.weights)} weights: {byte_count(every)}, {every / bf16:.1%} of BF16"
        alike: dict[tuple[str, ...], list[StoredWeight]] = {}
        for weight in self.weights:
            shape, precision = "×".join(map(str, weight.shape)), weight.precision or "unchanged"
            alike.setdefault((weight.role, shape, precision, weight.reason), []).append(weight)
        measured = any(weight.sqnr_db is not None for weight in self.weights)
        table = [["weight", "role", "shape", "stored", "bytes", "reason", *["worst SQNR"] * measured]]
        for (role, shape, precision, reason), group in alike.items():
            size = byte_count(sum(weight.num_bytes for weight in group))
            worst = min((weight.sqnr_db for weight in group if weight.sqnr_db is not None), default=None)
            sqnr = ["" if worst is None else f"{worst:.1f} dB"] * measured
            names = spelled(weight.name for weight in group)
            table.append([names, role, shape, precision, size, reason, *sqnr])
        return f"{head}\n\n{drawn(fitted(table, ('weight', 'reason')))}" if self.weights else head
