"""Which models compiled code runs for: Dynamo runs what it compiled for one also for the next of its class.

The backend is not asked then. So the code looks at one parameter among its inputs: one that it has not seen
leads to the model whose call is going on. If that is another model, alike in every parameter, what the code
leaves in the report is put into that model's report too. Of a model that differs a warning says that the code
is shared.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from mxcompile.compiler.capture import Capture
from mxcompile.compiler.frames import running
from mxcompile.compiler.places import Places
from mxcompile.models.holders import Holders
from mxcompile.models.names import user_path
from mxcompile.models.tree import path_in
from mxcompile.models.wrappers import plain_class, users_own

log = logging.getLogger(__name__)

Compiled = Callable[..., Any]


def noted(compiled: Compiled, capture: Capture, places: Places) -> Compiled:
    """`compiled`, of the graph of `capture`; `places` is told what it runs for."""
    if capture.root is None:
        return compiled
    own = {user_path(raw) for raw, _ in capture.root.named_parameters(remove_duplicate=False)}
    given = enumerate(capture.inputs)
    position = next((index for index, one in given if one.static and one.path in own), None)
    if position is None:
        return compiled
    return _Noted(compiled, capture.root, capture.tree.modules[capture.prefix], position, places)


class _Noted:
    """Compiled code of `module` in `root`, which knows what it has run for.

    position: of a parameter among its inputs.
    """

    def __init__(
        self, compiled: Compiled, root: nn.Module, module: nn.Module, position: int, places: Places
    ) -> None:
        self._compiled = compiled
        self._position = position
        self._places = places
        self._part = plain_class(module)
        self._root = weakref.ref(root)
        self._kind = plain_class(root)
        self._sizes = _sizes(root)
        self._holders = Holders()
        self._models = {self._root}

    def __call__(self, *args: Any) -> Any:
        parameter = args[self._position]
        if isinstance(parameter, nn.Parameter) and self._holders.holder(parameter) is None:
            self._meet(parameter)
        return self._compiled(*args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._compiled, name)  # how torch serializes it

    def _meet(self, parameter: Tensor) -> None:
        """Find the model that `parameter` belongs to, and have it adopt the code if it is another one."""
        root = self._root()
        if root is not None and self._owns(root, parameter):
            own = next((module for module in running() if plain_class(module) is self._part), None)
            self._places.note(path_in(root, own))
            return
        callers = [users_own(module) for module in running()]
        owners = [each for each in callers if each is not root and self._owns(each, parameter)]
        model = next((module for module in reversed(owners) if plain_class(module) is self._kind), None)
        if model is not None and _sizes(model) == self._sizes:
            if (reference := weakref.ref(model)) not in self._models:
                self._models.add(reference)
                self._places.adopt(model)
        elif owners and (reference := weakref.ref(owners[-1])) not in self._models:
            self._models.add(reference)
            log.warning(
                "code compiled for a %s runs for a %s too, whose report lacks it: torch._dynamo.reset()"
                " between the two keeps them apart",
                self._kind.__name__,
                type(owners[-1]).__name__,
            )

    def _owns(self, model: nn.Module, parameter: Tensor) -> bool:
        """Whether `model` has `parameter`, which is known from now on if it does."""
        return self._holders.add(model.modules(), parameter)


def _sizes(model: nn.Module) -> Mapping[str, Any]:
    return {user_path(raw): (tuple(own.shape), own.dtype) for raw, own in model.named_parameters()}
