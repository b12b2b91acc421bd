"""Writes excerpts of the operands of a GEMM to a file, for a bug report.

    step-1200-blocks.1.down-dgrad.pt    {"about": JSON, "dy": values, "dy.rows": row indices, "w": …}

Values are rows along the contraction dimension in the dtype of the operand: the rows with the largest
magnitudes, NaN and Inf first, at most `mxcompile.passes.watch.DUMPED` elements. Longer rows are truncated.
Each rank writes its own operands.
"""

from __future__ import annotations

import io
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxcompile import ops
from mxcompile.errors import OptionError
from mxcompile.publish import publish
from mxcompile.report.files import rank
from mxcompile.watch.tally import Tally

FILES = 16
"""Largest number of files that a rank writes in a run."""

Excerpt = tuple[Tensor, Tensor, Mapping[str, Any]]
"""Rows of an operand, their indices, and the cast's format, sizes and dim."""


class Dumps:
    """The files of one watch. folder: their folder, None if no rule writes any."""

    def __init__(self, folder: Path | None) -> None:
        self.folder = folder
        self._written = 0

    def write(self, step: int, layer: str, gemm: str, message: str, excerpts: Mapping[str, Excerpt]) -> str:
        """Writes `excerpts`, by operand. Returns the path, or a reason without a file. Raises `OSError`."""
        if self.folder is None or not excerpts:
            return "this rank has no operands of this GEMM with fixed sizes"
        if self._written >= FILES:
            return f"a run writes at most {FILES} files"
        self._written += 1
        rank_suffix = f"-rank{rank()}" if rank() is not None else ""
        name = re.sub(r"[^\w.-]", "_", f"step-{step}-{layer}-{gemm}")[:200]
        path = self.folder / f"{name}{rank_suffix}.pt"
        operands = {
            name: {key: cast[key] for key in ("format", "dim", "sizes")}
            for name, (*_, cast) in excerpts.items()
        }
        about = {"step": step, "layer": layer, "gemm": gemm, "message": message, "operands": operands}
        data: dict[str, Any] = {"about": json.dumps(about)}
        for name, (values, rows, _) in excerpts.items():
            data |= {name: values.cpu(), f"{name}.rows": rows.cpu()}
        content = io.BytesIO()
        torch.save(data, content)
        publish(path, content.getvalue())
        return str(path)


@dataclass(frozen=True, kw_only=True, slots=True)
class Dump:
    """One file. operands: excerpts by operand."""

    step: int
    layer: str
    gemm: str
    message: str
    operands: dict[str, Excerpt]

    @classmethod
    def load(cls, path: str | Path) -> Dump:
        """Returns the content of the file `path`. No code in it is executed. Raises `OptionError`."""
        try:
            data = torch.load(path, weights_only=True, map_location="cpu")
            about = json.loads(data["about"])
            operands = {
                name: (data[name], data[f"{name}.rows"], cast) for name, cast in about.pop("operands").items()
            }
            return cls(**about, operands=operands)
        except Exception as error:
            raise OptionError(f"{str(path)!r} is not a file of operands: {error}") from None

    def statistics(self) -> dict[str, dict[str, Any]]:
        """Returns the statistics of the cast of each excerpt, as in samples."""
        statistics = {}
        for name, (values, _, cast) in self.operands.items():
            numbers, _ = ops.cast_statistics(values, -1, cast["format"], 0)
            statistics[name] = Tally.from_numbers("", cast["format"], numbers.tolist()).statistics()
        return statistics

    def lines(self) -> Iterable[str]:
        """Yields the lines of a text for a terminal."""
        yield self.message
        for name, numbers in self.statistics().items():
            values, _, cast = self.operands[name]
            of = "x".join(map(str, cast["sizes"]))
            rows, length = values.shape
            yield (
                f"{name}: {rows} rows of {length} ({values.dtype}) of {of}, {cast['format']},"
                f" amax {numbers['amax']:.4g}, underflow {numbers['underflow']:.2%},"
                f" saturated {numbers['saturated']:.2%}, {numbers['nan'] + numbers['inf']:,} NaN or Inf"
            )
