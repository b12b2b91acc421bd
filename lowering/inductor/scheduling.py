"""Passes over Inductor's scheduler: the user's own pass runs first; an identity for the caches."""

from __future__ import annotations

from typing import Any

from torch._inductor.scheduler import BaseSchedulerNode

try:
    from torch._inductor.custom_graph_pass import CustomSchedulerPass
except ImportError:  # older torch: its cache knows a scheduler pass by the base of graph passes
    from torch._inductor.custom_graph_pass import (  # type: ignore[assignment]
        CustomGraphPass as CustomSchedulerPass,
    )

Nodes = list[BaseSchedulerNode]


class SchedulerPass(CustomSchedulerPass):
    """Ours after the user's. uuid: of mxcompile's own code. user: a pass configured before."""

    def __init__(self, uuid: str, user: Any = None) -> None:
        self._uuid = uuid
        self._user = user

    def __call__(self, nodes: Nodes) -> Nodes:
        """Returns the schedule after both, from `nodes`."""
        return self.apply(nodes if self._user is None else self._user(nodes))

    def apply(self, nodes: Nodes) -> Nodes:
        """Returns the schedule in the place of `nodes`."""
        return nodes

    def uuid(self) -> Any:
        """Identity for Inductor's caches; None, which turns them off, if the user's pass has none."""
        if self._user is None:
            return self._uuid
        theirs = self._user.uuid() if isinstance(self._user, CustomSchedulerPass) else None
        return None if theirs is None else (self._uuid, theirs)

    def __deepcopy__(self, memo: object) -> SchedulerPass:
        return self

    def __reduce__(self) -> Any:
        """A cache key holds Inductor's configuration, pickled: all that counts there is the identity."""
        return str, (repr(self.uuid()),)
