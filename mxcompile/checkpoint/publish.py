"""Writing files so that a reader sees all of one or nothing: beside the place, synced, then renamed."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxcompile.checkpoint.files import DTYPE_NAMES
from mxcompile.errors import CheckpointError


@contextlib.contextmanager
def writing(target: Path) -> Iterator[None]:
    """Make the directory `target` will be in; what the system refuses meanwhile is a `CheckpointError`."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or target}: {error.strerror or error}") from error


def write_tensors(
    file: Path, specs: Mapping[str, Tensor], values: Iterable[tuple[str, Tensor]], metadata: Mapping[str, str]
) -> None:
    """Publish a safetensors file, of tensors that come one after the other and are not kept.

    specs: shape and dtype of every tensor, on the meta device say. values: those tensors, in any order.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    for name in sorted(
        specs, key=lambda name: (-specs[name].element_size(), name)
    ):  # so that all are aligned
        start, end = end, end + specs[name].nbytes
        dtype, shape = DTYPE_NAMES[specs[name].dtype], list(specs[name].shape)
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    part = file.with_name(f"{file.name}.part")
    with part.open("wb") as handle:
        handle.write(len(text).to_bytes(8, "little") + text)
        handle.truncate(handle.tell() + end)
        for name, value in values:
            handle.seek(8 + len(text) + header[name]["data_offsets"][0])
            handle.write(value.reshape(-1).view(torch.uint8).numpy(force=True).data)
    _publish(part, file)


def write_json(file: Path, value: Any) -> None:
    """Publish a JSON file."""
    write_bytes(file, (json.dumps(value, indent=2) + "\n").encode())


def write_bytes(file: Path, content: bytes) -> None:
    """Publish a file."""
    part = file.with_name(f"{file.name}.part")
    part.write_bytes(content)
    _publish(part, file)


def _publish(part: Path, file: Path) -> None:
    with part.open("rb") as handle:
        os.fsync(handle.fileno())
    part.replace(file)
    sync_directory(file.parent)


def sync_directory(path: Path) -> None:
    """Make renames in `path` last."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
