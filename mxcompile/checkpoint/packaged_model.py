"""`load_package`: reads a model that `save_package` compiled. It imports neither Dynamo nor Inductor.

PyTorch's own loader does, and starts a process for each set of vector instructions, to compare the machine
with the program's. That takes longer than reading the model; here `machine` is compared instead.
"""

from __future__ import annotations

import hashlib
import json
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
VERSION = 3
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
            _check(directory, about)
            self.batch_size, self.max_cache_len = about["batch_size"], about["max_cache_len"]
            self._vocabulary = about["vocabulary"]
            self._device, dtype = torch.device(about["device"]), getattr(torch, about["dtype"])
            tensors = load_file(directory / WEIGHTS, device=about["device"])
            tensors |= {name: tensors[name].as_strided(*how) for name, how in about["strided"].items()}
            tensors |= {name: tensors[first] for name, first in about["shared"].items()}
            for name, shape in about["caches"].items():
                tensors[name] = torch.zeros(shape, dtype=dtype, device=self._device)
            self._programs = {name: loader(directory, name) for name in PROGRAMS}
            for program in self._programs.values():
                constants = {name: tensors[name] for name in program.get_constant_fqns()}
                program.load_constants(constants, False, True, True)  # all of them, and without a copy
        except (AttributeError, OSError, RuntimeError, SafetensorError) as error:
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
        self._check_room(input_ids, position, 1)
        least, largest = map(int, input_ids.aminmax())
        if least < 0 or largest >= self._vocabulary:  # the programs would end the process
            raise OptionError(
                f"tokens must lie within 0 and {self._vocabulary - 1}, found {least} to {largest}"
            )
        program = self._programs["token" if input_ids.shape[1] == 1 else "prompt"]
        # a program assumes that its inputs lie in order, and does not check it
        inputs = [input_ids.to(self._device).contiguous(), torch.tensor(position, device=self._device)]
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
        ends = [] if eos_token_id is None else torch.as_tensor(eos_token_id).flatten().tolist()
        self._check_room(input_ids, 0, max_new_tokens)
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

    def _check_room(self, input_ids: Any, position: int, new: int) -> None:
        """Raises `OptionError` unless the cache takes `input_ids` and all of `new` tokens but the last."""
        if not isinstance(input_ids, Tensor):
            raise OptionError(f"input_ids must be a tensor, found {type(input_ids).__name__}")
        shape = tuple(input_ids.shape)
        if input_ids.dtype != torch.int64 or shape != (self.batch_size, *shape[1:2]) or not input_ids.numel():
            raise OptionError(
                f"input_ids must be int64 of shape ({self.batch_size}, tokens), found {input_ids.dtype} of"
                f" shape {shape}"
            )
        for name, number in (("position", position), ("max_new_tokens", new)):
            if not isinstance(number, int) or number < 0:
                raise OptionError(f"{name} must be an integer from 0 on, found {number!r}")
        tokens = shape[1] + max(new - 1, 0)
        if position + tokens > self.max_cache_len:
            raise OptionError(
                f"{tokens} tokens from position {position} must lie within max_cache_len={self.max_cache_len}"
            )


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


def digest(directory: Path, about: dict[str, Any]) -> str:
    """Returns a hash of the package but for the values of its tensors, which take long to read.

    PyTorch's loader runs damaged programs, and weights of other shapes; both end the process.
    """
    rest = {key: value for key, value in about.items() if key != "digest"}
    value = hashlib.sha256(json.dumps(rest, sort_keys=True).encode())
    for program in PROGRAMS:
        value.update((directory / f"{program}.pt2").read_bytes())
    with (directory / WEIGHTS).open("rb") as file:
        length = file.read(8)  # of the names, dtypes and shapes that follow
        value.update(file.read(int.from_bytes(length, "little")))
    return value.hexdigest()


def _check(directory: Path, about: dict[str, Any]) -> None:
    """Raises `CheckpointError` if this process cannot run the programs, which would end it."""
    if about.get("version") != VERSION:
        raise CheckpointError(
            f"{directory}: written by another version of mxcompile: save_package writes it again"
        )
    if about.get("digest") != digest(directory, about):
        raise CheckpointError(
            f"{directory}: a damaged package, with other bytes than save_package wrote: it writes them again"
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
        return
    raise CheckpointError(
        f"{directory}: compiled with torch {about['torch']} for another machine, and {this}: save_package"
        " compiles it here"
    )
