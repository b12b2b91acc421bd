"""Makes torch.export of a compiled module an error, because the export would silently drop quantization.

``torch.export`` exports the module inside ``torch.compile`` and never calls the backend. The common function
of all kinds of export therefore first searches for modules that this backend compiles. A plain compiled
function inside an exported module is not found. In a torch without this private function nothing is checked.

An import of `backend` installs the check, because an export can come before the first call and its compile.
``import mxcompile`` alone changes nothing.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from mxcompile.errors import ModelError

_WAYS_IN = ("_torchdynamo_orig_backend", "compiler_fn")
"""Attributes that lead from a Dynamo callback to its backend."""
_SPLIT_FOR = "backend_compile_fn"
"""Attribute with the backend in the object that splits graphs for DistributedDataParallel."""


def guard_exports(is_ours: Callable[[Any], bool]) -> None:
    """Makes an export raise `ModelError` if the module has a backend for which `is_ours` is true."""
    try:
        from torch.export import _trace

        export = _trace._export
    except (ImportError, AttributeError):
        return

    @functools.wraps(export)
    def guarded(module: Any, *args: Any, **kwargs: Any) -> Any:
        inside = module.named_modules() if isinstance(module, nn.Module) else ()
        for path, inner in inside:
            if not any(is_ours(innermost(callback)[0]) for callback in _callbacks(inner)):
                continue
            raise ModelError(
                f"torch.export drops the quantization of {path or 'the model'}, which torch.compile gave it:"
                " export the uncompiled model, and compile the loaded program:"
                ' torch.compile(exported.module(), backend="mxfp8")'
            )
        return export(module, *args, **kwargs)

    _trace._export = guarded


def _callbacks(module: nn.Module) -> Iterator[Any]:
    """Yields Dynamo's callbacks for `module`, from ``torch.compile(module)`` and ``module.compile()``."""
    context = vars(module).get("dynamo_ctx")
    if context is not None:
        yield getattr(context, "callback", None)
    wrapper = getattr(module, "_compiled_call_impl", None)
    names = getattr(getattr(wrapper, "__code__", None), "co_freevars", ())
    if "callback" in names:
        yield wrapper.__closure__[names.index("callback")].cell_contents  # type: ignore[union-attr]


def innermost(callback: Any) -> tuple[Any, Mapping[str, Any]]:
    """Returns the backend inside a Dynamo callback, and the keywords of its call."""
    keywords: Mapping[str, Any] = {}
    while callback is not None:
        owner = getattr(callback, "__self__", None)  # a bound method of DDP's graph splitter
        inner = getattr(owner, _SPLIT_FOR, None)
        ways = (getattr(callback, way, None) for way in _WAYS_IN)
        inner = inner if inner is not None else next((way for way in ways if way is not None), None)
        if inner is None:
            break
        keywords = getattr(callback, "kwargs", keywords)
        callback = inner
    return callback, keywords
