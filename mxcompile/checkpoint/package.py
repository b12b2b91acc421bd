"""`save_package`: compiles a model ahead of time, to generate text without Python code.

    prompt.pt2, token.pt2   AOTInductor's programs for prompts and for one token
    model.safetensors       the tensors of both, stored weights as codes and scales
    package.json            shared tensors, shapes of keys and values, strides, and where the programs run

A server that compiles the model traces its Python code in every start. `load_package` reads these files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.checkpoint.files import line_of, new_directory, write_json, write_tensors
from mxcompile.checkpoint.packaged_model import ABOUT, PROGRAMS, VERSION, WEIGHTS, digest, loader, machine
from mxcompile.errors import CheckpointError, ModelError, OptionError
from mxcompile.models.wrappers import user_model
from mxcompile.serving import aoti_configs

_TRACED_TOKENS = 64
"""Length of the prompt that is traced: as many rows as take the kernels for many rows, not those for few."""


def save_package(
    model: nn.Module,
    directory: str | Path,
    *,
    max_cache_len: int,
    batch_size: int = 1,
    target: str = "auto",
    quantize_activations: bool = False,
) -> None:
    """Compiles a Hugging Face language model for generation, and writes it to a directory.

    Weights are stored as the model has them, so call `quantize_weights_` before. Keys and values have the
    model's dtype. The directory appears completely or not at all. The model does not change.

    Args:
        model: The model.
        directory: The directory, which must not exist.
        max_cache_len: Number of tokens of a sequence, prompt included. Layers with a sliding window keep as
            many, and read the window.
        batch_size: Number of sequences.
        target: As for ``torch.compile``.
        quantize_activations: Whether products with a stored weight cast their activations to its format.

    Raises:
        CheckpointError: The directory exists or cannot be written.
        ModelError: The model is in training mode, has no static cache, or ``torch.export`` cannot trace it.
        OptionError: transformers 5.24 or later is missing, or a size is not positive.
        TargetError: The target is unknown.

    Examples:
        >>> mxcompile.quantize_weights_(model, "mxint8")
        >>> mxcompile.save_package(model, "served", max_cache_len=4096)
    """
    for name, size, least in (("max_cache_len", max_cache_len, 2), ("batch_size", batch_size, 1)):
        if size < least:
            raise OptionError(f"{name} must be at least {least}, found {size}")
    path = Path(directory).absolute()
    if path.exists():
        raise CheckpointError(f"{path}: exists already: name another directory")
    language_model: Any = user_model(model)
    step = _CachedStep(language_model, batch_size, max_cache_len)
    names: dict[str, Tensor] = dict(step.named_parameters(remove_duplicate=False))
    names |= step.named_buffers(remove_duplicate=False)
    with new_directory(path) as partial:
        tensors: dict[str, Tensor] = {}
        for name, tokens in zip(PROGRAMS, (min(_TRACED_TOKENS, max_cache_len), 1), strict=True):
            program = _exported(step, torch.ones(batch_size, tokens, dtype=torch.int64), max_cache_len)
            file = str(partial / f"{name}.pt2")
            configs = aoti_configs(target, quantize_activations=quantize_activations)
            configs |= {"aot_inductor.package_constants_in_so": False}
            torch._inductor.aoti_compile_and_package(program, package_path=file, inductor_configs=configs)
            named = {**names, **program.constants}
            for constant in loader(partial, name).get_constant_fqns():
                tensors[constant] = _constant(constant, named).detach()
        caches = {name: list(tensor.shape) for name, tensor in tensors.items() if name in step.caches}
        first = {_location(tensor): name for name, tensor in reversed(tensors.items()) if name not in caches}
        stored = {name: _memory(tensors[name]).cpu() for name in sorted(first.values())}
        write_tensors(partial / WEIGHTS, stored, stored.items(), {})
        shared = {name: first[_location(t)] for name, t in tensors.items() if name not in (*caches, *stored)}
        lying = {name: tensors[name] for name in stored if not tensors[name].is_contiguous()}
        about = {
            "version": VERSION, "max_cache_len": max_cache_len, "batch_size": batch_size,
            "vocabulary": len(language_model.get_input_embeddings().weight),
            "caches": caches, "shared": shared,
            "strided": {name: [list(tensor.shape), list(tensor.stride())] for name, tensor in lying.items()},
            "quantize_activations": quantize_activations,
            "dtype": str(language_model.dtype).removeprefix("torch."), "device": language_model.device.type,
            **machine(language_model.device),
        }  # fmt: skip
        write_json(partial / ABOUT, {**about, "digest": digest(partial, about)})


class _CachedStep(nn.Module):
    """A model with its cache as buffers: tokens and their position to the last token's logits."""

    def __init__(self, model: Any, batch_size: int, max_cache_len: int) -> None:
        try:
            from transformers.cache_utils import StaticLayer
            from transformers.integrations.executorch import TorchExportableModuleWithHybridCache
        except ImportError as error:
            raise OptionError(
                f"a package needs transformers 5.24 or later: pip install 'mxcompile[checkpoints]' ({error})"
            ) from None
        super().__init__()
        if not hasattr(model, "generation_config"):
            raise ModelError(
                f"a package is of a Hugging Face model that generates, found {type(model).__name__}"
            )
        if model.training:
            raise ModelError("the model is in training mode: call model.eval() before save_package")
        try:
            self.cached = TorchExportableModuleWithHybridCache(model, batch_size, max_cache_len)
        except Exception as error:  # caches without keys and values fail in many ways
            raise ModelError(
                f"{type(model).__name__} has no static cache of keys and values alone:"
                f" {type(error).__name__}: {line_of(error)}"
            ) from error
        layers: list[Any] = self.cached.cache.layers
        if others := sorted({type(layer).__name__ for layer in layers if type(layer) is not StaticLayer}):
            raise ModelError(
                f"{type(model).__name__} has no static cache of keys and values alone: {', '.join(others)}"
            )
        self.caches = {f"cached.{name}" for name, _ in self.cached.named_buffers(recurse=False)}

    def forward(self, input_ids: Tensor, position: Tensor) -> Tensor:
        layers: list[Any] = self.cached.cache.layers
        for index, layer in enumerate(layers):  # its own tensors would be constants of the program
            layer.keys = getattr(self.cached, f"key_cache_{index}")
            layer.values = getattr(self.cached, f"value_cache_{index}")
            layer.cumulative_length = position.clone()
        output = self.cached.model(
            input_ids=input_ids, cache=self.cached.cache, use_cache=True, logits_to_keep=1
        )
        logits: Tensor = output.logits[:, -1]
        return logits


