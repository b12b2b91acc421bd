"""Where in the user's model and code something happens, by the Python frames that led there."""

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
    """Path of the innermost module and ``file:line`` of the innermost code outside torch, up from `frame`.

    paths: of the model's modules, by identity.
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
    """`` in the layer PATH (file:line)``: where in `model` an error was raised, "" if that is not known."""
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
    if lines:  # Dynamo has traced into the model, and says how far
        own = [line for line in lines if not line[0].startswith(_OUTSIDE)]
        source = ":".join((own or lines)[-1])
    return "".join((f" in {path}" if path else "", f" ({source})" if source else ""))
