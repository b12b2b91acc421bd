"""The same model in other clothes: names of modules and parameters, the spelling of attention, BF16 weights.

Renaming is real: every module gets a class of its own in which each old name is a property that reads the new
one, so forwards written for the old names run unchanged, while the module tree, its parameters, and all that
Dynamo, autograd and a state dict see bear the new ones. Positions in lists and the keys of dicts stay.
"""

from __future__ import annotations

import hashlib
import keyword
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map_only

_CONTAINERS = (nn.ModuleList, nn.ModuleDict, nn.Sequential, nn.ParameterList, nn.ParameterDict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Disguise:
    """What is different from the plain model: names, the spelling of attention, the dtype of weights."""

    scrambled: bool = False
    eager: bool = False
    bf16: bool = False
    training: bool = False
    experts: str = ""


PLAIN = "plain"
ALL = "all"
DISGUISES = {
    PLAIN: Disguise(),
    ALL: Disguise(scrambled=True, eager=True, bf16=True),
    "scrambled": Disguise(scrambled=True),
    "eager": Disguise(eager=True),
    "bf16": Disguise(bf16=True),
    "training": Disguise(training=True),
    "grouped_mm": Disguise(experts="grouped_mm"),
    "batched_mm": Disguise(experts="batched_mm"),
    "loop": Disguise(experts="eager"),
}


def scramble(model: nn.Module) -> dict[str, str]:
    """Rename everything in `model`, in place; new path → old path of its modules and parameters."""
    paths = {id(module): path for path, module in model.named_modules()}
    attributes = {
        id(module): _rename(module) if not isinstance(module, _CONTAINERS) else {}
        for module in list(model.modules())
    }
    names = {}
    for path, module in model.named_modules():
        old = paths[id(module)]
        names[path] = old
        for name in module._parameters:
            last = attributes[id(module)].get(name, name)
            names[f"{path}.{name}".strip(".")] = f"{old}.{last}".strip(".")
    return names


def _new(name: str) -> str:
    return "z" + hashlib.blake2s(name.encode(), digest_size=4).hexdigest()


def _rename(module: nn.Module) -> dict[str, str]:
    """Rename what `module` holds; new name → old name."""
    names = tuple(
        name
        for table in (module._modules, module._parameters)
        for name in table
        if name.isidentifier() and not keyword.iskeyword(name)
    )
    module.__class__ = _renamed_class(type(module), names)
    for table in (module._modules, module._parameters):
        renamed: dict[str, Any] = {
            _new(name) if name in names else name: value for name, value in table.items()
        }
        table.clear()
        table.update(renamed)
    return {_new(name): name for name in names}


@cache
def _renamed_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    """A subclass of `kind` in which each of `names` is read under its new name."""
    body: dict[str, Any] = {name: property(_reader(_new(name))) for name in names}
    body |= {
        name: getattr(kind, name) for name in ("__module__", "__qualname__")
    }  # by which libraries look it up
    return type(kind.__name__, (kind,), body)


def _reader(name: str) -> Any:
    scope: dict[str, Any] = {}
    exec(f"def read(self): return self.{name}", scope)
    return scope["read"]


@contextmanager
def spelled_attention() -> Iterator[None]:
    """Within, `scaled_dot_product_attention` is two products and a softmax."""
    with mock.patch.object(F, "scaled_dot_product_attention", _spelled):
        yield


def _spelled(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if enable_gqa:
        key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    scores = query @ key.transpose(-2, -1) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        future = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool, device=query.device).triu(1)
        scores = scores.masked_fill(future, -torch.inf)
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(~attn_mask, -torch.inf)
    elif attn_mask is not None:
        scores = scores + attn_mask
    return F.dropout(F.softmax(scores, -1), dropout_p) @ value


def to_bf16(model: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """`model` in BF16, in place; its arguments too."""
    model.to(torch.bfloat16)
    cast = lambda x: x.to(torch.bfloat16) if x.is_floating_point() else x  # noqa: E731
    return tree_map_only(Tensor, cast, (args, kwargs))
