"""Fine-tuning of Gemma 3 270M on text it has not seen, in MXFP8 and MXINT8 beside FP32.

All ways train from the same weights on the same windows of this project's documentation, in a random order
per seed. Matrices of the blocks are quantized; embedding and head stay in FP32.

    loss            loss on held-out windows in nats after the last step; before: before the first step
    over_fp32       loss minus FP32's loss with the same seed; ±: its standard error over the seeds
    cosine          cosine of the first step's gradients with FP32's, by matrix: mean and least
    saved_mb        tensors that autograd saves in one forward, each storage once, without parameters
    processor_s     median processor time of a step

LoRA trains two matrices of rank 16 for every matrix of the blocks. `pretrained_models.py` lists the required
packages; LoRA also needs peft.
Usage: python benchmarks/pretrained_training.py [--tune full lora] [--ways …] [--steps 200] [--seeds 2]
                                                [--batch 1] [--length 128] [--dry]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import common
import pretrained_models as models
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import mxcompile
from mxcompile.cli.arguments import quiet

BASELINE = "fp32"
WAYS: dict[str, tuple[str, dict[str, Any]] | None] = {
    BASELINE: None,
    "mxfp8 (preset nvidia)": ("nvidia", {}),
    "mxfp8 floor (preset ocp)": ("nvidia", {"rounding": "floor"}),
    "saved: mxfp8": ("nvidia", {"saved": "mxfp8"}),
    "grad_rounding: stochastic": ("nvidia", {"grad_rounding": "stochastic"}),
    "mxint8 (preset mxint8)": ("mxint8", {}),
    "mxint8, E4M3 gradients": ("mxint8", {"precision": "mxint8", "grad_dtype": "e4m3"}),
}
"""(preset, keys of a rule for the matrices of the blocks), by name; None is Inductor alone."""
ROLES = ["qkv", "attn_out", "ffn_in", "ffn_out"]
LEARNING_RATE = {"full": 1e-5, "lora": 2e-4}
RANK = 16
HELD_OUT = 16
"""Number of held-out windows."""


@dataclass(kw_only=True, slots=True)
class Results:
    """Results of one way: the final loss of each seed, and figures that all seeds share."""

    before: float = 0.0
    losses: list[float] = field(default_factory=list)
    gradients: dict[str, Tensor] = field(default_factory=dict)
    saved: int = 0
    seconds: list[float] = field(default_factory=list)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--tune", nargs="*", choices=LEARNING_RATE, default=list(LEARNING_RATE))
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    options = sized(parser)
    windows = text(models.gemma_tokenizer(), options.length)
    for tune in options.tune:
        rows: list[dict[str, Any]] = []
        baseline = Results()
        for way in dict.fromkeys([BASELINE, *options.ways]):
            with quiet():
                results = trained(way, tune, windows, options)
            baseline = results if way == BASELINE else baseline
            about = {"model": "gemma 3 270m", "tune": tune, "way": way, "text": models.fingerprint(windows)}
            sizes = {"steps": options.steps, "batch": f"{options.batch}×{options.length}"}
            rows.append({**about, **sizes, **summary(results, baseline)})
            if not options.dry:
                common.write("pretrained_training", rows[-1:])
        common.show(rows)


def sized(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Returns the parsed arguments with the sizes of a training. Exits if Gemma or a package is missing."""
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--batch", type=int, default=1, help="windows of a step")
    parser.add_argument("--length", type=int, default=128, help="tokens of a window")
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    if lack := models.missing("gemma"):
        parser.exit(message=f"{lack}\n")
    return options


def text(tokenizer: Any, length: int) -> Tensor:
    """Returns all windows of this project's documentation, int64 [windows, length]."""
    pages = sorted((common.ROOT / "docs").glob("*.md"))
    prose = "\n\n".join(page.read_text(encoding="utf-8") for page in pages)
    tokens = torch.tensor(tokenizer(prose).input_ids[1:])
    count = len(tokens) // (length - 1)
    windows = tokens[: count * (length - 1)].view(count, length - 1)
    return torch.cat([torch.full((count, 1), tokenizer.bos_token_id), windows], 1)


