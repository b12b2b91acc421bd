"""Atomic writes of a directory: write a temporary directory beside it, sync, rename."""

from __future__ import annotations

import contextlib
import glob
import json
import logging
import os
import shutil
import uuid
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mxcompile.checkpoint.files import DTYPE_NAMES
from mxcompile.errors import CheckpointError

log = logging.getLogger(__name__)


@contextlib.contextmanager
def new_directory(target: Path) -> Iterator[Path]:
    """Yields a temporary directory, which becomes `target` if the context ends without an error.

    A killed process leaves its directory behind. It stays, because a process on another machine or in another
    container may still write it; a warning names it.

    Args:
        target: The directory to write, an absolute path.

    Yields:
        An empty directory.

    Raises:
        CheckpointError: `target` exists, or the file system reports an error.
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

    Args:
        file: The file.
        specs: Tensors with the shape and dtype of every tensor, for example on the meta device.
        values: The tensors, in any order.
        metadata: Metadata of the file.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    end = 0
    # wide elements come first, which aligns all tensors to their element size
    for name in sorted(specs, key=lambda name: (-specs[name].element_size(), name)):
        start, end = end, end + specs[name].nbytes
        dtype, shape = DTYPE_NAMES[specs[name].dtype], list(specs[name].shape)
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
