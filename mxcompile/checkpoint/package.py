"""`save_package`, `load_package`: models compiled ahead of time, which generate text without Python code.

    prompt.pt2, token.pt2   AOTInductor's programs for prompts and for one token
    model.safetensors       the tensors of both, stored weights as codes and scales
    package.json            shared tensors, shapes of keys and values, and where the programs run

A server that compiles the model traces its Python code in every start. This one reads files.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from mxcompile.checkpoint.files import line_of, new_directory, read_json, write_json, write_tensors
from mxcompile.errors import CheckpointError, ModelError, OptionError
from mxcompile.lowering.cpu.features import capabilities
from mxcompile.models.wrappers import user_model
from mxcompile.serving import aoti_configs

PROGRAMS = ("prompt", "token")
_WEIGHTS, _ABOUT = "model.safetensors", "package.json"
_VERSION = 1
"""Version of the files in a package, written to `_ABOUT`."""
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
            for constant in _loaded(partial, name).get_constant_fqns():
                tensors[constant] = _constant(constant, named).detach()
        caches = {name: list(tensor.shape) for name, tensor in tensors.items() if name in step.caches}
        first = {_location(tensor): name for name, tensor in reversed(tensors.items()) if name not in caches}
        stored = {name: tensors[name].contiguous().cpu() for name in sorted(first.values())}
        write_tensors(partial / _WEIGHTS, stored, stored.items(), {})
        shared = {name: first[_location(t)] for name, t in tensors.items() if name not in (*caches, *stored)}
        about = {
            "version": _VERSION, "max_cache_len": max_cache_len, "batch_size": batch_size,
            "vocabulary": len(language_model.get_input_embeddings().weight),
            "caches": caches, "shared": shared, "quantize_activations": quantize_activations,
            "dtype": str(language_model.dtype).removeprefix("torch."), "device": language_model.device.type,
            **_machine(),
        }  # fmt: skip
        write_json(partial / _ABOUT, about)


def load_package(directory: str | Path) -> PackagedModel:
    """Loads a directory that `save_package` wrote.

    Its machine code runs in this process, so load only packages that you trust.

    Raises:
        CheckpointError: The directory is not a package, is damaged, or needs another CPU, torch or mxcompile.

    Examples:
        >>> model = mxcompile.load_package("served")
        >>> tokens = model.generate(prompt, max_new_tokens=64)
    """
    return PackagedModel(Path(directory))


class PackagedModel:
    """A model that was compiled ahead of time. It has one cache, so it generates one batch at a time.

    Attributes:
        batch_size: Number of sequences.
        max_cache_len: Number of tokens of a sequence, prompt included.
    """

    batch_size: int
    max_cache_len: int

    def __init__(self, directory: Path) -> None:
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        about = read_json(directory / _ABOUT)
        try:
            _check_machine(directory, about)
            self.batch_size, self.max_cache_len = about["batch_size"], about["max_cache_len"]
            self._vocabulary = about["vocabulary"]
            self._device, dtype = torch.device(about["device"]), getattr(torch, about["dtype"])
            tensors = load_file(directory / _WEIGHTS, device=about["device"])
            tensors |= {name: tensors[first] for name, first in about["shared"].items()}
            for name, shape in about["caches"].items():
                tensors[name] = torch.zeros(shape, dtype=dtype, device=self._device)
            self._programs = {name: _loaded(directory, name) for name in PROGRAMS}
            for program in self._programs.values():
                constants = {name: tensors[name] for name in program.get_constant_fqns()}
                program.load_constants(constants, check_full_update=True, user_managed=True)
        except (KeyError, AttributeError, TypeError, OSError, RuntimeError, SafetensorError) as error:
            raise CheckpointError(
                f"{directory}: a damaged package ({type(error).__name__}: {line_of(error)}):"
                " save_package writes it again"
            ) from error
        self._tensors = tensors  # the programs read their memory
        self._turn = threading.Lock()  # a generation owns the cache until it ends

    @torch.no_grad()
    def __call__(self, input_ids: Tensor, position: int = 0) -> Tensor:
        """Returns the logits after the last token, [batch_size, vocabulary].

        Args:
            input_ids: Tokens, int64 [batch_size, tokens].
            position: Position of the first of them. Keys and values of earlier positions come from earlier
                calls.

        Raises:
            OptionError: The shape is another, a token is not in the vocabulary, or the tokens exceed
                `max_cache_len`.
        """
        tokens = input_ids.shape[-1]
        if input_ids.shape != (self.batch_size, tokens) or input_ids.dtype != torch.int64 or not tokens:
            raise OptionError(
                f"input_ids must be int64 of shape ({self.batch_size}, tokens), found {input_ids.dtype} of"
                f" shape {tuple(input_ids.shape)}"
            )
        least, largest = map(int, input_ids.aminmax())
        if least < 0 or largest >= self._vocabulary:  # the programs would end the process
            raise OptionError(
                f"tokens must lie within 0 and {self._vocabulary - 1}, found {least} to {largest}"
            )
        if position < 0 or position + tokens > self.max_cache_len:
            raise OptionError(
                f"{tokens} tokens from position {position} must lie within max_cache_len={self.max_cache_len}"
            )
        program = self._programs["token" if tokens == 1 else "prompt"]
        logits: Tensor = program(input_ids.to(self._device), torch.tensor(position, device=self._device))
        return logits

    def generate(
        self, input_ids: Tensor, max_new_tokens: int, *, eos_token_id: int | Sequence[int] | None = None
    ) -> Tensor:
        """Returns the prompt and the most probable next tokens. Threads that call it take turns.

        Args:
            input_ids: The prompt, int64 [batch_size, tokens].
            max_new_tokens: Number of tokens to generate.
            eos_token_id: The token, or the tokens, that end a sequence. The first fills it up to the length
                of the longest.

        Returns:
            Tokens, int64 [batch_size, tokens and generated tokens].

        Raises:
            OptionError: As for a call.
        """
        ends = [eos_token_id] if isinstance(eos_token_id, int) else [*(eos_token_id or ())]
        tokens = new = input_ids
        ended = torch.zeros_like(input_ids[:, :1], dtype=torch.bool)
        with self._turn:
            for _ in range(max_new_tokens):
                new = self(new, tokens.shape[1] - new.shape[1]).argmax(-1, keepdim=True).to(input_ids.device)
                if ends:
                    new = new.masked_fill(ended, ends[0])
                    ended |= torch.isin(new, torch.tensor(ends, device=new.device))
                tokens = torch.cat([tokens, new], 1)
                if ended.all():
                    break
        return tokens


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


def _loaded(directory: Path, program: str) -> Any:
    from torch._inductor.package.package import load_package as load_program

    return load_program(str(directory / f"{program}.pt2"))


def _constant(name: str, named: dict[str, Tensor]) -> Tensor:
    """Returns the tensor that AOTInductor calls `name`; parts of stored weights have names of their own."""
    module, parametrized, rest = name.partition(".parametrizations.")
    if not parametrized:
        return named[name]
    weight, _, number = rest.rpartition(".original")
    stored: Any = named[f"{module}.{weight}"]
    part: Tensor = getattr(stored, stored.__tensor_flatten__()[0][int(number)])
    return part


def _location(tensor: Tensor) -> tuple[Any, ...]:
    """Returns what equal tensors share: their memory and how they lie in it."""
    return tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tensor.stride()


def _machine() -> dict[str, Any]:
    """Returns what compiled programs need: torch's version, and the CPU's instructions."""
    return {
        "torch": torch.__version__,
        "cpu": sorted(key for key, has in capabilities().items() if has is True),
    }


def _check_machine(directory: Path, about: dict[str, Any]) -> None:
    """Raises `CheckpointError` if this process cannot run the programs, which would end it."""
    if about.get("version") != _VERSION:
        raise CheckpointError(
            f"{directory}: written by another version of mxcompile: save_package writes it again"
        )
    here = _machine()
    lacking = ", ".join(sorted({*about["cpu"]} - {*here["cpu"]}))
    if about["torch"] != here["torch"] or lacking:
        this = f"this CPU lacks {lacking}" if lacking else f"this is torch {here['torch']}"
        raise CheckpointError(
            f"{directory}: compiled with torch {about['torch']} for another machine, and {this}: save_package"
            " compiles it here"
        )
