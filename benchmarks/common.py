"""Code that benchmarks share: models, alternating timing, result lines and tables."""

from __future__ import annotations

import copy
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from tabulate import tabulate
from torch import nn
from tqdm import tqdm

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
sys.path += [str(ROOT), str(ROOT / "examples")]  # for an uninstalled checkout, and for the package `demo`


def llama(*, layers: int, width: int, feed_forward: int, vocabulary: int, heads: int = 8) -> nn.Module:
    """Returns a Llama of these sizes with BF16 weights, initialized from seed 0."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=heads,
        use_cache=False,
    )
    return LlamaForCausalLM(config).bfloat16()


def torchao_model(model: nn.Module, *, emulated: bool) -> nn.Module:
    """Returns a copy with all linear layers except the head in torchao's MXFP8. Raises ImportError."""
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig, MXFP8TrainingRecipe
    from torchao.quantization import quantize_

    copied = copy.deepcopy(model)
    recipe = MXFP8TrainingRecipe.MXFP8_EMULATED_RCEIL if emulated else MXFP8TrainingRecipe.MXFP8_RCEIL
    config = MXFP8TrainingOpConfig.from_recipe(recipe)
    quantize_(copied, config, filter_fn=lambda m, name: isinstance(m, nn.Linear) and "head" not in name)
    return copied


def transformer_engine_linear(layer: nn.Linear, *, native: bool) -> nn.Module:
    """Returns Transformer Engine's layer with the sizes of `layer`: MXFP8 if `native`, else FP8 by tensor.

    Raises ImportError without Transformer Engine.
    """
    import transformer_engine.pytorch as te
    from transformer_engine.common import recipe

    chosen = recipe.MXFP8BlockScaling() if native else recipe.Float8CurrentScaling()

    class Linear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            sizes = layer.in_features, layer.out_features
            self.layer = te.Linear(*sizes, bias=layer.bias is not None, params_dtype=layer.weight.dtype)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with te.fp8_autocast(enabled=True, fp8_recipe=chosen):
                out: torch.Tensor = self.layer(x)
            return out

    return Linear().to(layer.weight.device)


def alternate(
    runs: Mapping[str, Callable[[], Any]],
    *,
    repeats: int,
    warmup: int = 2,
    clock: Callable[[], float] = time.perf_counter,
) -> dict[str, list[float]]:
    """Returns the times of each run in ms. Runs take turns, so that noise of the machine affects all of them.

    clock: returns seconds; `time.process_time` excludes the time of other programs.
    """
    times: dict[str, list[float]] = {name: [] for name in runs}
    for run in runs.values():
        for _ in range(warmup):
            run()
    for _ in tqdm(range(repeats), desc="repeats", leave=False):
        for name, run in runs.items():
            start = clock()
            run()
            times[name].append((clock() - start) * 1e3)
    return times


def median_ratio(times: Mapping[str, Sequence[float]], name: str, baseline: str) -> float:
    """Returns the median over the rounds of the time of `name` ÷ the time of `baseline` in the same round."""
    return statistics.median(a / b for a, b in zip(times[name], times[baseline], strict=True))


def saved_bytes(forward: Callable[[], torch.Tensor], inputs: Iterable[torch.Tensor]) -> int:
    """Returns the bytes that autograd saves in `forward`, each storage once, without storages of `inputs`.

    Also runs backward from its result.
    """
    kept: dict[int, torch.UntypedStorage] = {}
    excluded = {tensor.untyped_storage().data_ptr() for tensor in inputs}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in excluded:
            kept[storage._cdata] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        loss = forward()
    total = sum(storage.nbytes() for storage in kept.values())
    loss.backward()
    return total


def environment() -> dict[str, Any]:
    """Returns device, class of CPU, versions and commit, for the row of a measurement."""
    from mxcompile.lowering.cpu.features import features

    versions = {name: _version(name) for name in ("mxcompile", "torch", "triton", "torchao", "transformers")}
    return {
        "device": _cpu_name(),
        "cpu": features().name + (", masked" if "ATEN_CPU_CAPABILITY" in os.environ else ""),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        **versions,
        "commit": _commit(),
        "date": time.strftime("%Y-%m-%d"),
    }


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _commit() -> str:
    """Returns the commit of the checkout; "" without git or outside a checkout."""
    command = ["git", "-C", str(ROOT), "rev-parse", "--short", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    except OSError:
        return ""


def folder() -> Path:
    """Returns the folder for result rows: ``$OUT`` if it is set, else ``results``."""
    path = Path(os.environ.get("OUT") or RESULTS)
    path.mkdir(parents=True, exist_ok=True)
    return path


def write(name: str, rows: Iterable[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    """Appends each of `rows`, with the environment, to ``{name}.jsonl`` as soon as it is computed.

    Returns the rows. A killed run loses only the row in progress.
    """
    surroundings, written = environment(), []
    path = folder() / f"{name}.jsonl"
    with path.open("a", encoding="utf-8") as file:
        for row in rows:
            file.write(json.dumps({"benchmark": name, **row, **surroundings}) + "\n")
            file.flush()
            written.append(row)
    print(f"\nappended to {path}")
    return written


def read(name: str) -> list[dict[str, Any]]:
    """Returns the rows of ``results/{name}.jsonl``, oldest first; an empty list if there is no such file."""
    path = RESULTS / f"{name}.jsonl"
    return (
        [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()] if path.exists() else []
    )


def show(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints `rows` as a Markdown table."""
    print(tabulate(rows, headers="keys", tablefmt="github", disable_numparse=True))
