"""What a model does when it simply runs: which layers are called, and how many FLOPs its products have.

Independent of mxcompile: hooks on modules, and PyTorch's own formulas for FLOPs on what the dispatcher sees.
An attention is spelled out, so that its products are counted one by one. Convolutions of one position (1×1,
ungrouped) are linear layers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

aten = torch.ops.aten
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
_PRODUCTS = {getattr(aten, name) for name in ("mm", "addmm", "bmm", "baddbmm")}


@dataclass(frozen=True, kw_only=True, slots=True)
class EagerRun:
    """layers: path → FLOPs of the linear layers that were called. flops: of all products."""

    layers: Mapping[str, int]
    flops: int


class _Flops(TorchDispatchMode):
    """Sums the FLOPs of products."""

    def __init__(self) -> None:
        super().__init__()
        self.total = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        packet = func._overloadpacket
        if packet in _PRODUCTS:
            self.total += flop_registry[packet](*args, **(kwargs or {}), out_val=out)
        elif packet is aten.convolution:
            transposed = args[6]
            self.total += 2 * (args[0] if transposed else out).numel() * prod(args[1].shape[1:])
        elif packet is aten._scaled_dot_product_flash_attention_for_cpu:  # of a model that asks for it
            q, k, v = args[:3]
            self.total += 2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1])
        elif packet is aten._grouped_mm:
            self.total += _grouped(args, out)
        return out


def _grouped(args: Any, out: torch.Tensor) -> int:
    """Of a product of rows in groups with a matrix each, or of columns in groups."""
    left, right = args[:2]
    return 2 * left.shape[-1] * (left.shape[-2] * right.shape[-1] if left.ndim == 2 else out.numel())


def is_linear_layer(module: nn.Module) -> bool:
    """A module that is one matrix product with a weight of its own."""
    if type(module).__name__ == "Conv1D" or isinstance(module, nn.Linear):
        return True
    return isinstance(module, _CONVOLUTIONS) and module.groups == 1 and set(module.kernel_size) == {1}


def eager_run(model: nn.Module, args: Any, kwargs: Any) -> EagerRun:
    """Run `model`. Autograd is on: without it PyTorch's own encoder is one operator."""
    called: Counter[str] = Counter()

    def note(name: str, module: Any, x: torch.Tensor) -> None:
        called[name] += 2 * x.numel() * (module.weight.numel() // x.shape[_features(module)])

    hooks = [
        module.register_forward_hook(lambda module, args, _, name=name: note(name, module, args[0]))
        for name, module in model.named_modules()
        if is_linear_layer(module)
    ]
    flops = _Flops()
    try:
        with torch.enable_grad(), sdpa_kernel(SDPBackend.MATH), flops:
            model(*args, **kwargs)
    finally:
        for hook in hooks:
            hook.remove()
    return EagerRun(layers=called, flops=flops.total)


def _features(module: nn.Module) -> int:
    """The dimension of the input that has the layer's features."""
    return 1 if isinstance(module, _CONVOLUTIONS) else -1
