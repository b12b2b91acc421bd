"""Silences other libraries during a command, and shows the elapsed time on a terminal."""

from __future__ import annotations

import logging
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

_TALKATIVE = ("transformers", "torchao", "torch.utils._pytree")


@contextmanager
def quiet() -> Iterator[None]:
    """Suppresses warnings, and log messages below errors of verbose libraries."""
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


@contextmanager
def working(label: str) -> Iterator[None]:
    """Shows the text `label` and the elapsed time on a terminal, for work of unknown length."""
    from tqdm import tqdm

    done = threading.Event()
    with tqdm(desc=label, disable=None, leave=False, bar_format="{desc} {elapsed}") as bar:

        def tick() -> None:
            while not done.wait(0.5):
                bar.refresh()

        ticking = threading.Thread(target=tick, daemon=True)
        if not bar.disable:
            ticking.start()
        try:
            yield
        finally:
            done.set()
            if not bar.disable:
                ticking.join()
