"""When the options of ``torch.compile(model, backend="mxfp8", options=…)`` are read: as it is called.

``torch.compile`` keeps the user's dict in a wrapper, and Dynamo compares wrappers by it before it runs code
that it has compiled. A policy file of the same name is then the same policy, whatever it says now, and a dict
that changes is changed for models that are compiled already. Here the wrapper gets `Options` in place of the
dict: policies by content, which do not change. Equal options share code as before.

The wrapper's class is not public. Where it has another form, each graph reads the options as it is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mxcompile.compiler.options import Options


def read_early(is_ours: Callable[[Any], bool]) -> None:
    """From now on let ``torch.compile`` read the options for a backend that `is_ours`.

    The attribute that holds them becomes a property, so that this is true of the call, too, that loads the
    backend: the first of a process.
    """
    try:
        from torch import _TorchCompileWrapper
    except ImportError:
        return

    def keep(wrapper: Any, arguments: dict[str, Any]) -> None:
        if is_ours(vars(wrapper).get("compiler_fn")):
            given, arguments = arguments, _Arguments()
            for key, value in given.items():
                arguments[key] = value
        vars(wrapper)["kwargs"] = arguments

    _TorchCompileWrapper.kwargs = property(lambda wrapper: vars(wrapper)["kwargs"], keep)  # type: ignore[assignment]


class _Arguments(dict[str, Any]):
    """Keyword arguments of the backend. Raises as `Options.parse` when wrong ones are put in."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "mode":
            Options.parse(value)
        super().__setitem__(key, Options.parse(None, value) if key == "options" else value)
