"""Saved-tensor hooks of the program get the codes and scales that forward saves as bytes.

    pack     codes, scales ─▶ uint8 ─▶ the program's hook      unpack     its result ─▶ codes, scales

Hooks of `torch.autograd.graph.saved_tensors_hooks` move or compress what autograd saves. They expect values
in the dtypes of the model: they would round codes, or call operators that FP8 lacks. Most leave integers as
they are, because the ids of tokens are saved too. A hook that returns bytes in another dtype may have rounded
them, so its result is not used, and the codes are saved as they are.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._functorch._aot_autograd.utils import saved_tensors_hooks_are_inlineable
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._pytree import tree_leaves

Hook = Callable[[Any], Any]


def in_call() -> AbstractContextManager[Any]:
    """Returns a context for a call of compiled code. Hooks that are graphs are part of the code already."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or saved_tensors_hooks_are_inlineable(hooks) or not torch.is_grad_enabled():
        return nullcontext()
    return saved_tensors_hooks(*_for_codes(*hooks))


def in_compile() -> AbstractContextManager[Any]:
    """Returns a context for a compile, in which AOTAutograd puts hooks that are graphs into the code."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if not saved_tensors_hooks_are_inlineable(hooks):
        return nullcontext()
    return saved_tensors_hooks(*map(_graph, _for_codes(*hooks)))


def _for_codes(users_pack: Hook, users_unpack: Hook) -> tuple[Hook, Hook]:
    def pack(value: Tensor) -> tuple[Any, torch.dtype, bool]:
        if not _is_byte(value.dtype):
            return users_pack(value), value.dtype, True
        packed = users_pack(value.view(torch.uint8))
        dtypes = {leaf.dtype for leaf in tree_leaves(packed) if isinstance(leaf, Tensor)}
        exact = dtypes <= {torch.uint8}
        return packed if exact else value, value.dtype, exact

    def unpack(packed: tuple[Any, torch.dtype, bool]) -> Any:
        kept, dtype, used = packed
        if not used:
            return kept
        value = users_unpack(kept)
        return value.view(dtype) if _is_byte(dtype) else value

    return pack, unpack


def _graph(hook: Hook) -> fx.GraphModule:
    graph = fx.Graph()
    graph.output(graph.call_function(hook, (graph.placeholder("value"),)))
    return fx.GraphModule(nn.Module(), graph)


def _is_byte(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype is not torch.bool
