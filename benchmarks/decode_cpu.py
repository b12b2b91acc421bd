"""Decode and prefill of one linear layer on this machine: stored weights of mxcompile and of other libraries.

The layer multiplies rows of BF16 activations by a weight, by default larger than the last-level cache. The
baseline is the faster of BF16 and FP32, which depends on the class of CPU; the first line names the class.
Variants run in turns. In its turn a variant multiplies twice, so that its threads are awake, and the second
time counts. In a pause before each turn, the threads of the previous variant fall asleep. With one thread
(OMP_NUM_THREADS=1) times are CPU time of the thread, so that other programs count less, and results have a
file of their own.

    bf16 inductor            torch.compile of `F.linear`
    fp32 inductor            the same with weight and activations in FP32
    bf16 inductor, frozen    in BF16 with Inductor's freezing, which packs the weight for oneDNN
    mxcompile bf16           a layer that the policy keeps in BF16
    mxcompile mxfp8, mxint8, mxfp4, nvfp4   in BF16 with the weight stored, under backend="mxfp8"
    mxcompile mxint8, activations too   both operands in MXINT8
    torchao int8             int8 weight-only, compiled
    llama.cpp q8_0, q4_0 …   with FP32 activations, if --llama names the program compiled from llama_cpp.cpp;
                             with repack the weight has the layout that llama.cpp loads it into

Compiled code is cached, so run ``--repeats 1 --dry`` first to keep the measuring run short.
`plot_serving.py` draws the latest rows.

Usage: python benchmarks/decode_cpu.py [--repeats 30] [--rows 1 512] [--shapes 14336x4096 …] [--llama PROGRAM]
           [--llama-types q8_0 q4_0 "q4_0 repack" mxfp4 "mxfp4 repack"] [--only mxcompile …]
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import common
import torch
from torch import Tensor, nn
from tqdm import tqdm

from mxcompile.formats import TWO_LEVEL, Format, stored_form
from mxcompile.lowering.cpu.features import features
from mxcompile.storage.cast import cast

SHAPES = ("14336x4096", "4096x14336", "8192x8192")
ROWS = (1, 2, 4, 8, 16, 512)
PAUSE_S = 0.02
LLAMA = "llama.cpp "
LLAMA_TYPES = ("q8_0", "q4_0", "q4_0 repack", "mxfp4", "mxfp4 repack")
BASELINES = ("bf16 inductor", "fp32 inductor")
BYTES = {
    "bf16": 2.0, "fp32": 4.0, "mxfp8": 33 / 32, "mxint8": 33 / 32, "mxfp4": 17 / 32, "nvfp4": 9 / 16,
    "int8": 1.0, "q8_0": 34 / 32, "q4_0": 18 / 32,
}  # fmt: skip
"""Bytes per element of a weight, with block scales; the row scales of int8 are not counted."""

STORED = {
    "mxfp8": stored_form(torch.float8_e4m3fn),
    "mxint8": stored_form(torch.int8),
    "mxfp4": stored_form(torch.float4_e2m1fn_x2),
    "nvfp4": stored_form(torch.float4_e2m1fn_x2, TWO_LEVEL),
}
"""Formats of weights, by precision."""

INTEGERS = {
    "version": 1,
    "preset": "inference",
    "rules": [{"match": {"name": "*"}, "use": "mxint8"}],
}
"""A policy that casts activations to MXINT8."""

PEERS = {
    "bf16 inductor": "bf16", "fp32 inductor": "fp32", "mxcompile mxfp8": "mxfp8", "torchao int8": "int8",
    "llama.cpp q8_0": "llama", "llama.cpp q4_0": "q4_0", "llama.cpp q4_0 repack": "q4_0_repack",
    "llama.cpp mxfp4": "llama_mxfp4", "llama.cpp mxfp4 repack": "llama_mxfp4_repack",
}  # fmt: skip
"""Ways that serve as references of ratios, and their names in the keys of a row."""


def _stored(weight: Tensor, form: Format, *, small_pages: bool = False) -> nn.Module:
    """Returns a linear layer with the weight [N, K] stored in `form`, as by `quantize_weights_`.

    small_pages: without the huge pages of `quantize_weights_`.
    """
    stored = cast(weight, -1, form)
    linear = _dense(weight)
    linear.weight = nn.Parameter(stored.clone() if small_pages else stored, requires_grad=False)
    return linear


class Kept(nn.Module):
    """A linear layer that stays in BF16, in a graph that has a small stored weight too."""

    def __init__(self, weight: Tensor) -> None:
        super().__init__()
        self.kept, self.stored = _dense(weight), _stored(weight[:32], STORED["mxfp8"])

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the products with both weights."""
        return self.kept(x), self.stored(x)


