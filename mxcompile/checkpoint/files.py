"""Reading safetensors checkpoints: one file, or a directory of shards with its index.

Headers are read at open, tensors on access. Nothing is unpickled, and file names that leave the directory are
refused. A fault of a checkpoint raises a `CheckpointError` with one line that names the file.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from mxcompile.errors import CheckpointError

INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"
"""The file of a whole model. Transformers ignores files beside it, which have the same weights under other
names (``consolidated.safetensors``) or an adapter (``adapter_model.safetensors``)."""
PICKLES = frozenset({".bin", ".pt", ".pth", ".pkl", ".ckpt", ".msgpack"})

_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F8_E4M3FNUZ": torch.float8_e4m3fnuz, "F8_E5M2FNUZ": torch.float8_e5m2fnuz, "C64": torch.complex64,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64, "BOOL": torch.bool,
}  # fmt: skip

DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
"""Dtype names in safetensors."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """The header of one tensor in a file."""

    name: str
    file: Path
    dtype: torch.dtype
    shape: tuple[int, ...]

    def __str__(self) -> str:
        """Returns the file and the name, for messages."""
        return f"{self.file}: {self.name!r}"

    @property
    def num_bytes(self) -> int:
        """Size of the tensor in bytes."""
        return self.dtype.itemsize * torch.Size(self.shape).numel()


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A checkpoint with its headers.

    Attributes:
        path: Its path, as passed.
        entries: Tensors of all files, by name.
        metadata: Metadata of each file.
        files: Its files, in order.
    """

    path: Path
    entries: dict[str, Entry]
    metadata: tuple[dict[str, str], ...]
    files: tuple[Path, ...]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Opens the checkpoint at `path`, a safetensors file or a directory. Raises `CheckpointError`."""
        path = Path(path)
        index = _weight_map(path) if (path / INDEX).is_file() else None
        files = _shards(path) if index is None else _of_index(path, index)
        entries: dict[str, Entry] = {}
        metadata: list[dict[str, str]] = []
        for file in files:
            with opened(file) as handle:
                metadata.append(dict(handle.metadata() or {}))
                for name in handle.keys():  # noqa: SIM118 — not a mapping
                    if name in entries:
                        raise CheckpointError(f"{file}: {name!r} is in {entries[name].file.name} too")
                    part = handle.get_slice(name)
                    word, shape = part.get_dtype(), tuple(part.get_shape())
                    if word not in _DTYPES:
                        raise CheckpointError(
                            f"{file}: {name!r} has dtype {word}, which mxcompile does not read"
                        )
                    entries[name] = Entry(name=name, file=file, dtype=_DTYPES[word], shape=shape)
        for name, file_name in (index or {}).items():
            if name not in entries or entries[name].file.name != file_name:
                raise CheckpointError(f"{path / INDEX}: {name!r} is not in {file_name}")
        return cls(path=path, entries=entries, metadata=tuple(metadata), files=files)

    @property
    def num_bytes(self) -> int:
        """Size of all tensors in bytes."""
        return sum(entry.num_bytes for entry in self.entries.values())

    def read(self, name: str) -> Tensor:
        """Returns the tensor named `name`."""
        with opened(self.entries[name].file) as handle:
            return handle.get_tensor(name)  # type: ignore[no-any-return]


def opened(file: Path) -> Any:
    """Opens `file` for reading, as a context manager. Raises `CheckpointError`."""
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError:
        raise CheckpointError("checkpoints need safetensors: pip install 'mxcompile[checkpoints]'") from None
    try:
        return safe_open(str(file), framework="pt")
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(f"{file}: not a whole safetensors file: {line_of(error)}") from None


def line_of(error: Exception) -> str:
    """Returns the message of `error` on one line."""
    return " ".join(str(error).split())


def _shards(path: Path) -> tuple[Path, ...]:
    """Returns the files of the checkpoint at `path`, which has no index."""
    if path.is_file():
        if path.suffix != ".safetensors":
            kind = "a pickle, which is never loaded" if path.suffix in PICKLES else "not a safetensors file"
            raise CheckpointError(f"{path}: {kind}")
        return (path,)
    if not path.is_dir():
        raise CheckpointError(f"{path}: no such file or directory")
    whole = path / _WHOLE
    if whole.is_file() and (path / "config.json").is_file():
        return (whole,)
    files = tuple(sorted(path.glob("*.safetensors")))
    if files:
        return files
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in PICKLES)
    if pickles:
        raise CheckpointError(
            f"{path}: holds pickles ({pickles[0]}), which are never loaded, and no safetensors"
        )
    raise CheckpointError(f"{path}: holds no safetensors: name a directory with *.safetensors files")


def _weight_map(path: Path) -> dict[str, str]:
    try:
        weights = json.loads((path / INDEX).read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path / INDEX} is not an index of safetensors: {line_of(error)}") from None
    if not isinstance(weights, dict) or not all(isinstance(v, str) for v in weights.values()):
        raise CheckpointError(f"{path / INDEX}: its weight_map does not map names to files")
    return weights


def _of_index(path: Path, index: dict[str, str]) -> tuple[Path, ...]:
    names = sorted({*index.values()})
    for name in names:
        if PurePosixPath(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{path / INDEX}: {name!r} is not a file of this directory")
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{path / INDEX}: {name!r} is not a safetensors file")
        if not (path / name).is_file():
            raise CheckpointError(f"{path / INDEX}: {name!r} is missing")
    return tuple(path / name for name in names)


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in `file`. Raises `CheckpointError`."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read: {line_of(error)}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return data
