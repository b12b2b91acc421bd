"""torch.export of a compiled module is an error: it would drop the quantization without a word.

``torch.export`` looks through ``torch.compile`` at the module beneath and never asks the backend, so an
exported program would be the model as it was. The function that every form of export goes through therefore
looks for modules compiled by this backend first. A plain function compiled inside an exported module is not
found. Where torch has no such function (it is not public) nothing is checked.

The check is in place once Dynamo or a user asks for the backend, which loads `backend`. The first compile
would be too late, because a compiled model can be exported before it runs.
``import mxcompile`` alone changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from mxcompile.errors import ModelError

_WAYS_IN = ("_torchdynamo_orig_backend", "compiler_fn")
"""What leads from a callback of Dynamo to the backend it ends in."""
_SPLIT_FOR = "backend_compile_fn"
"""The same of the object that splits a graph for DistributedDataParallel."""


def guard_exports(is_ours: Callable[[Any], bool]) -> None:
    """From now on raise `ModelError` for an export of a module that a backend compiles that `is_ours`."""
    try:
        from torch.export import _trace

        export = _trace._export
    except (ImportError, AttributeError):
        return

    @functools.wraps(export)
    def guarded(module: Any, *args: Any, **kwargs: Any) -> Any:
        path = next(_compiled(module, is_ours), None)
        if path is not None:
            raise ModelError(
                f"torch.export drops the quantization of {path or 'the model'}, which torch.compile gave it:"
                " export the model that is not compiled, and compile what you load:"
                ' torch.compile(exported.module(), backend="mxfp8")'
            )
        return export(module, *args, **kwargs)

    _trace._export = guarded


def _compiled(module: Any, is_ours: Callable[[Any], bool]) -> Iterator[str]:
    """Paths of the modules in `module` that such a backend compiles."""
    if isinstance(module, nn.Module):
        for path, inner in module.named_modules():
            if any(is_ours(innermost(callback)[0]) for callback in _callbacks(inner)):
                yield path


def _callbacks(module: nn.Module) -> Iterator[Any]:
    """Dynamo's callbacks of `module`, compiled by ``torch.compile(module)`` or ``module.compile()``."""
    context = vars(module).get("dynamo_ctx")
    if context is not None:
        yield getattr(context, "callback", None)
    wrapper = getattr(module, "_compiled_call_impl", None)
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    if "callback" in names:
        yield wrapper.__closure__[names.index("callback")].cell_contents  # type: ignore[union-attr]


def innermost(callback: Any) -> tuple[Any, Mapping[str, Any]]:
    """The backend that a callback of Dynamo ends in, and the keywords that it is called with."""
    keywords: Mapping[str, Any] = {}
    while callback is not None:
        owner = getattr(callback, "__self__", None)  # of a method: what splits graphs for DDP
        inner = getattr(owner, _SPLIT_FOR, None)
        ways = (getattr(callback, way, None) for way in _WAYS_IN)
        inner = inner if inner is not None else next((way for way in ways if way is not None), None)
        if inner is None:
            break
        keywords = getattr(callback, "kwargs", keywords)
        callback = inner
    return callback, keywords