class LlamaCpp:
    """A process of ``llama_cpp.cpp`` for products of one type. A call runs a product and returns its ms."""

    def __init__(self, program: str, n: int, k: int, m: int, kind: str) -> None:
        sizes = map(str, (n, k, m, torch.get_num_threads()))
        pipe = subprocess.PIPE
        self._process = subprocess.Popen([program, *sizes, *kind.split()], stdin=pipe, stdout=pipe, text=True)
        self._line()

    def __call__(self) -> float:
        """Runs one product. Returns its time in ms."""
        assert self._process.stdin is not None
        self._process.stdin.write("\n")
        self._process.stdin.flush()
        return float(self._line())

    def __enter__(self) -> LlamaCpp:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.communicate()

    def _line(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise SystemExit(f"{self._process.args} ended with status {self._process.wait()}")
        return line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=30, help="of decode; a third of them of prefill")
    parser.add_argument("--rows", type=int, nargs="*", default=list(ROWS))
    parser.add_argument("--shapes", nargs="*", default=list(SHAPES), help="of the weight: N x K")
    parser.add_argument("--no-torchao", action="store_true")
    parser.add_argument("--llama", help="program that times llama.cpp's products")
    parser.add_argument("--llama-types", nargs="*", default=list(LLAMA_TYPES))
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of the names of ways; default all")
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    print(f"class of CPU: {features().name}")
    rows: list[dict[str, Any]] = []
    for shape in options.shapes:
        ways = layers(shape, with_torchao=not options.no_torchao)
        ways = {name: ways[name] for name in ways if not options.only or name.startswith((*options.only,))}
        for m in options.rows:
            repeats = options.repeats if m <= 16 else max(1, options.repeats // 3)
            llama = {kind: (options.llama, kind) for kind in options.llama_types if options.llama}
            rows += measure(shape, ways, m, repeats, llama)
    common.show([{k: v for k, v in row.items() if k != "times_ms"} for row in rows])
    if not options.dry:
        common.write("decode_cpu" if torch.get_num_threads() > 1 else "decode_cpu_one_thread", rows)


@torch.no_grad()
def layers(shape: str, *, with_torchao: bool) -> dict[str, Callable[..., Any]]:
    """Returns the layers to compare, by name, with a weight of `shape`. Each compiles at its first call."""
    n, k = map(int, shape.split("x"))
    torch.manual_seed(0)
    weight = torch.randn(n, k).bfloat16()
    ways: dict[str, Callable[..., Any]] = {
        BASELINES[0]: torch.compile(_dense(weight), dynamic=False),
        BASELINES[1]: torch.compile(_dense(weight.float()), dynamic=False),
        "bf16 inductor, frozen": torch.compile(_dense(weight), dynamic=False, options={"freezing": True}),
        **{
            f"mxcompile {word}": torch.compile(
                _stored(weight, form), backend="mxfp8", dynamic=False, options={"policy": "bf16"}
            )
            for word, form in STORED.items()
        },
    }
    ways["mxcompile bf16"] = torch.compile(
        Kept(weight), backend="mxfp8", dynamic=False, options={"policy": "bf16"}
    )
    ways["mxcompile mxfp8, small pages"] = torch.compile(
        _stored(weight, STORED["mxfp8"], small_pages=True),
        backend="mxfp8",
        dynamic=False,
        options={"policy": "bf16"},
    )
    ways["mxcompile mxint8, activations too"] = torch.compile(
        _stored(weight, STORED["mxint8"]), backend="mxfp8", dynamic=False, options={"policy": INTEGERS}
    )
    if with_torchao:
        ways["torchao int8"] = torch.compile(_int8(weight), dynamic=False)
    return ways


@torch.no_grad()
def measure(
    shape: str, ways: dict[str, Callable[..., Any]], m: int, repeats: int, llama: dict[str, tuple[str, str]]
) -> list[dict[str, Any]]:
    """Returns a row for each way to multiply `m` rows by a weight. llama: (program, type) by name."""
    torch._dynamo.reset()
    n, k = map(int, shape.split("x"))
    x = torch.randn(m, k).bfloat16()
    inputs = {name: x.float() if "fp32" in name else x for name in ways}
    turns = {name: (lambda layer=layer, x=inputs[name]: _turn(layer, x)) for name, layer in ways.items()}
    with ExitStack() as stack:
        for name, (program, kind) in llama.items():
            turns[LLAMA + name] = stack.enter_context(LlamaCpp(program, n, k, m, kind))
        for turn in turns.values():
            turn()
        times: dict[str, list[float]] = {name: [] for name in turns}
        for _ in tqdm(range(repeats), desc=f"{m}×{shape}", leave=False):
            for name, turn in turns.items():
                time.sleep(PAUSE_S)
                times[name].append(turn())
    return [_row(shape, m, name, times) for name in times]


def _turn(layer: Callable[..., Any], x: Tensor) -> float:
    clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter
    layer(x)
    start = clock()
    layer(x)
    return (clock() - start) * 1e3


def _row(shape: str, m: int, run: str, times: dict[str, list[float]]) -> dict[str, Any]:
    n, k = map(int, shape.split("x"))
    num_bytes = n * k * next(size for word, size in BYTES.items() if word in run)
    median = statistics.median(times[run])
    return {
        "weight": shape,
        "rows": m,
        "run": run,
        "median_ms": round(median, 3),
        "least_ms": round(min(times[run]), 3),
        "gb_per_s": round(num_bytes / median / 1e6, 1),
        "weight_mb": round(num_bytes / 1e6, 1),
        **{
            f"{word}_over_this": round(1 / common.median_ratio(times, run, name), 2)
            for name, word in PEERS.items()
            if name in times
        },
        "faster": min(BASELINES, key=lambda name: statistics.median(times.get(name, [0.0])))[:4],
        "times_ms": [round(t, 3) for t in times[run]],
    }


def _dense(weight: Tensor) -> nn.Module:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.clone(), requires_grad=False)
    return linear


def _int8(weight: Tensor) -> nn.Module:
    """Returns the int8 weight-only linear layer of torchao. Raises ImportError without torchao."""
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    linear = _dense(weight)
    quantize_(linear, Int8WeightOnlyConfig())
    return linear


if __name__ == "__main__":
    main()
