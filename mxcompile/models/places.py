"""Finds the module path and the source line of the user's model from Python frames."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable
from pathlib import Path
from traceback import walk_tb
from types import FrameType

import torch
from torch import nn

_OUTSIDE = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, sys.modules["mxcompile"]))
_USER_CODE = re.compile(r'File "([^"<]+)", line (\d+), in ')


def where(frames: Iterable[tuple[FrameType, int]], paths: dict[int, str]) -> tuple[str, str]:
    """Returns (path of the innermost module, ``file:line`` of the innermost user code) in `frames`.

    frames: frames with their lines, the innermost first. paths: module paths of the model, by ``id``.
    """
    path, source = "", ""
    for frame, line in frames:
        if not source and not frame.f_code.co_filename.startswith((*_OUTSIDE, "<")):
            source = f"{frame.f_code.co_filename}:{line}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            path = path or paths.get(id(owner), "")
        if path and source:
            break
    return path, source


def where_failed(error: BaseException, model: nn.Module) -> str:
    """Returns `` in PATH (file:line)``, where `model` raised `error`; "" if that is unknown."""
    paths = {id(module): path for path, module in model.named_modules()}
    path, source = where(reversed([*walk_tb(error.__traceback__)]), paths)
    lines = _USER_CODE.findall(str(error))
    if lines:  # Dynamo's message lists the model's frames, which the traceback lacks
        user_lines = [line for line in lines if not line[0].startswith(_OUTSIDE)]
        source = ":".join((user_lines or lines)[-1])
    return "".join((f" in {path}" if path else "", f" ({source})" if source else ""))
