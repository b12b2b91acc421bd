"""Finds the module path and the source line of the user's model from Python frames."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType

import torch
from torch import nn

_OUTSIDE = tuple(f"{Path(module.__file__ or '').parent}/" for module in (torch, sys.modules["mxcompile"]))
_USER_CODE = re.compile(r'File "([^"<]+)", line (\d+), in ')


def where(frame: FrameType | None, paths: dict[int, str]) -> tuple[str, str]:
    """Returns (path of the innermost module, ``file:line`` of the innermost user code) above `frame`.

    paths: module paths of the model, by ``id``.
    """
    path, source = "", ""
    while frame is not None and not (path and source):
        if not source and not frame.f_code.co_filename.startswith((*_OUTSIDE, "<")):
            source = f"{frame.f_code.co_filename}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            path = path or paths.get(id(owner), "")
        frame = frame.f_back
    return path, source


def where_failed(error: BaseException, model: nn.Module) -> str:
    """Returns `` in PATH (file:line)``, where `model` raised `error`; "" if that is unknown."""
    paths = {id(module): path for path, module in model.named_modules()}
    path, source = "", ""
    traceback = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            path = paths.get(id(owner)) or path
        if not frame.f_code.co_filename.startswith((*_OUTSIDE, "<")):
            source = f"{frame.f_code.co_filename}:{traceback.tb_lineno}"
        traceback = traceback.tb_next
    lines = _USER_CODE.findall(str(error))
    if lines:  # Dynamo's message lists the model's frames, which the traceback lacks
        user_lines = [line for line in lines if not line[0].startswith(_OUTSIDE)]
        source = ":".join((user_lines or lines)[-1])
    return "".join((f" in {path}" if path else "", f" ({source})" if source else ""))
