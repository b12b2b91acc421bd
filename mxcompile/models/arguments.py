"""Separates a model's keyword arguments from the options of the function that calls it.

    explain(model, x, mask=m, policy="ocp")                a keyword that is not an option goes to the model
    explain(model, x, kwargs={"target": y, "policy": z})   every name goes to the model

Options take precedence: a model argument with the name of an option must be passed in ``kwargs``. A keyword
that is neither an option nor an argument of the model is an error. A misspelt option would otherwise reach
the model's ``**kwargs``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from mxcompile.errors import ModelError, OptionError, nearest, shown
from mxcompile.models.names import user_path

ModelInput = Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None
"""Keyword types that a type checker accepts for model arguments. ``kwargs`` may hold any type."""

_NAMED = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
_NEAR = 0.75
"""Least similarity (difflib's ratio) of two words that counts as a typo."""


def keywords(caller: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the keyword arguments for the call of a model.

    caller: name of the function, for errors. arguments: ``locals()`` at its start: `model`, its keywords
    `inputs` and `kwargs`, and its options. Raises `OptionError` for an unknown or repeated keyword and for a
    tensor as an option, and `ModelError` if `model` is not a module or has a lazy parameter.
    """
    options = dict(arguments)
    model, _, inline, kwargs = (options.pop(name, ()) for name in ("model", "args", "inputs", "kwargs"))
    check_module(caller, model)
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)):
        raise OptionError(f"{caller}: kwargs must be a dict of arguments by name, found {shown(kwargs)}")
    for name, value in options.items():
        if isinstance(value, Tensor):
            raise OptionError(
                f"{caller}: {name!r} is an option of {caller}, not a tensor; to pass the model an argument"
                f" of that name, write kwargs={{{name!r}: …}}"
            )
    forward: Any = getattr(getattr(model, "_orig_mod", model), "forward", None)
    try:
        parameters = inspect.signature(forward).parameters.values()
    except (TypeError, ValueError):  # a C++ or scripted forward has no signature
        taken, open_ended = set(), True
    else:
        taken = {parameter.name for parameter in parameters if parameter.kind in _NAMED}
        open_ended = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters)
    for name in inline:
        if kwargs is not None and name in kwargs:
            raise OptionError(f"{caller}: {name!r} is both a keyword and a key of kwargs: pass it once")
        if name in taken:
            continue
        slip = difflib.get_close_matches(name, options, n=1, cutoff=_NEAR)
        if slip or not open_ended:
            hint = nearest(name, [*slip] or [*options, *taken])
            raise OptionError(
                f"{caller}: {name!r} is neither an option of {caller} nor an argument of"
                f" {type(model).__name__}.forward{hint}; to pass it to the model anyway, write"
                f" kwargs={{{name!r}: …}}"
            )
    return {**inline, **(kwargs or {})}


def check_module(caller: str, model: object, *, may_be_lazy: bool = False) -> None:
    """Raises `ModelError` unless `model` is an `nn.Module` of Python code whose tensors have sizes.

    caller: name of the function, for errors. may_be_lazy: whether a first call may set sizes later.
    """
    if not isinstance(model, nn.Module):
        raise ModelError(f"{caller} takes a torch.nn.Module, found {type(model).__name__}")
    if isinstance(model, torch.jit.ScriptModule):
        raise ModelError(f"{caller} takes a module of Python code, found a scripted one: pass its original")
    if may_be_lazy:
        return
    for path, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise ModelError(
                f"{caller}: {user_path(path)} is lazy, and its size follows from the first call of the model:"
                f" call the model once before {caller}"
            )
