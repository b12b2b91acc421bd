"""The arguments of a model, where a function takes them beside options of its own.

    explain(model, x, mask=m, policy="ocp")              a keyword that is not an option goes to the model
    explain(model, x, kwargs={"target": y, "policy": z})   any name goes to the model this way

The options of the function come first: an argument of the model that is called like one of them can only be
passed in ``kwargs``. A keyword that is neither an option nor an argument of the model is an error, so that a
misspelt option does not end in the model's ``**kwargs``.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from mxcompile.errors import ModelError, OptionError, nearest, shown

ModelInput = Tensor | Sequence[Tensor] | Mapping[str, Tensor] | None
"""Types that a type checker accepts as keyword arguments of a model. ``kwargs`` may hold anything."""

_NEAR = 0.75
"""How alike two words are for one to be a slip of the other (difflib's ratio)."""


def keywords(
    caller: str,
    model: nn.Module,
    inline: Mapping[str, Any],
    kwargs: Mapping[str, Any] | None,
    options: Mapping[str, Any],
) -> dict[str, Any]:
    """The keyword arguments `model` is called with.

    caller: name of the function, for errors. inline: keywords that are none of its options. kwargs: what it
    was given under that name. options: its options, by name, with their values.

    Raises `OptionError` for a keyword nobody takes, one that is given twice, and a tensor as an option;
    `ModelError` where `model` is none.
    """
    check_module(caller, model)
    if kwargs is not None and not (isinstance(kwargs, Mapping) and all(isinstance(k, str) for k in kwargs)):
        raise OptionError(f"{caller}: kwargs is a dict of arguments by name, found {shown(kwargs)}")
    for name, value in options.items():
        if isinstance(value, Tensor):
            raise OptionError(
                f"{caller}: {name!r} is an option of {caller}, found a tensor; to pass the model an argument"
                f" of that name, write kwargs={{{name!r}: …}}"
            )
    taken, open_ended = _parameters(model)
    for name in inline:
        if kwargs is not None and name in kwargs:
            raise OptionError(f"{caller}: {name!r} is given both as a keyword and in kwargs")
        if name in taken:
            continue
        slip = difflib.get_close_matches(name, options, n=1, cutoff=_NEAR)
        if slip or not open_ended:
            raise OptionError(_unknown(caller, model, name, [*slip] or [*options, *taken]))
    return {**inline, **(kwargs or {})}


def check_module(caller: str, model: object) -> None:
    """Raises `ModelError` unless `model` is one that `caller` can take."""
    if not isinstance(model, nn.Module):
        raise ModelError(f"{caller} takes a torch.nn.Module, found {type(model).__name__}")


def _unknown(caller: str, model: nn.Module, name: str, words: Sequence[str]) -> str:
    owner = type(model).__name__
    return (
        f"{caller}: {name!r} is neither an option of {caller} nor an argument of"
        f" {owner}.forward{nearest(name, words)}; what is meant for the model whatever its name goes into"
        f" kwargs={{{name!r}: …}}"
    )


def _parameters(model: nn.Module) -> tuple[frozenset[str], bool]:
    """The names `model` takes as keywords, and whether it takes any others."""
    model = getattr(model, "_orig_mod", model)
    try:
        parameters = inspect.signature(getattr(model, "forward", model)).parameters.values()
    except (TypeError, ValueError):  # a forward written in C++, a scripted one
        return frozenset(), True
    named = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    return (
        frozenset(parameter.name for parameter in parameters if parameter.kind in named),
        any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters),
    )
