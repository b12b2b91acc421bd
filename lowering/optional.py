"""Which modules of the lowering can be imported here.

The templates need Triton, which not every machine has, and names of PyTorch that are not public and that any
release may rename (`mxcompile.private_names`). Importing a template registers it with Inductor, so a lowering
pass asks `obstacle` for its templates before it makes operators that they lower. Only what a library lacks
is an obstacle: an error of a module of our own is raised.
"""

from __future__ import annotations

import functools
import importlib
import logging
import re
from types import ModuleType

import torch

log = logging.getLogger(__name__)

_LIBRARIES = frozenset({"torch", "triton"})


def obstacle(*modules: str) -> str:
    """Returns why one of `modules` cannot be imported; "" if all of them are.

    modules: names below ``mxcompile.lowering``.
    """
    return next(filter(None, map(_missing, modules)), "")


@functools.cache
def _missing(module: str) -> str:
    try:
        importlib.import_module(f"mxcompile.lowering.{module}")
    except (ImportError, AttributeError) as error:
        if _library(error) not in _LIBRARIES:
            raise
        reason = f"no {module} with torch {torch.__version__}: {error}"
        log.warning("%s", reason)
        return reason
    return ""


def _library(error: ImportError | AttributeError) -> str:
    """The library that lacks the name which `error` asked for."""
    if isinstance(error, ImportError):
        module = error.name or ""
    else:
        module = error.obj.__name__ if isinstance(error.obj, ModuleType) else ""
    return module.partition(".")[0]


def triton_release() -> tuple[int, ...]:
    """Major and minor version of the installed Triton."""
    import triton  # here: not every machine has it

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def has_mslk() -> bool:
    """Whether the installed PyTorch has the products of MSLK, which its builds may lack.

    One without CUDA, which only writes code for elsewhere, stands for one that has them.
    """
    built = re.search(r"-DUSE_(MSLK|FBGEMM_GENAI)\b", torch.__config__.show())
    return not torch.backends.cuda.is_built() or built is not None
