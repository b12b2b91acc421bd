"""The cost of a large model before its first step: the plan of the whole model, and a cold compile.

Usage: python benchmarks/large_models.py [--planning 8 32 126] [--repeats 3] [--only planning|compile]

Planning: time and memory growth of the process for a Llama of Llama-3.1-405B's width on the meta device, by
depth. Cold compile: forward and backward of a Llama with empty caches, in processor seconds of the process
and of its C++ compilers (one at a time). Each compile has its own process, and the ways alternate. "In
pieces" means that both backends compile the same modules: the blocks, which share code, and the head.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import torch
from torch import nn
from tqdm import tqdm

PEERS = {"mxfp8 whole": "inductor whole", "mxcompile.compile": "inductor by block"}
WAYS = (*PEERS.values(), *PEERS)
LAYERS = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--planning", type=int, nargs="*", default=[8, 32, 126])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--only", choices=["planning", "compile"])
    parser.add_argument("--child", nargs=2, metavar=("WHAT", "WHICH"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        task, which = options.child
        print(json.dumps(planned(int(which)) if task == "planning" else compiled(which)))
        return
    rows = []
    if options.only != "compile":
        rows += [apart("planning", str(layers)) for layers in options.planning]
        common.show(rows)
    if options.only != "planning":
        times = cold(options.repeats)
        common.show(times)
        rows += times
    common.write("large_models", rows)


def apart(task: str, which: str) -> dict[str, Any]:
    """Returns the row of one measurement, made in a new process with empty caches."""
    with tempfile.TemporaryDirectory() as cache:
        surroundings = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache, "TORCHINDUCTOR_COMPILE_THREADS": "1"}
        command = [sys.executable, "-W", "ignore", __file__, "--child", task, which]
        done = subprocess.run(command, env=surroundings, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    row: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return row


def planned(layers: int) -> dict[str, Any]:
    """Returns the time and memory of planning a model of 405B's width with `layers` layers."""
    sys.path.insert(0, str(common.ROOT / "tests"))
    from helpers import giants

    from mxcompile.compiler.session.decompositions import table
    from mxcompile.plan.plan import make_plan

    model = giants.build("llama", layers)
    ids = torch.zeros(1, 8192, dtype=torch.int64)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    start, cpu = time.perf_counter(), time.process_time()
    plan = make_plan(model, (), {"input_ids": ids, "labels": ids}, table())
    took_s, cpu_s = time.perf_counter() - start, time.process_time() - cpu
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    return {
        "measure": "planning",
        "layers": layers,
        "parameters": f"{sum(p.numel() for p in model.parameters()) / 1e9:.0f}B",
        "gemms": len(plan.tags),
        "wall_s": round(took_s, 2),
        "cpu_s": round(cpu_s, 2),
        "memory_gb": round((before + grown) / 2**20, 2),
        "of_which_planning_gb": round(grown / 2**20, 2),
    }


def cold(repeats: int) -> list[dict[str, Any]]:
    """Returns the median processor seconds of each way, and the median ratio to Inductor per round."""
    rounds = [{way: apart("compile", way) for way in WAYS} for _ in tqdm(range(repeats), desc="rounds")]

    def middle(way: str, figure: str) -> float:
        return round(statistics.median(run[way][figure] for run in rounds), 1)

    def ratio(way: str) -> str:
        peer = PEERS.get(way, way)
        return f"{statistics.median(run[way]['cpu_s'] / run[peer]['cpu_s'] for run in rounds):.2f}"

    return [
        {
            "measure": "cold compile",
            "way": way,
            "cpu_s": middle(way, "cpu_s"),
            "of_which_compilers_s": middle(way, "of_which_compilers_s"),
            "cpp_kernels": rounds[0][way]["cpp_kernels"],
            "to_inductor": ratio(way),
            "layers": LAYERS,
            "rounds": repeats,
        }
        for way in WAYS
    ]


def _by_block(model: nn.Module) -> nn.Module:
    for part in (*model.model.layers, model.lm_head):
        part.compile(backend="inductor")
    return model


def _front_door(model: nn.Module) -> nn.Module:
    import mxcompile

    return mxcompile.compile(model)


COMPILE: dict[str, Callable[[nn.Module], Any]] = {
    "inductor whole": lambda model: torch.compile(model, backend="inductor"),
    "inductor by block": _by_block,
    "mxfp8 whole": lambda model: torch.compile(model, backend="mxfp8"),
    "mxcompile.compile": _front_door,
}


def _processor_s(who: int) -> float:
    used = resource.getrusage(who)
    return used.ru_utime + used.ru_stime


def _cpp_kernels() -> int:
    """Returns the number of C++ kernels in the Inductor cache of this process."""
    return len([*Path(os.environ["TORCHINDUCTOR_CACHE_DIR"]).rglob("*.main.so")])


def compiled(way: str) -> dict[str, Any]:
    """Times the first step of a Llama compiled in `way`. Small compiles before it exclude import times."""
    for backend in ("inductor", "mxfp8"):
        torch.compile(nn.Linear(8, 8), backend=backend)(torch.zeros(2, 8)).sum().backward()
    model = common.llama(layers=LAYERS, width=256, feed_forward=704, vocabulary=1024)
    ids = torch.randint(1024, (2, 64))
    run = COMPILE[way](model)
    parts = resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN
    before, kernels = [_processor_s(part) for part in parts], _cpp_kernels()
    run(input_ids=ids, labels=ids).loss.backward()
    process_s, compilers = (_processor_s(part) - start for part, start in zip(parts, before, strict=True))
    seconds = {"cpu_s": process_s + compilers, "of_which_compilers_s": compilers}
    return {"way": way, **seconds, "cpp_kernels": _cpp_kernels() - kernels}


if __name__ == "__main__":
    main()
