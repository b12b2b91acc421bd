"""Tracks which model instances share a compiled graph. Dynamo reuses code across instances of a class.

Dynamo does not call the backend for a reuse. Each call of the code therefore looks up the innermost module
that runs, and one parameter among its inputs. If either is new, the model is searched among those whose calls
are running. If all parameters of this model have the same shapes and dtypes, its report gets the graph's
entries too; otherwise there is a warning that the code is shared.
"""

from __future__ import annotations

import functools
import logging
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.session.frames import called_models, running
from mxcompile.compiler.session.session import Places, session_of
from mxcompile.models.names import joined, rebased, user_path, within
from mxcompile.models.tree import Holders, path_in
from mxcompile.models.wrappers import plain_class, user_model
from mxcompile.policy import Gemm

log = logging.getLogger(__name__)


def attribution(capture: Capture, places: Places) -> Attribution | None:
    """Returns the `Attribution` of the graph of `capture` to models, which updates `places`.

    Returns None if the models cannot be distinguished and the graph has no records.
    """
    root = capture.root or capture.tree.roots.get("")  # the only model of a function
    if root is None:
        return None
    modules, named = root.modules(), root.named_parameters(remove_duplicate=False)
    number = Counter(id(value) for module in modules for value in module._parameters.values())
    name = session_of(root).name
    holders = {joined(name, user_path(raw)): number[id(value)] for raw, value in named}
    candidates = [at for at, entry in enumerate(capture.inputs) if entry.static and entry.path in holders]
    candidates = [at for at in candidates if within(capture.inputs[at].path, capture.prefix)]
    # a parameter with a single holder identifies the module that runs
    position = min(candidates, key=lambda index: holders[capture.inputs[index].path], default=None)
    if position is None and not places.part.gemms:
        return None
    is_shared = position is not None and holders[capture.inputs[position].path] > 1
    return Attribution(capture, root, position, places, is_shared=is_shared)


class Runs:
    """Counts how often compiled code and its backward compute each GEMM, until `close`.

    gemms: numbers by layer name and GEMM.
    """

    def __init__(self) -> None:
        self.gemms: Counter[tuple[str, Gemm]] = Counter()
        _OPEN.append(self)

    def close(self) -> None:
        """Ends the collection."""
        _OPEN.remove(self)


_OPEN: list[Runs] = []


class Attribution:
    """Records the modules that run the code of the graph of `capture`, compiled for the model `root`.

    position: position of a parameter among the inputs, or None without parameters. is_shared: whether several
    modules hold this parameter, so that it does not identify a module.
    """

    def __init__(
        self, capture: Capture, root: nn.Module, position: int | None, places: Places, *, is_shared: bool
    ) -> None:
        prefix = capture.prefix
        self._position = position
        self._is_shared = is_shared
        self._name = (
            "" if position is None else capture.inputs[position].path.removeprefix(prefix).lstrip(".")
        )
        self._places = places
        self._prefix = prefix
        self._part = plain_class(capture.tree.modules[prefix])
        self._root, self._outer = weakref.ref(root), session_of(root).name
        self._outers = {weakref.ref(model): path for path, model in capture.tree.roots.items()}
        self._kind = plain_class(root)
        self._sizes = _sizes(root)
        self._holders = Holders()
        self._models = {self._root}
        self._callers = weakref.WeakSet[nn.Module]()

    def note(self, args: Sequence[Any]) -> None:
        """Records a call of the code with `args`."""
        argument = None if self._position is None else args[self._position]
        parameter = argument if isinstance(argument, nn.Parameter) else None
        caller = next(running(), None)  # two models may share the parameter; `or` would call its len
        caller = next(iter(called_models().values()), None) if caller is None else caller
        is_new = caller is not None and caller not in self._callers
        if parameter is not None and (is_new or self._holders.holder(parameter) is None):
            self._register_model(parameter)
        if caller is not None:
            self._callers.add(caller)
        if _OPEN:
            callers = [user_model(module) for module in running()]
            models = dict.fromkeys([self._root(), *reversed(callers)])
            alike = (model for model in models if model is not None and plain_class(model) is self._kind)
            paths = (self._path_in(model, parameter) for model in alike)
            path = next((path for path in paths if path is not None), self._prefix)
            gemms = self._places.part.gemms
            names = [(rebased(gemm.name, self._prefix, path), Gemm(gemm.gemm)) for gemm in gemms]
            for runs in _OPEN:
                runs.gemms.update(names)

    def _path_in(self, model: nn.Module, parameter: nn.Parameter | None) -> str | None:
        """Returns the path in `model` of the module that runs the code, or None if it is unknown."""
        alike = (module for module in running() if plain_class(module) is self._part)
        if parameter is not None:  # under the same name as in the graph's own module
            named = ((part, part.named_parameters(remove_duplicate=False)) for part in alike)
            alike = (
                part
                for part, named_parameters in named
                if any(value is parameter and user_path(raw) == self._name for raw, value in named_parameters)
            )
        runner = next(alike, None)
        path = self._path_of(model, runner)
        if path is not None or parameter is None or (holder := self._holders.holder(parameter)) is None:
            return path
        module, name = holder  # Dynamo may have inlined the module's call
        path = joined(self._path_of(model, module) or self._outer_of(model), name)
        return path.removesuffix(self._name).rstrip(".") if path.endswith(self._name) else None

    def _outer_of(self, model: nn.Module) -> str:
        """Returns the path of `model` in the function that is compiled."""
        return self._outers.get(weakref.ref(model), self._outer)

    def _path_of(self, model: nn.Module, module: nn.Module | None) -> str | None:
        path = path_in(model, module)
        return None if path is None else joined(self._outer_of(model), path)

    def _register_model(self, parameter: nn.Parameter) -> None:
        """Finds the running model of `parameter`, and adds the graph to its report."""
        root, modules = self._root(), [*running()] or [*called_models().values()]
        callers = [user_model(module) for module in modules]
        runs = any(caller is root for caller in callers)
        others = [caller for caller in callers if not runs and caller is not root]
        owners = [caller for caller in others if self._holders.add(caller.modules(), parameter)]
        model = next((module for module in reversed(owners) if plain_class(module) is self._kind), None)
        if root is not None and model is None and self._holders.add(root.modules(), parameter):
            self._places.note(None if self._is_shared else self._path_in(root, parameter))
            return
        if model is not None and _sizes(model) == self._sizes:
            if (reference := weakref.ref(model)) not in self._models:
                self._models.add(reference)
                path = functools.partial(rebased, old=self._outer, new=self._outer_of(model))
                self._places.add_model(model, path)
        elif owners and (reference := weakref.ref(owners[-1])) not in self._models:
            self._models.add(reference)
            log.warning(
                "code compiled for %s also runs for %s, whose report lacks these layers: call"
                " torch._dynamo.reset() between the two",
                self._kind.__name__,
                type(owners[-1]).__name__,
            )


def _sizes(model: nn.Module) -> Mapping[str, Any]:
    return {user_path(raw): (tuple(value.shape), value.dtype) for raw, value in model.named_parameters()}
