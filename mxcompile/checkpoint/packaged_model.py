"""`load_package`: reads a model that `save_package` compiled. It imports neither Dynamo nor Inductor.

PyTorch's own loader does, and starts a process for each set of vector instructions, to compare the machine
with the program's. That takes longer than reading the model; `check_machine` compares what `save_package`
wrote.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxcompile.checkpoint.files import line_of, read_json
from mxcompile.errors import CheckpointError, OptionError
from mxcompile.lowering.cpu.features import capabilities

PROGRAMS = ("prompt", "token")
WEIGHTS, ABOUT = "model.safetensors", "package.json"
VERSION = 2
"""Version of the files in a package, written to `ABOUT`."""


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

        about = read_json(directory / ABOUT)
        try:
            _check_machine(directory, about)
            self.batch_size, self.max_cache_len = about["batch_size"], about["max_cache_len"]
            self._vocabulary = about["vocabulary"]
            self._device, dtype = torch.device(about["device"]), getattr(torch, about["dtype"])
            tensors = load_file(directory / WEIGHTS, device=about["device"])
            tensors |= {name: tensors[first] for name, first in about["shared"].items()}
            for name, shape in about["caches"].items():
                tensors[name] = torch.zeros(shape, dtype=dtype, device=self._device)
            self._programs = {name: loader(directory, name) for name in PROGRAMS}
            for program in self._programs.values():
                constants = {name: tensors[name] for name in program.get_constant_fqns()}
                program.load_constants(constants, False, True, True)  # all of them, and without a copy
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
        inputs = [input_ids.to(self._device), torch.tensor(position, device=self._device)]
        logits: Tensor
        (logits,) = program.boxed_run(inputs)
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


def loader(directory: Path, program: str) -> Any:
    """Returns PyTorch's loader of one program, which also runs it."""
    return torch._C._aoti.AOTIModelPackageLoader(str(directory / f"{program}.pt2"), "model", False, 1, -1)


def machine(device: torch.device) -> dict[str, Any]:
    """Returns what programs need: torch's version, the CPU's instructions, the GPU's compute capability."""
    has_gpu = device.type == "cuda" and torch.cuda.is_available()
    return {
        "torch": torch.__version__,
        "cpu": sorted(key for key, has in capabilities().items() if has is True),
        "gpu": "{}.{}".format(*torch.cuda.get_device_capability(device)) if has_gpu else "",
    }


def _check_machine(directory: Path, about: dict[str, Any]) -> None:
    """Raises `CheckpointError` if this process cannot run the programs, which would end it."""
    if about.get("version") != VERSION:
        raise CheckpointError(
            f"{directory}: written by another version of mxcompile: save_package writes it again"
        )
    here = machine(torch.device(about["device"]))
    lacking = ", ".join(sorted({*about["cpu"]} - {*here["cpu"]}))
    if about["torch"] != here["torch"]:
        this = f"this is torch {here['torch']}"
    elif lacking:
        this = f"this CPU lacks {lacking}"
    elif about["gpu"] != here["gpu"]:
        this = f"the compute capability of the GPU is {here['gpu'] or 'none'}, not {about['gpu']}"
    else:
        this = ""
    if this:
        raise CheckpointError(
            f"{directory}: compiled with torch {about['torch']} for another machine, and {this}: save_package"
            " compiles it here"
        )