def parted(windows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the held-out windows, evenly spread, and the windows to train on."""
    spread = torch.linspace(0, len(windows) - 1, HELD_OUT).long()
    return windows[spread], windows[~torch.isin(torch.arange(len(windows)), spread)]


def trained(way: str, tune: str, windows: Tensor, options: argparse.Namespace) -> Results:
    """Trains from the pretrained weights once for each seed."""
    torch._dynamo.reset()
    model = loaded(tune)
    preset, use = WAYS[way] or ("bf16", {})
    rules = [{"match": {"role": ROLES}, "use": use}] if use else []
    policy: Any = {"version": 1, "preset": preset, "rules": rules}
    call: Any = torch.compile(model) if way == BASELINE else mxcompile.compile(model, policy=policy)
    held_out, rest = parted(windows)
    parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
    first = {name: p.detach().clone() for name, p in parameters.items()}
    results = Results(before=evaluated(call, held_out, options.batch))
    for seed in range(options.seeds):
        for name, parameter in parameters.items():
            parameter.data.copy_(first[name])
        torch.manual_seed(seed)
        optimizer = torch.optim.AdamW(parameters.values(), lr=LEARNING_RATE[tune], fused=True)
        order = torch.randperm(len(rest))[: options.steps * options.batch].view(options.steps, options.batch)
        for step, chosen in enumerate(tqdm(order, desc=f"{tune}, {way}, seed {seed}", leave=False)):
            start = time.process_time()
            loss = loss_of(call, rest[chosen])
            loss.backward()
            if seed == step == 0:
                matrices = dict(matrices_of(parameters))
                results.gradients = {n: p.grad.clone() for n, p in matrices.items() if p.grad is not None}
            torch.nn.utils.clip_grad_norm_(parameters.values(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            results.seconds.append(time.process_time() - start)
        results.losses.append(evaluated(call, held_out, options.batch))
    results.saved = common.saved_bytes(lambda: loss_of(call, rest[: options.batch]), model.parameters())
    return results


def loaded(tune: str) -> nn.Module:
    """Returns the pretrained model in training mode, with adapters for LoRA."""
    model, _ = models.gemma()
    model.train().requires_grad_(tune == "full")
    if tune == "full":
        return model
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(0)
    names = sorted({name.rpartition(".")[2] for name, _ in models.block_linears(model)})
    adapted: nn.Module = get_peft_model(model, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=names))
    return adapted


def loss_of(call: Any, tokens: Tensor) -> Tensor:
    """Returns the mean loss of the next token."""
    loss: Tensor = call(input_ids=tokens, labels=tokens, use_cache=False).loss
    return loss


def evaluated(call: Any, windows: Tensor, batch: int) -> float:
    """Returns the mean loss of `windows`."""
    with torch.no_grad():
        return statistics.mean(float(loss_of(call, part)) for part in windows.split(batch))


def matrices_of(parameters: dict[str, nn.Parameter]) -> Iterator[tuple[str, nn.Parameter]]:
    """Yields the trained matrices of the blocks."""
    return ((name, p) for name, p in parameters.items() if p.ndim == 2 and ".layers." in name)


def with_error(values: Sequence[float]) -> tuple[float, float]:
    """Returns the mean of `values`, and its standard error."""
    error = statistics.stdev(values) / len(values) ** 0.5 if len(values) > 1 else 0.0
    return round(statistics.mean(values), 4), round(error, 4)


def summary(results: Results, baseline: Results) -> dict[str, Any]:
    """Returns the figures of a row."""
    gaps = [loss - right for loss, right in zip(results.losses, baseline.losses, strict=True)]
    pairs = ((gradient, baseline.gradients[name]) for name, gradient in results.gradients.items())
    cosines = [
        float(F.cosine_similarity(measured.ravel().double(), right.ravel().double(), 0))
        for measured, right in pairs
        if right.any()
    ]
    return {
        "before": round(results.before, 4),
        "loss": [round(loss, 4) for loss in results.losses],
        "over_fp32": with_error(gaps),
        "cosine": round(statistics.mean(cosines), 4),
        "cosine_least": round(min(cosines), 4),
        "saved_mb": round(results.saved / 1e6, 1),
        "processor_s": round(statistics.median(results.seconds), 2),
    }


if __name__ == "__main__":
    main()
