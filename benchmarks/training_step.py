"""Times a training step on this machine: MXFP8, MXINT8, Inductor, torchao.

MXFP8 is timed with ``saved: mxfp8`` and with ``backward: dequantized`` too.

All variants train copies of one Llama on the same tokens: forward and backward, without the optimizer, which
is the same for all. They alternate in one process. A row has the time, the bytes of parameters, and the bytes
that autograd saves, each storage once, without inputs and parameters.

On a CPU that multiplies BF16 slowly the model is also trained in FP32, by Inductor and in MXFP8.

Usage: python benchmarks/training_step.py [--repeats 15] [--no-torchao] [--models …]
"""

from __future__ import annotations

import argparse
import copy
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import common
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from mxcompile.lowering.cpu.features import features

MODELS = {
    "llama 2×256": {"layers": 2, "width": 256, "feed_forward": 704, "vocabulary": 1024},
    "llama 2×512": {"layers": 2, "width": 512, "feed_forward": 1408, "vocabulary": 4096},
    "llama 4×1024": {"layers": 4, "width": 1024, "feed_forward": 2816, "vocabulary": 8192},
}
BATCH, LENGTH = 4, 256
BASELINE, FP32 = "bf16 inductor", "fp32 inductor"
MXINT8 = "mxcompile mxint8"
_ROLES = ["qkv", "ffn_in", "ffn_out"]
RULES: dict[str, dict[str, Any]] = {
    "saved: mxfp8": {"match": {"role": _ROLES}, "use": {"saved": "mxfp8"}},
    "saved: mxfp8, with attention": {"match": {"role": [*_ROLES, "attn_out"]}, "use": {"saved": "mxfp8"}},
    "backward: dequantized": {"match": {"name": "*"}, "use": {"backward": "dequantized"}},
}
"""Rules of MXFP8's further ways."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--no-torchao", action="store_true", help="leave out the slowest of all")
    parser.add_argument("--models", nargs="*", choices=MODELS, default=list(MODELS)[1:])
    parser.add_argument("--length", type=int, default=LENGTH, help="tokens of a sequence")
    options = parser.parse_args()
    torch._dynamo.config.recompile_limit = 64  # the variants of all models share the code of one decorator
    rows: list[dict[str, Any]] = []
    for name in options.models:
        rows += measure(name, options.repeats, options.length, with_torchao=not options.no_torchao)
    common.show([{k: v for k, v in row.items() if k != "times_ms"} for row in rows])
    common.write("training_step", rows)


def measure(name: str, repeats: int, length: int, *, with_torchao: bool) -> list[dict[str, Any]]:
    """Returns a row for each way of training the model `name`."""
    model = common.llama(**MODELS[name])
    tokens = torch.randint(MODELS[name]["vocabulary"], (BATCH, length))
    models: dict[str, nn.Module] = {BASELINE: torch.compile(copy.deepcopy(model))}
    for way in ("mxcompile mxfp8", *RULES):
        options = {"policy": {"version": 1, "rules": [RULES[way]] if way in RULES else []}}
        models[way] = torch.compile(copy.deepcopy(model), backend="mxfp8", options=options)
    models[MXINT8] = torch.compile(copy.deepcopy(model), backend="mxfp8", options={"policy": "mxint8"})
    if torch.bfloat16 in features().slow_dtypes:
        models[FP32] = torch.compile(copy.deepcopy(model).float())
        for way, policy in (("mxcompile mxfp8", "nvidia"), (MXINT8, "mxint8")):
            model_fp32 = copy.deepcopy(model).float()
            options = {"policy": policy}
            models[f"{way}, fp32 model"] = torch.compile(model_fp32, backend="mxfp8", options=options)
    if with_torchao:
        models["torchao mxfp8 (emulated)"] = torch.compile(common.torchao_model(model, emulated=True))
    runs = {way: step(way_model, tokens) for way, way_model in models.items()}
    times = common.alternate(runs, repeats=repeats)
    in_fp32 = {
        way: {"ratio_to_fp32": round(common.median_ratio(times, way, FP32), 3)}
        for way in times
        if FP32 in times
    }
    saved = {way: saved_bytes(way_model, tokens) for way, way_model in models.items()}
    return [
        {
            "model": name,
            "batch": f"{BATCH}×{length}",
            "run": way,
            "median_ms": round(statistics.median(taken), 2),
            "ratio_to_bf16": round(common.median_ratio(times, way, BASELINE), 3),
            **in_fp32.get(way, {}),
            "saved_bytes": saved[way],
            "saved_to_bf16": round(saved[way] / saved[BASELINE], 3),
            "parameter_bytes": sum(p.numel() * p.element_size() for p in models[way].parameters()),
            "times_ms": [round(t, 2) for t in taken],
        }
        for way, taken in times.items()
    ]


def step(model: Any, tokens: Tensor) -> Callable[[], None]:
    """Returns a function that runs forward and backward of `model` on `tokens`."""

    def run() -> None:
        model.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens).loss.backward()

    return run


def plain(tensor: Any) -> Iterator[Tensor]:
    """Yields `tensor`, or the tensors inside it if it is a wrapper subclass such as torchao's."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from plain(getattr(tensor, name))


def saved_bytes(model: Any, tokens: Tensor) -> int:
    """Returns the bytes that a forward of `model` saves for backward, each storage once."""
    inputs = {t.untyped_storage().data_ptr() for value in [tokens, *model.parameters()] for t in plain(value)}
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storages = (part.untyped_storage() for part in plain(tensor))
        kept.update({storage.data_ptr(): storage.nbytes() for storage in storages})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = model(input_ids=tokens, labels=tokens).loss
    loss.backward()
    return sum(size for address, size in kept.items() if address not in inputs)


if __name__ == "__main__":
    main()
