"""Whether modules of the lowering can be imported on this machine.

The templates need Triton, which not every machine has, and private names of PyTorch, which any release may
rename (`mxcompile.private_names`). Importing a template registers it with Inductor. So a lowering pass calls
`obstacle` with its templates before it inserts operators that they lower. A missing Triton, and a name that
PyTorch or Triton lacks, are obstacles; other errors of an import are raised.
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
    """Returns the package that is missing, or that lacks the imported name."""
    if isinstance(error, ImportError):
        module = error.name or ""
    else:
        module = error.obj.__name__ if isinstance(error.obj, ModuleType) else ""
    return module.partition(".")[0]


def triton_release() -> tuple[int, ...]:
    """Returns the major and the minor version of the installed Triton."""
    import triton  # here: not every machine has it

    return tuple(int(part) for part in triton.__version__.split(".")[:2])


def has_mslk() -> bool:
    """Whether the installed PyTorch has the products of MSLK, which some of its builds lack.

    A build without CUDA only generates code for other machines, and counts as a build with MSLK.
    """
    built = re.search(r"-DUSE_(MSLK|FBGEMM_GENAI)\b", torch.__config__.show())
    return not torch.backends.cuda.is_built() or built is not None
