"""Keeps the entries of compiled parts in the registry up to date, for each model that runs their code.

A part belongs to a module and its twins, which are expected to share its code. The entries have the twins
that have run it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable

from torch import nn

from mxcompile.report import REGISTRY, GemmRecord, Ledger, Part


class Places:
    """The registry entries of one part. gemms: planned GEMMs of its whole model.

    on_other_module: called with the path of each further module that runs the code. part: the part that was
    published last.
    """

    def __init__(
        self,
        key: object,
        ledger: Ledger,
        gemms: tuple[GemmRecord, ...],
        on_other_module: Callable[[str], None],
    ) -> None:
        self._key = key
        self._gemms = gemms
        self._on_other_module = on_other_module
        self.part = Part()
        self._places: list[tuple[Ledger, int | None, Callable[[str], str]]] = [(ledger, None, str)]
        self._ran: set[str] = set()
        self._is_sure = False

    def put(self, part: Part) -> None:
        """Publishes `part` in all entries."""
        self.part = part
        self._places = [
            (ledger, REGISTRY.put(ledger, index, _moved(self._shown, path)), path)
            for ledger, index, path in self._places
        ]

    @property
    def _shown(self) -> Part:
        """The part with the twins that have run its code; with all twins if it is unknown who has."""
        if not self._is_sure:
            return self.part
        ran = tuple(twin for twin in self.part.twins if twin[0] in self._ran)
        return dataclasses.replace(self.part, twins=ran)

    def add_model(self, model: nn.Module, path: Callable[[str], str]) -> None:
        """Adds an entry for `model`, another instance with the same module names that runs the code.

        path: returns the path in `model` for a path in the first model.
        """
        fresh = self._places[0][0].for_model(model)
        ledger = REGISTRY.open((self._key, fresh.model), fresh)
        self._places.append((ledger, REGISTRY.put(ledger, None, _moved(self._shown, path)), path))
        if self._gemms:
            REGISTRY.plan(model, ledger.group, _renamed(self._gemms, path))
        REGISTRY.flush()  # a call without a compile flushes only here

    def note(self, path: str | None) -> None:
        """Records that a module of the first model runs the code. path: its path, None if unknown."""
        before = self._shown
        self._is_sure = path is not None and (self._is_sure or not self._ran)
        is_other = bool(path and self._ran and path not in self._ran)
        self._ran.add(path or "")
        if path and is_other:
            self._on_other_module(path)
        if self._shown != before:
            self.put(self.part)


def _renamed(gemms: Iterable[GemmRecord], path: Callable[[str], str]) -> tuple[GemmRecord, ...]:
    return tuple(dataclasses.replace(gemm, name=path(gemm.name)) for gemm in gemms)


def _moved(part: Part, path: Callable[[str], str]) -> Part:
    """Returns `part` with each path in it replaced by ``path(old)``."""
    nodes = (dataclasses.replace(node, names=tuple(map(path, node.names))) for node in part.outline.nodes)
    return dataclasses.replace(
        part,
        gemms=_renamed(part.gemms, path),
        weights=tuple((path(name), size, size_bf16) for name, size, size_bf16 in part.weights),
        outline=dataclasses.replace(part.outline, nodes=tuple(nodes)),
        prefix=path(part.prefix),
        twins=tuple((path(twin), block) for twin, block in part.twins),
    )
