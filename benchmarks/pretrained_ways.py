"""The ways in which `pretrained.py` serves a model: presets, precisions, stored weights, other libraries.

A *way* converts a model to a callable. Unchanged weights are shared with the model.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from pretrained_models import KEPT, block_linears, storing_policy
from torch import Tensor, nn

import mxcompile
from mxcompile.formats import PRECISIONS, Choices, Format, Rounding
from mxcompile.formats.encoding import decode_tensors, encode_tensors, outer_amax
from mxcompile.formats.four_over_six import FourOverSix

BOTH, WEIGHTS, CACHE, WEIGHTS_CACHE = (
    "weights, activations",
    "weights",
    "keys and values",
    "weights, keys and values",
)
_BOUNDS = {"x": 256, "w": 256}
ROLES = ["qkv", "attn_out", "ffn_in", "ffn_out"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to serve a model.

    label: name in tables. library: library that serves. quantized: quantized tensors, as text. prepare:
    converts the model to the served callable. cached: whether keys and values are stored in MXFP8.
    """

    label: str
    library: str
    quantized: str
    prepare: Callable[[nn.Module], nn.Module]
    cached: bool = False


def sharing(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` that has the same parameters."""
    return copy.deepcopy(model, {id(parameter): parameter for parameter in model.parameters()})


def under(policy: str | dict[str, Any]) -> Callable[[nn.Module], nn.Module]:
    """Returns a function that compiles a model block by block with `policy`."""

    def prepare(model: nn.Module) -> nn.Module:
        return mxcompile.compile(sharing(model), policy=policy)

    return prepare


def use(**keys: Any) -> dict[str, Any]:
    """Returns a policy whose rule with `keys` applies to the layers that the presets quantize."""
    return {"version": 1, "preset": "bf16", "rules": [{"match": {"role": ROLES}, "use": keys}]}


def stored(model: nn.Module) -> nn.Module:
    """Stores the weights in MXFP8 and compiles."""
    served = sharing(model)
    mxcompile.quantize_weights_(served, progress=False)
    return mxcompile.compile(served, policy="bf16")


def stored_and_cast(policy: dict[str, Any]) -> Callable[[nn.Module], nn.Module]:
    """Returns a function that stores the weights that `policy` quantizes, and compiles a model with it."""

    def prepare(model: nn.Module) -> nn.Module:
        served = sharing(model)
        mxcompile.quantize_weights_(served, policy, progress=False)
        return mxcompile.compile(served, policy=policy)

    return prepare


def stored_eager(model: nn.Module) -> nn.Module:
    """Stores the weights in MXFP8 and runs eagerly, with dequantized products."""
    served = sharing(model)
    mxcompile.quantize_weights_(served, progress=False)
    return served


def with_values(
    change: Callable[[Tensor], Tensor], *, head: bool = False, keep: bool = False
) -> Callable[[nn.Module], nn.Module]:
    """Returns a function that applies `change` to the weights of the blocks; products stay in FP32.

    head: whether the weight that head and embedding share is replaced too. keep: whether the weights of
    `KEPT` are rounded to BF16 instead.
    """

    def prepare(model: nn.Module) -> nn.Module:
        served: Any = sharing(model)
        for name, layer in block_linears(served):
            function = _rounded if keep and name.endswith(KEPT) else change
            layer.weight = nn.Parameter(function(layer.weight.detach()), requires_grad=False)
        if head:
            table = nn.Parameter(change(served.lm_head.weight.detach()), requires_grad=False)
            served.lm_head.weight = served.get_input_embeddings().weight = table
        return served

    return prepare


def weight_format(precision: str, **choices: Any) -> Format:
    """Returns the format of weights of a precision."""
    return PRECISIONS[precision].formats(Choices(**choices)).w


def in_format(form: Format, weight: Tensor) -> Tensor:
    """Returns `weight` cast rowwise to a format and dequantized."""
    amax = outer_amax(weight, -1, form) if form.two_level else None
    qdata, scale = encode_tensors(weight, -1, form, amax=amax)
    return decode_tensors(qdata, scale, -1, form, weight.dtype, amax)


def gguf_values(kind: str, weight: Tensor) -> Tensor:
    """Returns `weight` rounded to a type of llama.cpp. Raises ImportError without gguf."""
    from gguf import GGMLQuantizationType, quants

    number = GGMLQuantizationType[kind]
    values = quants.dequantize(quants.quantize(weight.numpy(), number), number)
    return torch.from_numpy(values).view(weight.shape).clone()


def by_torchao(name: str, **options: Any) -> Callable[[nn.Module], nn.Module]:
    """Returns a function that applies torchao's `quantize_` to the layers of the blocks. name: config."""
    return lambda model: quantized(model, torchao_config(name, **options))


def quantized(model: nn.Module, config: Any) -> nn.Module:
    """Returns a copy of `model` with torchao's `config` applied to the layers of the blocks."""
    from torchao.quantization import quantize_

    served = sharing(model)
    chosen = {id(layer) for _, layer in block_linears(served)}
    quantize_(served, config, filter_fn=lambda module, _: id(module) in chosen)
    return served


def torchao_config(name: str, **options: Any) -> Any:
    """Returns the configuration `name` of torchao, from its public or prototype modules."""
    import torchao.prototype.mx_formats as mx
    import torchao.quantization as ao

    if name == "Float8DynamicActivationFloat8WeightConfig":
        options["granularity"] = ao.PerRow()
    if name == "MXDynamicActivationMXWeightConfig":
        from torchao.quantization.quantize_.common import KernelPreference

        options["kernel_preference"] = KernelPreference.EMULATED
    return getattr(mx if hasattr(mx, name) else ao, name)(**options)


def presets() -> Iterator[Way]:
    """Yields ways with weights and activations in each preset and precision of mxcompile."""
    policies: dict[str, str | dict[str, Any]] = {
        "mxfp8 (preset nvidia)": "nvidia",
        "mxfp8 floor (preset ocp)": "ocp",
        "mxfp8 ceil": use(precision="mxfp8", rounding="ceil"),
        "mxfp8 even": use(precision="mxfp8", rounding="even"),
        "mxfp8 blocks of 16": use(precision="mxfp8", block=16),
        "mxfp8 blocks of 64": use(precision="mxfp8", block=64),
        "mxfp8 blocks of 128": use(precision="mxfp8", block=128),
        "mxfp8 weights in 32x32": use(precision="mxfp8", weight_block="32x32"),
        "fp8 tensor": "fp8_tensor",
        "fp8 rowwise": "fp8_rowwise",
        "fp8 block": "fp8_block",
        "fp8 delayed": "fp8_delayed",
        "mxfp6 e2m3": use(precision="mxfp6_e2m3"),
        "mxfp6 e3m2": use(precision="mxfp6_e3m2"),
        "mxint8 (preset mxint8)": "mxint8",
        "mxfp4": use(precision="mxfp4"),
        "nvfp4": use(precision="nvfp4"),
        "nvfp4 4 over 6": use(precision="nvfp4", four_over_six=_BOUNDS),
        "nvfp4 4 over 6, 448": use(precision="nvfp4", four_over_six=dict.fromkeys(_BOUNDS, 448)),
        "nvfp4 4 over 6, MSE": use(precision="nvfp4", four_over_six={**_BOUNDS, "error": "mse"}),
        "nvfp4 row-scaled": use(precision="nvfp4", row_scaled="x"),
        "nvfp4 4 over 6, row-scaled": use(precision="nvfp4", four_over_six=_BOUNDS, row_scaled="x"),
    }
    for label, policy in policies.items():
        yield Way(label=label, library="mxcompile", quantized=BOTH, prepare=under(policy))


def stored_ways() -> Iterator[Way]:
    """Yields ways with stored weights, or with weights rounded to other formats."""
    yield Way(label="mxfp8 stored", library="mxcompile", quantized=WEIGHTS, prepare=stored)
    formats = {
        "mxfp8 floor": weight_format("mxfp8", rounding=Rounding.FLOOR),
        "fp8 rowwise": weight_format("fp8", scaling="channel"),
        "fp8 block": weight_format("fp8", scaling="block"),
        "mxfp6 e2m3": weight_format("mxfp6_e2m3"),
        "mxfp6 e3m2": weight_format("mxfp6_e3m2"),
        "mxint8": weight_format("mxint8"),
        "mxfp4": weight_format("mxfp4"),
        "nvfp4": weight_format("nvfp4"),
        "nvfp4 4 over 6": weight_format("nvfp4", four_over_six=(("w", FourOverSix()),)),
    }
    for label, form in formats.items():
        prepare = with_values(functools.partial(in_format, form))
        yield Way(label=label, library="mxcompile", quantized=WEIGHTS, prepare=prepare)
    yield Way(label="bf16", library="torch", quantized=WEIGHTS, prepare=with_values(_rounded))


def language_ways() -> Iterator[Way]:
    """Yields ways that also quantize the shared weight of head and embedding, or keys and values."""
    mxint8 = functools.partial(in_format, weight_format("mxint8"))
    for suffix, keep in (("", False), (", k_proj and v_proj in bf16", True)):
        label = f"mxint8, head and embedding too{suffix}"
        weights = with_values(mxint8, head=True, keep=keep)
        yield Way(label=label, library="mxcompile", quantized=WEIGHTS, prepare=weights)
        both = stored_and_cast(storing_policy("mxint8", "mxint8", keep=keep))
        yield Way(label=label, library="mxcompile", quantized=BOTH, prepare=both)
    q8_0 = with_values(functools.partial(gguf_values, "Q8_0"), head=True)
    label = "Q8_0, head and embedding too (its values)"
    yield Way(label=label, library="llama.cpp", quantized=WEIGHTS, prepare=q8_0)
    yield Way(label="mxfp8", library="mxcompile", quantized=CACHE, prepare=sharing, cached=True)
    yield Way(
        label="mxfp8 stored", library="mxcompile", quantized=WEIGHTS_CACHE, prepare=stored_eager, cached=True
    )


def peers() -> Iterator[Way]:
    """Yields ways that quantize the same layers with other libraries."""
    torchao = {
        "int8": ("Int8WeightOnlyConfig", WEIGHTS),
        "int8 dynamic": ("Int8DynamicActivationInt8WeightConfig", BOTH),
        "fp8": ("Float8WeightOnlyConfig", WEIGHTS),
        "fp8 rowwise": ("Float8DynamicActivationFloat8WeightConfig", BOTH),
        "mxfp8": ("MXDynamicActivationMXWeightConfig", BOTH),
    }
    for label, (name, quantized) in torchao.items():
        yield Way(label=label, library="torchao", quantized=quantized, prepare=by_torchao(name))
    for kind in ("Q8_0", "Q4_0"):
        prepare = with_values(functools.partial(gguf_values, kind))
        yield Way(label=f"{kind} (its values)", library="llama.cpp", quantized=WEIGHTS, prepare=prepare)


def _rounded(weight: Tensor) -> Tensor:
    return weight.bfloat16().to(weight.dtype)


def all_ways(*, language: bool) -> list[Way]:
    """Returns all ways. language: whether the model is a causal language model."""
    return [*presets(), *stored_ways(), *(language_ways() if language else ()), *peers()]
