"""Shows codes that autograd saves to the program's saved-tensor hooks as bytes.

    pack     codes, scales ─▶ uint8 ─▶ the program's hook      unpack     its result ─▶ codes, scales

Hooks of `torch.autograd.graph.saved_tensors_hooks` move or compress what autograd saves. They expect values
in the dtypes of the model: they would round codes, or call operators that FP8 lacks. They leave integers as
they are, because the ids of tokens are saved too. A hook that casts integers as well returns the same bytes.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch._functorch._aot_autograd.utils import saved_tensors_hooks_are_inlineable
from torch.autograd.graph import saved_tensors_hooks


def codes_as_bytes() -> AbstractContextManager[Any]:
    """Returns a context for a call of compiled code, in which the program's hooks get its codes as bytes.

    Hooks that are graphs (`torch.fx.GraphModule`) are part of the compiled code and do not run in the call.
    """
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    if hooks is None or saved_tensors_hooks_are_inlineable(hooks) or not torch.is_grad_enabled():
        return nullcontext()
    users_pack, users_unpack = hooks

    def pack(value: Tensor) -> tuple[Any, torch.dtype]:
        return users_pack(value.view(torch.uint8) if _is_byte(value.dtype) else value), value.dtype

    def unpack(packed: tuple[Any, torch.dtype]) -> Any:
        kept, dtype = packed
        value = users_unpack(kept)
        return value.to(torch.uint8).view(dtype) if _is_byte(dtype) else value

    return saved_tensors_hooks(pack, unpack)


def _is_byte(dtype: torch.dtype) -> bool:
    return dtype.itemsize == 1 and dtype is not torch.bool
