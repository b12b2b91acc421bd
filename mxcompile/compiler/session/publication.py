"""Where compiled parts are in the registry: in the report of their model, and of others that run their code.

A part is for a module and its twins, which are to run the same code. Whether they do is seen when the model
is called: `settle` takes those out of the report that did not.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from torch import nn

from mxcompile.report import REGISTRY, GemmRecord, Ledger, Part


class Places:
    """The places of one part. gemms: all that are planned of `root`, its model.

    found: called with the path of each further module that runs the code.
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
        self._part: Part | None = None
        self._places: list[tuple[Ledger, int | None]] = [(ledger, None)]
        self._ran: set[str] = set()
        self._settled = self._is_sure = False

    @property
    def part(self) -> Part:
        """The part as far as it is known."""
        return self._part or Part()

    def put(self, part: Part) -> None:
        """Make what is known so far known to the process."""
        self._part = part
        if self._settled:
            part = dataclasses.replace(part, twins=tuple(twin for twin in part.twins if twin[0] in self._ran))
        self._places = [(ledger, REGISTRY.put(ledger, index, part)) for ledger, index in self._places]

    def adopt(self, model: nn.Module) -> None:
        """`model`, whose modules have the names of the first model's, runs the code too."""
        assert self._part is not None
        fresh = self._places[0][0].of(model)
        ledger = REGISTRY.open((self._key, fresh.model), fresh)
        self._places.append((ledger, REGISTRY.put(ledger, None, self._part)))
        if self._gemms:
            REGISTRY.plan(model, ledger.group, self._gemms)

    def note(self, path: str | None) -> None:
        """The module at `path` of the first model runs the code; None if it is not known which does."""
        self._is_sure = path is not None and (self._is_sure or not self._ran)
        if path and self._ran and path not in self._ran:
            self._on_other_module(path)
        self._ran.add(path or "")
        if self._settled and self._part is not None:
            self.put(self._part)

    def settle(self, group: str) -> None:
        """From now on the twins in the report, if it is one of `group`, are those that have run the code."""
        if self._is_sure and not self._settled and self._places[0][0].group == group:
            self._settled = True
            if self._part is not None:
                self.put(self._part)
