"""The outcome for each weight of a model, as a value and as a table."""

from __future__ import annotations

from dataclasses import dataclass

from mxcompile.formats import labels
from mxcompile.report.fold import spelled
from mxcompile.report.forms.tables import Table, drawn, fitted
from mxcompile.report.forms.words import byte_count


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeight:
    """One weight of a linear layer or an embedding.

    name: path of the parameter. role: of its layer. shape: of the values. stored: whether it is stored
    quantized now. reason: for that. num_bytes: what it takes; bytes_bf16: what it takes in BF16. sqnr_db: of
    the stored values over those they were made from, if that was measured. precision: the word of the
    precision it is stored in, "" where it is not.
    """

    name: str
    role: str
    shape: tuple[int, ...]
    stored: bool
    reason: str
    num_bytes: int
    bytes_bf16: int
    sqnr_db: float | None = None
    precision: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredWeights:
    """The outcome for each weight of a model's linear layers and embeddings; printed, equal ones in a row."""

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
        share = f", {self.num_bytes / self.bytes_bf16:.1%} of what they take in BF16" if stored else ""
        counted = f"{len(stored)} of {len(self.weights)} weights"
        precisions = labels(weight.precision for weight in stored)
        head = f"{counted} in {precisions}: {byte_count(self.num_bytes)}{share}"
        if stored and len(stored) < len(self.weights):
            every = sum(weight.num_bytes for weight in self.weights)
            bf16 = sum(weight.bytes_bf16 for weight in self.weights)
            head += f"\nall {len(self.weights)} weights: {byte_count(every)}, {every / bf16:.1%} of BF16"
        return f"{head}\n\n{drawn(fitted(self._table(), ('weight', 'reason')))}" if self.weights else head

    def _table(self) -> Table:
        alike: dict[tuple[object, ...], list[StoredWeight]] = {}
        for weight in self.weights:
            key = weight.role, weight.shape, weight.precision, weight.reason
            alike.setdefault(key, []).append(weight)
        measured = any(weight.sqnr_db is not None for weight in self.weights)
        rows = [_row(group, measured) for group in alike.values()]
        return [[*rows[0]], *([*row.values()] for row in rows)]


def _row(group: list[StoredWeight], measured: bool) -> dict[str, str]:
    first = group[0]
    row = {
        "weight": spelled(weight.name for weight in group),
        "role": first.role,
        "shape": "×".join(map(str, first.shape)),
        "stored": first.precision or "as it was",
        "bytes": byte_count(sum(weight.num_bytes for weight in group)),
        "reason": first.reason,
    }
    if measured:
        worst = min((w.sqnr_db for w in group if w.sqnr_db is not None), default=None)
        row["worst SQNR"] = "" if worst is None else f"{worst:.1f} dB"
    return row
