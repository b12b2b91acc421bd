"""Files of safetensors checkpoints: one file, or a directory of shards with its index.

Headers are read at open, tensors on access. Nothing is unpickled, and file names that leave the directory are
refused. A fault of a checkpoint raises a `CheckpointError` with one line that names the file. A directory is
written atomically: as a temporary directory beside it, which is synced and renamed.
"""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor

from mxcompile.errors import CheckpointError

log = logging.getLogger(__name__)

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

_DTYPE_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


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

    path: its path, as passed. entries: tensors of all files, by name. metadata: metadata of each file. files:
    its files, in order.
    """

    path: Path
    entries: dict[str, Entry]
    metadata: tuple[dict[str, str], ...]
    files: tuple[Path, ...]

    @classmethod
    def open(cls, path: str | Path) -> Checkpoint:
        """Opens the checkpoint at `path`, a safetensors file or a directory. Raises `CheckpointError`."""
        path = Path(path)
        has_index = (path / INDEX).is_file()
        index = _weight_map(path) if has_index else {}
        files = tuple(path / name for name in sorted({*index.values()})) if has_index else _shards(path)
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
        for name, file_name in index.items():
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
    """Returns the names of the files of all tensors by the index in the directory `path`, checked."""
    file = path / INDEX
    try:
        weights = json.loads(file.read_text(encoding="utf-8"))["weight_map"]
    except (OSError, ValueError, RecursionError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file} is not an index of safetensors: {line_of(error)}") from None
    if not isinstance(weights, dict) or not all(isinstance(name, str) for name in weights.values()):
        raise CheckpointError(f"{file}: its weight_map does not map names to files")
    for name in sorted({*weights.values()}):
        if PurePosixPath(name).name != name or "\\" in name or name in ("", ".", ".."):
            raise CheckpointError(f"{file}: {name!r} is not a file of this directory")
        if not name.endswith(".safetensors"):
            raise CheckpointError(f"{file}: {name!r} is not a safetensors file")
        if not (path / name).is_file():
            raise CheckpointError(f"{file}: {name!r} is missing")
    return weights


def read_json(file: Path) -> dict[str, Any]:
    """Returns the JSON object in `file`. Raises `CheckpointError`."""
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{file}: cannot be read: {line_of(error)}") from None
    if not isinstance(data, dict):
        raise CheckpointError(f"{file} is not a JSON object")
    return data


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields an empty directory, which becomes `target` if the context ends without an error.

    A killed process leaves its directory behind. It stays, because a process on another machine or in another
    container may still write it; a warning names it.

    target: an absolute path. Raises `CheckpointError` if it exists, or the file system reports an error.
    """
    if target.exists():
        raise CheckpointError(f"{target}: exists already: name another directory")
    name = target.name[:100]
    partial = target.with_name(f".{name}.{uuid.uuid4().hex}.partial")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        for path in target.parent.glob(f".{glob.escape(name)}.{'?' * 32}.partial"):
            log.warning("%s is from an interrupted run: remove it, unless a process still writes it", path)
        partial.mkdir()
        try:
            yield partial
            for path in (*partial.iterdir(), partial):
                _sync(path)
            partial.rename(target)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
        _sync(target.parent)
    except OSError as error:
        where = error.filename2 or error.filename or target
        raise CheckpointError(f"{where}: {error.strerror or error}") from error


def write_tensors(
    file: Path, specs: Mapping[str, Tensor], values: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Writes a safetensors file from a stream of tensors, without keeping them in memory.

    specs: tensors with the shape and dtype of every tensor, for example on the meta device. values: the
    tensors, in any order.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    # wide elements come first, which aligns all tensors to their element size
    for name in sorted(specs, key=lambda name: (-specs[name].element_size(), name)):
        start, end = end, end + specs[name].nbytes
        dtype, shape = _DTYPE_NAMES[specs[name].dtype], list(specs[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with file.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(handle.tell() + end)
        for name, value in values:
            handle.seek(8 + len(text) + header[name]["data_offsets"][0])
            handle.write(value.reshape(-1).view(torch.uint8).numpy(force=True).data)


def write_json(file: Path, value: Any) -> None:
    """Writes a JSON file."""
    file.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _sync(path: Path) -> None:
    """Flushes the content of a file, or the renames in a directory, to disk."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
