"""Passes over Inductor's scheduler, run after the user's pass; each has an identity for Inductor's caches."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch._inductor.scheduler import BaseSchedulerNode

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # older torch: the base class of graph passes gives a scheduler pass its cache key
    from torch._inductor.custom_graph_pass import (  # type: ignore[assignment]
        CustomGraphPass as CustomSchedulerPass,
    )

Nodes = list[BaseSchedulerNode]


class SchedulerPass(CustomSchedulerPass):
    """A pass of mxcompile, run after the user's. uuid: hash of mxcompile's code. user: the user's pass."""

    def __init__(self, uuid: str, user: Any = None) -> None:
        self._uuid = uuid
        self._user = user

    def __call__(self, nodes: Nodes) -> Nodes:
        """Returns `nodes` after both passes."""
        return self.apply(nodes if self._user is None else self._user(nodes))

    @abstractmethod
    def apply(self, nodes: Nodes) -> Nodes:
        """Returns the new schedule."""

    def uuid(self) -> Any:
        """Returns the identity for Inductor's caches; None disables them if the user's pass has none."""
        if self._user is None:
            return self._uuid
        theirs = self._user.uuid() if isinstance(self._user, CustomSchedulerPass) else None
        return None if theirs is None else (self._uuid, theirs)

    def __deepcopy__(self, memo: object) -> SchedulerPass:
        """Returns this pass: Inductor copies its configuration, but a copy would report to no compile."""
        return self

    def __reduce__(self) -> Any:
        """Pickles the identity alone, because cache keys contain Inductor's pickled configuration."""
        return str, (repr(self.uuid()),)
