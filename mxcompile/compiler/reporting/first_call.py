"""Reports modules that a call of a model left uncompiled.

Dynamo does not notify the backend about a module whose forward it skips, or that the model never calls. The
first call is therefore compared with the plan. If the user compiles single modules, it is the second call,
because they are compiled within the first. The call runs through the model's ``_compiled_call_impl``, which
copies of the model do not have, and which is restored before the call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager
from typing import Any

import torch
from torch import nn

from mxcompile.compiler.reporting.checks import check_call
from mxcompile.compiler.reporting.shared_code import Runs
from mxcompile.compiler.session.options import Options
from mxcompile.report import REGISTRY


def check_first_call(root: nn.Module, options: Options, parts: Mapping[str, nn.Module]) -> None:
    """Checks the next call of `root`, whose modules `parts` are compiled with `options`.

    The call warns, or raises `UnsupportedError` in strict mode, about layers that the policy quantizes and
    that ran outside of compiled code, and about a model without compiled code.
    """
    inner = root._compiled_call_impl

    def first(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # another torch.compile compiles the whole model
            return root._call_impl(*args, **kwargs)
        root._compiled_call_impl = inner
        with closing(Runs()) as runs, _calls_noted(parts) as called:
            result = root(*args, **kwargs)
        try:
            idle = [path for path in parts if path not in called]
            check_call(root, options.now(), args, kwargs, runs.gemms, parts=[*parts], idle=idle)
        finally:
            REGISTRY.flush()
        return result

    first.checks_only = inner is None  # type: ignore[attr-defined]
    root._compiled_call_impl = first


@contextmanager
def _calls_noted(parts: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Yields a set that collects the paths of the `parts` called within the context."""
    called: set[str] = set()
    compiled = {path: part._compiled_call_impl for path, part in parts.items()}

    def noting(path: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            called.add(path)
            return compiled[path](*args, **kwargs)  # type: ignore[misc]

        return call

    for path, part in parts.items():
        part._compiled_call_impl = noting(path)
    try:
        yield called
    finally:
        for path, part in parts.items():
            part._compiled_call_impl = compiled[path]
