"""The first call of a model whose parts are compiled: what was not compiled of it is told.

Dynamo decides what it compiles, and asks the backend about nothing else: a module whose forward it leaves to
Python, or that the model never calls, is left as it was without a word. So the first call is compared with
the plan. It is the model's ``_compiled_call_impl``, which copies of the model do not have, and it goes once
it has run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from mxcompile.compiler.options import Options
from mxcompile.compiler.reporting.checks import check_call


def look_at(root: nn.Module, options: Options, parts: Mapping[str, nn.Module]) -> None:
    """Look at the first call of `root`, of which the modules `parts`, by path, are compiled with `options`.

    Of that call, `UnsupportedError` is raised in strict mode, else there is a warning, for layers that the
    policy quantizes and that ran outside of compiled code, and where nothing was compiled at all.
    """
    inner = root._compiled_call_impl

    def first(*args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # the whole of it, by another torch.compile
            return root._call_impl(*args, **kwargs)
        root._compiled_call_impl = inner
        with _calls_noted(parts) as called:
            result = root(*args, **kwargs)
        check_call(root, options, args, kwargs, parts={path: path in called for path in parts})
        return result

    root._compiled_call_impl = first


@contextmanager
def _calls_noted(parts: Mapping[str, nn.Module]) -> Iterator[set[str]]:
    """Yields the paths of those of `parts` that have been called in here."""
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
