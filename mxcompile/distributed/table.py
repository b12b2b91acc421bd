"""The gather format of each weight of a model, as a value and as a printed table."""

from __future__ import annotations

from dataclasses import dataclass

from mxcompile.report.data.fold import spelled
from mxcompile.report.forms.tables import Table, drawn, fitted
from mxcompile.report.forms.words import byte_count


@dataclass(frozen=True, kw_only=True, slots=True)
class GatheredWeight:
    """The gather format of one weight of a linear layer.

    Attributes:
        name: Path of the parameter.
        role: Role of the layer.
        shape: Shape of the weight before FSDP2 shards it. Under tensor parallelism, shape of the local shard.
        travels: Whether FSDP2 gathers the weight in MXFP8.
        reason: Reason for the format.
        num_bytes: Bytes of the gathered tensors.
        bytes_bf16: Bytes of the weight in BF16.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    travels: bool
    reason: str
    num_bytes: int
    bytes_bf16: int


@dataclass(frozen=True, kw_only=True, slots=True)
class QuantizedGathers:
    """The gather format of every weight of a model's linear layers.

    ``print`` shows a table with equal weights folded into a row.

    Attributes:
        weights: One entry for each weight, in module order.
    """

    weights: tuple[GatheredWeight, ...] = ()

    @property
    def num_bytes(self) -> int:
        """Bytes gathered for the weights in MXFP8."""
        return sum(weight.num_bytes for weight in self.weights if weight.travels)

    @property
    def bytes_bf16(self) -> int:
        """Bytes of the same weights in BF16."""
        return sum(weight.bytes_bf16 for weight in self.weights if weight.travels)

    def __str__(self) -> str:
        travel = sum(weight.travels for weight in self.weights)
        share = f" ({self.num_bytes / self.bytes_bf16:.1%} of BF16)" if self.bytes_bf16 else ""
        head = (
            f"{travel} of {len(self.weights)} weights are gathered in MXFP8:"
            f" {byte_count(self.num_bytes)}{share}"
        )
        return f"{head}\n\n{drawn(fitted(self._table(), ('weight', 'reason')))}" if self.weights else head

    def _table(self) -> Table:
        alike: dict[tuple[object, ...], list[GatheredWeight]] = {}
        for weight in self.weights:
            key = weight.role, weight.shape, weight.travels, weight.reason
            alike.setdefault(key, []).append(weight)
        rows = [
            [
                spelled(weight.name for weight in group),
                group[0].role,
                "×".join(map(str, group[0].shape)),
                "mxfp8" if group[0].travels else "unchanged",
                group[0].reason,
            ]
            for group in alike.values()
        ]
        return [["weight", "role", "shape", "gathered", "reason"], *rows]
