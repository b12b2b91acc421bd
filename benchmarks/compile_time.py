"""Measures the time of the passes: as a share of a cold compile, and as the graph grows.

Usage: python benchmarks/compile_time.py [--layers 2 8 32 128 512]
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import common
import torch
from torch import nn

import mxcompile
from mxcompile.models import isolated
from mxcompile.passes import pipeline

WIDTH = 64
DEPTHS = 0, 12, 24


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[8, 32, 128, 512])
    options = parser.parse_args()
    shares = [share_of_compile("llama 2×512", layers=2, width=512, feed_forward=1408, vocabulary=4096)]
    shares.append(share_of_compile("llama 8×256", layers=8, width=256, feed_forward=704, vocabulary=4096))
    common.show(shares)
    growth = [pass_time(layers) for layers in options.layers]
    print()
    common.show(growth)
    common.write("compile_time", [*shares, *growth])


def share_of_compile(name: str, **size: int) -> dict[str, Any]:
    """Returns the share of the passes in the time of a compile of forward and backward with empty caches."""
    model = common.llama(**size)
    tokens = torch.randint(size["vocabulary"], (2, 128))
    with tempfile.TemporaryDirectory() as cache, mock.patch.dict("os.environ", TORCHINDUCTOR_CACHE_DIR=cache):
        torch._dynamo.reset()
        mxcompile.clear_reports()
        start = time.perf_counter()
        torch.compile(model, backend="mxfp8")(input_ids=tokens, labels=tokens).loss.backward()
        compile_s = time.perf_counter() - start
    (report,) = mxcompile.reports()
    pass_s = report.summary.pass_time_us / 1e6
    return {
        "measure": "share of cold compile",
        "model": name,
        "compile_s": round(compile_s, 2),
        "pass_s": round(pass_s, 3),
        "share": f"{pass_s / compile_s:.2%}",
    }


class Block(nn.Module):
    """A pre-norm transformer block. Its number makes it differ from other blocks, so that none is folded."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.number = number
        self.norm = nn.LayerNorm(WIDTH)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Returns the output of the block for `x`; both are [batch, length, WIDTH]."""
        heads = self.qkv(self.norm(x)).unflatten(-1, (3, 2, -1)).permute(2, 0, 3, 1, 4)
        attended = nn.functional.scaled_dot_product_attention(*heads)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def pass_time(layers: int) -> dict[str, Any]:
    """Returns the time of the passes on the joint graph of a deep model, in total and per node.

    The least of several depths of the stack: CPython 3.11 maps memory at every call of a loop that runs at
    the end of a chunk of its stack, and a pass may then take twenty times as long.
    """
    rows = [_at_depth(depth, lambda: _pass_time(layers)) for depth in DEPTHS]
    return min(rows, key=lambda row: row["pass_ms"])


def _at_depth(depth: int, call: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    return _at_depth(depth - 1, call) if depth else call()


def _pass_time(layers: int) -> dict[str, Any]:
    nodes: list[int] = []

    def counted(steps: Any, graph: torch.fx.Graph) -> None:
        nodes.append(len(graph.nodes))
        run(steps, graph)

    run = pipeline.run
    model = nn.Sequential(*map(Block, range(layers)))
    isolated._IN_CHILD.set(True)  # the passes run here, where they are counted, and not in a child
    with mock.patch.object(pipeline, "run", counted):
        start = time.perf_counter()
        report = mxcompile.explain(model, torch.zeros(2, 16, WIDTH))
        trace_s = time.perf_counter() - start
    pass_ms = report.summary.pass_time_us / 1e3
    return {
        "measure": "growth",
        "layers": layers,
        "nodes": sum(nodes),
        "trace_s": round(trace_s, 1),
        "pass_ms": round(pass_ms, 1),
        "us_per_node": round(1e3 * pass_ms / sum(nodes), 2),
    }


if __name__ == "__main__":
    main()