def _exported(step: _CachedStep, input_ids: Tensor, max_cache_len: int) -> torch.export.ExportedProgram:
    """Traces `step`, for any number of tokens if `input_ids` has several. Raises `ModelError`."""
    lengths = {1: torch.export.Dim("tokens", min=2, max=max_cache_len)}
    shapes = {"input_ids": lengths, "position": None} if input_ids.shape[1] > 1 else None
    device = step.cached.model.device
    inputs = input_ids.to(device), torch.tensor(0, device=device)
    try:
        with torch.no_grad():
            return torch.export.export(step, inputs, dynamic_shapes=shapes, strict=False)
    except Exception as error:  # torch.export raises errors of many classes
        raise ModelError(
            f"{type(step.cached.model).__name__} cannot be exported: {type(error).__name__}: {line_of(error)}"
        ) from error


def _constant(name: str, named: dict[str, Tensor]) -> Tensor:
    """Returns the tensor that AOTInductor calls `name`; parts of stored weights have names of their own."""
    module, parametrized, rest = name.partition(".parametrizations.")
    if not parametrized:
        return named[name]
    weight, _, number = rest.rpartition(".original")
    stored: Any = named[f"{module}.{weight}"]
    part: Tensor = getattr(stored, stored.__tensor_flatten__()[0][int(number)])
    return part


def _memory(tensor: Tensor) -> Tensor:
    """Returns `tensor` if it is contiguous, else its whole range of memory in one dimension.

    The programs read them with the strides that they were compiled for.
    """
    if tensor.is_contiguous():
        return tensor
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((last + 1,), (1,))


def _location(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what equal tensors share: their memory and how they lie in it."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()
