"""Callbacks for trainers of other libraries: the watch takes their step number, and closes at the end.

    Trainer(…, callbacks=[mxcompile.watch.for_transformers(watch)])
    lightning.Trainer(…, callbacks=[mxcompile.watch.for_lightning(watch)])

Steps themselves need no callback: a step ends when the optimizer steps.
"""

from __future__ import annotations

import contextlib
import importlib
from typing import Any

from mxcompile.errors import OptionError
from mxcompile.watch.watch import Watch


def for_transformers(watch: Watch) -> Any:
    """Returns a ``transformers.TrainerCallback`` for `watch`."""
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        """Numbers steps like the trainer, also after a restart from a checkpoint."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.resume(state.global_step)

        def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            watch.close()

    return Watching()


def for_lightning(watch: Watch) -> Any:
    """Returns a ``lightning.pytorch.Callback`` for `watch`. Raises `OptionError` without Lightning."""
    for name in ("lightning.pytorch", "pytorch_lightning"):
        with contextlib.suppress(ImportError):
            base = importlib.import_module(name).Callback
            break
    else:
        raise OptionError("for_lightning needs Lightning: pip install lightning")

    class Watching(base):  # type: ignore[misc, valid-type]
        """Numbers steps like the trainer, also after a restart from a checkpoint."""

        def on_train_start(self, trainer: Any, module: Any) -> None:
            watch.resume(trainer.global_step)

        def on_train_end(self, trainer: Any, module: Any) -> None:
            watch.close()

    return Watching()
