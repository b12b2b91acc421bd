"""Measures options that save memory or traffic in training: a Llama's optimizer step under FSDP2.

A step has several micro-batches, forward and backward, and AdamW. All variants train equal models on equal
tokens, alternating, in the same processes: one per rank, with one thread. Figures are counted on rank 0:

    saved_bytes     bytes that autograd saves in one micro-batch, each storage once, without weights
    weight_bytes    bytes of the rank's shard of the parameters
    sent_bytes      bytes that the rank sends in the collectives of one step, by ring: (n − 1) · input of an
                    all-gather, (n − 1)/n · input of a reduce-scatter, 2 (n − 1)/n · input of an all-reduce
    casts           casts to MXFP8 in a step, counted by tensor and dimension: casts in compiled graphs times
                    the micro-batches, plus casts of gathered weights that ran

torchao's MXFP8 training is emulated on CPUs; if it fails, its row has the reason. The first run mostly
compiles; later runs read Inductor's caches.
Usage: python benchmarks/training_less.py [--repeats 7] [--ranks 2] [--micro-batches 4] [--models …]
           [--ways …] [--batch 2] [--length 128]
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import inspect
import statistics
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import common
import torch
import torch.distributed as dist
from torch import Tensor, nn
from training_step import MODELS

import mxcompile

SIZES = MODELS | {"llama 2×128": {"layers": 2, "width": 128, "feed_forward": 352, "vocabulary": 512}}
"""Sizes of the models by name; the smallest model is for trying the script."""
BASELINE = "bf16 inductor"
TORCHAO = "torchao mxfp8 (emulated)"
ROLES = ["qkv", "attn_out", "ffn_in", "ffn_out"]
SAVED, TILES = {"saved": "mxfp8"}, {"weight_block": "32x32"}
WAYS: dict[str, tuple[dict[str, str], bool]] = {
    "mxfp8": ({}, False),
    "saved: mxfp8": (SAVED, False),
    "gathered in mxfp8 (32×32)": (TILES, True),
    "all of them": (SAVED | TILES, True),
}
"""(keys of the rule, whether FSDP2 gathers in MXFP8), by name."""


_INPUT_NAMES = ("input_tensor", "input", "tensor")
"""Names of the input parameter of collectives."""


@dataclass(slots=True)
class Subject:
    """One way to train: its sharded model, the compiled call, and the optimizer."""

    model: nn.Module
    call: Any
    optimizer: torch.optim.Optimizer

    def micro_batch(self, tokens: Tensor) -> Tensor:
        """Returns the loss of one forward."""
        loss: Tensor = self.call(input_ids=tokens, labels=tokens).loss
        return loss

    def step(self, batches: list[Tensor]) -> None:
        """Runs one optimizer step over `batches`."""
        for tokens in batches:
            (self.micro_batch(tokens) / len(batches)).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--micro-batches", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2, help="sequences of a micro-batch")
    parser.add_argument("--length", type=int, default=128, help="tokens of a sequence")
    parser.add_argument("--models", nargs="*", choices=SIZES, default=["llama 2×512"])
    parser.add_argument("--ways", nargs="*", choices=[*WAYS, TORCHAO], default=[*WAYS, TORCHAO])
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    for name in options.models:
        with tempfile.TemporaryDirectory() as folder:
            arguments = (options, name, folder)
            torch.multiprocessing.spawn(_rank, arguments, nprocs=options.ranks)
            rows += torch.load(Path(folder) / "rows.pt")
    common.show([{k: v for k, v in row.items() if k != "times_ms"} for row in rows])
    common.write("training_less", rows)


def _rank(rank: int, options: argparse.Namespace, name: str, folder: str) -> None:
    torch.set_num_threads(1)
    address = f"file://{folder}/rendezvous"
    dist.init_process_group("gloo", init_method=address, rank=rank, world_size=options.ranks)
    try:
        rows = measure(name, options, rank)
        if rank == 0:
            torch.save(rows, Path(folder) / "rows.pt")
    finally:
        dist.destroy_process_group()


def measure(name: str, options: argparse.Namespace, rank: int) -> list[dict[str, Any]]:
    """Returns a row for each way of training the model `name`."""
    generator = torch.Generator().manual_seed(rank)
    vocabulary, shape = SIZES[name]["vocabulary"], (options.batch, options.length)
    batches = [torch.randint(vocabulary, shape, generator=generator) for _ in range(options.micro_batches)]
    model = common.llama(**SIZES[name])
    counts: dict[str, dict[str, Any]] = {}
    subjects: dict[str, Subject] = {}
    for way in (BASELINE, *options.ways):
        try:
            with _casts_of_gathers() as gathered:
                subjects[way] = prepared(way, model, batches[0])
                counts[way] = counted(way, subjects[way], batches, gathered)
        except Exception as error:  # the failure of another library becomes a row of the table
            if way != TORCHAO:
                raise
            counts[way] = {"why": f"{type(error).__name__}: {str(error).splitlines()[0][:120]}"}
            subjects.pop(way, None)
    if TORCHAO in subjects:
        counts[TORCHAO]["casts"] = torchao_casts(model, batches)
    runs: dict[str, Callable[[], None]] = {
        way: lambda subject=subject: subject.step(batches) for way, subject in subjects.items()
    }
    times = common.alternate(runs, repeats=options.repeats)
    about = {
        "model": name,
        "ranks": options.ranks,
        "batch": f"{options.micro_batches}×{options.batch}×{options.length}",
    }
    return [{**about, "run": way, **_timed(way, times), **count} for way, count in counts.items()]


def _timed(way: str, times: dict[str, list[float]]) -> dict[str, Any]:
    if way not in times:
        return {"median_ms": None, "ratio_to_bf16": None, "times_ms": []}
    return {
        "median_ms": round(statistics.median(times[way]), 2),
        "ratio_to_bf16": round(common.median_ratio(times, way, BASELINE), 3),
        "times_ms": [round(taken, 2) for taken in times[way]],
    }


def prepared(way: str, model: nn.Module, tokens: Tensor) -> Subject:
    """Returns the sharded and compiled model of one way, before its first call."""
    from torch.distributed.fsdp import fully_shard

    model_copy = common.torchao_model(model, emulated=True) if way == TORCHAO else copy.deepcopy(model)
    use, gathers = WAYS.get(way, ({}, False))
    policy = {"version": 1, "rules": [{"match": {"role": ROLES}, "use": use}] if use else []}
    if gathers:
        mxcompile.quantize_gathers_(model_copy, policy, kwargs={"input_ids": tokens, "labels": tokens})
    for layer in model_copy.model.layers:
        fully_shard(layer, reshard_after_forward=True)
    fully_shard(model_copy, reshard_after_forward=True)
    torch._dynamo.reset()
    mxcompile.clear_reports()
    if way in WAYS:
        call = torch.compile(model_copy, backend="mxfp8", options={"policy": policy})
    else:
        call = torch.compile(model_copy)
    return Subject(model=model_copy, call=call, optimizer=torch.optim.AdamW(model_copy.parameters(), lr=1e-4))


def counted(way: str, subject: Subject, batches: list[Tensor], gathered: list[int]) -> dict[str, Any]:
    """Returns the counted columns, from the third step of `subject`, which compiles nothing."""
    subject.step(batches)
    subject.step(batches)
    gathers = gathered[0]
    with _sent() as sent:
        subject.step(batches)
    casts = gathered[0] - gathers
    if way in WAYS:
        (report,) = mxcompile.reports()
        casts += report.summary.casts * len(batches)
    parameters = sum(_local(p).numel() * p.element_size() for p in subject.model.parameters())
    return {
        "saved_bytes": saved_bytes(subject, batches[0]),
        "weight_bytes": parameters,
        "sent_bytes": sum(sent),
        "casts": casts,
    }


def saved_bytes(subject: Subject, tokens: Tensor) -> int:
    """Returns the bytes that autograd saves in a forward, without gathered weights, which are freed."""
    inputs = map(_local, [tokens, *subject.model.parameters()])
    total = common.saved_bytes(lambda: subject.micro_batch(tokens), inputs)
    subject.optimizer.zero_grad()
    return total


def _local(value: Any) -> Tensor:
    shard = value.to_local() if hasattr(value, "to_local") else value
    local: Tensor = getattr(shard, "master", shard)
    return local


@contextlib.contextmanager
def _sent() -> Iterator[list[float]]:
    """Yields a list that collects the bytes this rank sends in each collective inside this context."""
    ranks, sent = dist.get_world_size(), []
    share = {
        "all_gather_into_tensor": ranks - 1.0,
        "all_gather_single": ranks - 1.0,
        "reduce_scatter_tensor": (ranks - 1) / ranks,
        "reduce_scatter_single": (ranks - 1) / ranks,
        "all_reduce": 2 * (ranks - 1) / ranks,
    }
    with contextlib.ExitStack() as stack:
        for name, factor in share.items():
            original = getattr(dist, name, None)
            if original is None:  # the names of FSDP2's collectives differ between versions of torch
                continue

            def call(*args: Any, original: Any = original, factor: float = factor, **kwargs: Any) -> Any:
                arguments = inspect.signature(original).bind(*args, **kwargs).arguments
                sent.append(arguments[next(key for key in _INPUT_NAMES if key in arguments)].nbytes * factor)
                return original(*args, **kwargs)

            stack.enter_context(mock.patch.object(dist, name, call))
        yield sent


@contextlib.contextmanager
def _casts_of_gathers() -> Iterator[list[int]]:
    """Yields a list of one number: the casts of gathered weights inside this context."""
    from mxcompile.distributed.tensors import TileCast

    count, original = [0], TileCast.__call__

    def call(self: TileCast, x: Tensor) -> Any:
        count[0] += 1
        return original(self, x)

    with mock.patch.object(TileCast, "__call__", call):
        yield count


def torchao_casts(model: nn.Module, batches: list[Tensor]) -> int:
    """Returns the number of torchao's casts in one step, counted in an eager run."""
    from torchao.prototype.mx_formats.mx_tensor import MXTensor

    count, original = [0], MXTensor.to_mx

    def call(*args: Any, **kwargs: Any) -> Any:
        count[0] += 1
        return original(*args, **kwargs)

    quantized = common.torchao_model(model, emulated=True)
    with mock.patch.object(MXTensor, "to_mx", staticmethod(call)):
        quantized(input_ids=batches[0], labels=batches[0]).loss.backward()
    return count[0] * len(batches)


if __name__ == "__main__":
    main()
