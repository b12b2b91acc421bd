"""Keeping other libraries' advice, which is not about what was asked, out of a command's output."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_TALKATIVE = ("transformers", "torchao", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """Only errors from libraries that comment on their own state, and no warnings."""
    before = {name: logging.getLogger(name).level for name in _TALKATIVE}
    for name in before:
        logging.getLogger(name).setLevel(logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).setLevel(level)
