"""The figures of a summary as labels, values and notes: a line each in text, a tile each in HTML."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

from mxcompile.report.data.record import FIGURES, Summary
from mxcompile.report.forms.words import UNITS, byte_count


class Card(NamedTuple):
    """A figure to show: its label, its value, a note, and a share from 0 to 1 that is drawn as a bar."""

    label: str
    value: str
    note: str = ""
    share: float | None = None

    def __str__(self) -> str:
        return f"{self.label}: {self.value}{f' ({self.note})' if self.note else ''}"


def cards(summary: Summary) -> Iterator[Card]:
    """Yields the figures of `summary` that are shown, without those that are 0 or unknown."""
    for name, figure in FIGURES.items():
        value, without = getattr(summary, name), getattr(summary, f"{name}_bf16", None)
        if not value or not figure.is_shown or not figure.label:
            continue
        share, note = None, ""
        if name in _NOTES:
            note = _NOTES[name](summary)
        elif without and without != value:
            share = value / without
            note = f"{share:.0%} of {UNITS[figure.unit](without)} without mxcompile"
        yield Card(figure.label, UNITS[figure.unit](value), note, None if share is None else min(share, 1.0))


def differences(old: Summary, new: Summary) -> Iterator[str]:
    """Yields a line for each figure that differs between `old` and `new`."""
    for name, figure in FIGURES.items():
        before, after = (
            "none" if value is None else UNITS[figure.unit](value)
            for value in (getattr(old, name), getattr(new, name))
        )
        if figure.label and before != after:
            yield f"{figure.label}: {before} → {after}"


def _weights_note(summary: Summary) -> str:
    """Returns the bytes of the weights in BF16, if they differ, and the bytes after `quantize_weights_`."""
    texts = []
    if summary.weight_bytes != summary.weight_bytes_bf16:
        texts.append(f"{byte_count(summary.weight_bytes_bf16)} in BF16")
    if 0 < summary.weight_bytes_quantized < summary.weight_bytes:
        texts.append(f"{byte_count(summary.weight_bytes_quantized)} as quantize_weights_ would store them")
    return ", ".join(texts)


def _memory_note(summary: Summary) -> str:
    """Returns the parts of the peak memory of a step."""
    parts = [("parameters", summary.parameter_bytes or 0), ("gradients", summary.gradient_bytes or 0)]
    beside = (summary.peak_bytes or 0) - sum(number for _, number in parts)
    training = summary.saved_bytes is not None
    parts.append(("kept for backward" if training else "largest product", beside))
    texts = [f"{word} {byte_count(number)}" for word, number in parts if number]
    return ", ".join([*texts, *(["the optimizer not counted"] if summary.gradient_bytes else [])])


_NOTES: dict[str, Callable[[Summary], str]] = {
    "weight_bytes": _weights_note,
    "peak_bytes": _memory_note,
}
"""Functions that write the note of a figure, by its field. Other figures show their share of BF16's."""
