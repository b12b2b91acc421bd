"""Time that giving roles takes, per node, as the forward of a deep model grows; beside other checkouts'.

    trace of a few blocks ─▶ repeated, the end of one copy the start of the next ─▶ find ─▶ classify, timed

Usage: python benchmarks/classify_time.py [--nodes 6000 25000 100000] [--baseline CHECKOUT …]

A baseline is a folder with another commit of mxcompile (``git worktree add``). Each checkout runs in its own
process, in turns, over the same graphs. Reported is the least of the repeats, in the process's own time.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx

BLOCKS = 8
REPEATS = 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--nodes", type=int, nargs="*", default=[6_000, 25_000, 100_000])
    parser.add_argument("--baseline", type=Path, nargs="*", default=[])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--measure", action="store_true", help="measure the mxcompile that is imported")
    options = parser.parse_args()
    if options.measure:
        print(json.dumps([measured(nodes) for nodes in options.nodes]))
        return
    compare(options.nodes, options.baseline, options.rounds)


def compare(sizes: list[int], baselines: list[Path], rounds: int) -> None:
    """Measure this checkout and `baselines` in turns; show and write the least time of each."""
    import common

    best: dict[tuple[str, int], dict[str, Any]] = {}
    for _ in range(rounds):
        for checkout in (common.ROOT, *baselines):
            commit = _commit(checkout)
            for found in _in_process(checkout, sizes):
                row = {"measure": "classify", "classified_by": commit, **found}
                known = best.setdefault((commit, row["nodes"]), row)
                if row["us_per_node"] < known["us_per_node"]:
                    best[commit, row["nodes"]] = row
    rows = sorted(best.values(), key=lambda row: row["nodes"])
    common.show(rows)
    common.write("classify_time", rows)


def _commit(checkout: Path) -> str:
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def _in_process(checkout: Path, sizes: list[int]) -> list[dict[str, Any]]:
    command = [sys.executable, __file__, "--measure", "--nodes", *map(str, sizes)]
    environment = {**os.environ, "PYTHONPATH": str(checkout)}
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    found: list[dict[str, Any]] = json.loads(run.stdout.splitlines()[-1])
    return found


def measured(nodes: int) -> dict[str, Any]:
    """Classify a graph of at least `nodes` nodes."""
    from mxcompile.graph.tags import tags_of
    from mxcompile.models.names import GraphInput
    from mxcompile.passes.classify import Classify
    from mxcompile.passes.find import Find

    graph = deep_graph(nodes)
    inputs = (GraphInput(),)
    Find(inputs=inputs).apply(graph)
    times = []
    for _ in range(REPEATS):
        gc.collect()
        start = time.process_time()
        Classify(inputs=inputs).apply(graph)
        times.append(time.process_time() - start)
    roles = [str(tag.role) for node in graph.nodes for tag in tags_of(node)]
    return {
        "nodes": len(graph.nodes),
        "layers_with_a_role": sum(role != "other" for role in roles),
        "classify_ms": round(1e3 * min(times), 1),
        "us_per_node": round(1e6 * min(times) / len(graph.nodes), 2),
    }


def deep_graph(nodes: int) -> fx.Graph:
    """The forward of a transformer of at least `nodes` nodes: a trace of `BLOCKS` blocks again and again."""
    traced, names = _traced()
    graph, value = fx.Graph(), None
    while len(graph.nodes) < nodes:
        copies: dict[fx.Node, fx.Node] = {}
        for node in traced.nodes:
            if node.op == "output":
                value = copies[node.all_input_nodes[0]]
            elif node.op == "placeholder" and node not in names and value is not None:
                copies[node] = value
            else:
                copies[node] = graph.node_copy(node, copies.__getitem__)
                if node in names:
                    copies[node].meta["desc"] = SimpleNamespace(target=names[node])
    graph.output(value)
    return graph


def _traced() -> tuple[fx.Graph, dict[fx.Node, str]]:
    """The graph of a few blocks, and the parameters among its placeholders."""
    from compile_time import WIDTH, Block

    from mxcompile.compiler.decompositions import table

    with FakeTensorMode():
        model = nn.Sequential(*map(Block, range(BLOCKS)))
        state = dict(model.named_parameters())

        def call(values: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = functional_call(model, values, (x,))
            return result

        with torch.no_grad():
            graph = make_fx(call, decomposition_table=table())(state, torch.zeros(2, 16, WIDTH)).graph
    placeholders = graph.find_nodes(op="placeholder")
    return graph, dict(zip(placeholders, state, strict=False))


if __name__ == "__main__":
    main()
