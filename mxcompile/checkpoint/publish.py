"""Writing files so that a reader sees all of one or nothing: beside the place, synced, then renamed."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor


def write_tensors(file: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Publish a safetensors file."""
    from safetensors.torch import save_file

    part = file.with_name(f"{file.name}.part")
    save_file(dict(tensors), str(part), metadata=dict(metadata))
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
