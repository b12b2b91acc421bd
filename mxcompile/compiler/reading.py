"""Parses the options of ``torch.compile(model, backend="mxfp8", options=…)`` when torch.compile is called.

``torch.compile`` stores the user's dict in a wrapper, and Dynamo compares wrappers by this dict before it
reuses compiled code. A changed policy file of the same name would then count as the old policy, and a change
of the dict would apply to models that are compiled already. The wrapper therefore stores parsed `Options`,
which compare by content and do not change. Equal options share code as before.

The wrapper's class is private. If it has another form, the options are parsed when each graph is compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mxcompile.compiler.session.options import Options


def read_early(is_ours: Callable[[Any], bool]) -> None:
    """Makes ``torch.compile`` parse the options for a backend for which `is_ours` is true.

    The wrapper's attribute ``kwargs`` becomes a property. A patched constructor would miss the first call of
    a process, because that call loads this backend within the constructor.
    """
    try:
        from torch import _TorchCompileWrapper
    except ImportError:
        return

    def record(wrapper: Any, arguments: dict[str, Any]) -> None:
        if is_ours(vars(wrapper).get("compiler_fn")):
            items, arguments = arguments, _Arguments()
            for key, value in items.items():
                arguments[key] = value
        vars(wrapper)["kwargs"] = arguments

    _TorchCompileWrapper.kwargs = property(lambda wrapper: vars(wrapper)["kwargs"], record)  # type: ignore[assignment]


class _Arguments(dict[str, Any]):
    """Keyword arguments of the backend. Setting ``mode`` or ``options`` calls `Options.parse`."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "mode":
            Options.parse(value)
        super().__setitem__(key, Options.parse(None, value) if key == "options" else value)
