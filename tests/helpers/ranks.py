"""Several ranks on this machine: processes that meet through a file, and what each of them gave."""

from __future__ import annotations

import atexit
import faulthandler
import os
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


def on_ranks(ranks: int, folder: Path, run: Callable[..., Any], *args: Any, apart: bool = False) -> list[Any]:
    """What ``run(*args)`` gives on each of `ranks`, whose working directory is `folder`.

    apart: whether each rank has a cache of compiled code of its own.
    """
    (folder / "rendezvous").unlink(missing_ok=True)  # of an earlier launch
    torch.multiprocessing.spawn(_rank, (ranks, str(folder), apart, run, args), nprocs=ranks)
    return results(ranks, folder)


def results(ranks: int, folder: Path) -> list[Any]:
    """What the last launch in `folder` gave."""
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(ranks)]


def results_of(run: Callable[[Any], Any], ways: Iterable[Callable[..., Any]]) -> dict[str, Any]:
    """What `run` gives of each of `ways`, by its name; or the traceback of one that fails."""
    outcomes: dict[str, Any] = {}
    for way in ways:
        try:
            outcomes[way.__name__] = run(way)
        except Exception:  # whatever it is: the test shows it
            outcomes[way.__name__] = traceback.format_exc()
    return outcomes


def _rank(
    rank: int, ranks: int, folder: str, apart: bool, run: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    """One rank, which leaves without the destructors of C++'s statics.

    PyTorch's registry of groups keeps Gloo's threads until then. A peer that leaves first can wake them while
    what they use is destroyed.
    """
    faulthandler.enable()
    if apart:
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = f"{folder}/cache{rank}"
    os.chdir(folder)
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/rendezvous", ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks, timeout=timedelta(seconds=300))
    try:
        torch.save(run(*args), f"{folder}/{rank}.pt")
        dist.barrier()
    finally:
        dist.destroy_process_group()
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
