"""Quantization-aware training (QAT) of Gemma 3 270M beside post-training quantization: mxcompile and torchao.

All trainings start from the same weights and read the same windows of this project's documentation, in a
random order per seed. Models are in BF16; AdamW updates FP32 copies of the weights. Matrices and norms of the
blocks are trained; embedding and head stay as they are, and are not quantized.

    trained      library and format of forward in training; in BF16 and served in another: post-training
    served       library and format of the measured model: weights stored, activations cast
    before       held-out loss of the served model in nats, before the first step
    loss         the same after the last step, for each seed
    over_bf16    loss minus the loss of training and serving in BF16 with the same seed: mean, standard error
    processor_s  median processor time of a training step

torchao trains the layers of `QATConfig(base_config)`, and its step "convert" makes the served model. A format
that torchao cannot run on this machine has the reason in its row. Each row is written when it is complete.
`pretrained_models.py` lists the required packages.
Usage: python benchmarks/qat.py [--formats "mxcompile mxfp4" …] [--steps 200] [--seeds 2] [--batch 1]
                                [--length 128] [--dry]
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import common
import pretrained_models as models
import pretrained_training as training
import pretrained_ways as ways
import torch
from torch import Tensor, nn
from tqdm import tqdm

import mxcompile
from mxcompile.cli.arguments import quiet

BASELINE = "bf16"
FP4 = torch.float4_e2m1fn_x2
INT4: Any = vars(torch)["int4"]  # PyTorch's types leave it out


@dataclass(frozen=True, kw_only=True, slots=True)
class Form:
    """A format of a library. Both functions return a module that shares the parameters of their argument.

    compiled: prepares for training. served: quantizes the weights. Both compile where Inductor can.
    """

    compiled: Callable[[nn.Module], Any]
    served: Callable[[nn.Module], Any]


def in_blocks(model: nn.Module) -> nn.Module:
    """Returns a copy of `model` whose blocks are compiled by Inductor."""
    copied: Any = ways.sharing(model)
    for block in copied.model.layers:
        block.compile()
    return copied


def by_mxcompile(precision: str) -> Form:
    """Returns the form that trains and serves under one policy."""
    policy = ways.use(precision=precision, backward="dequantized")

    def served(model: nn.Module) -> nn.Module:
        stored = ways.sharing(model)
        mxcompile.quantize_weights_(stored, policy, progress=False)
        return mxcompile.compile(stored, policy=policy)

    return Form(compiled=ways.under(policy), served=served)


def by_torchao(name: str, **options: Any) -> Form:
    """Returns the form of torchao's `QATConfig` with the configuration `name`."""
    called = ways.sharing if name.startswith("MX") else in_blocks  # Inductor's C++ has no type for E8M0

    def stepped(model: nn.Module, step: str) -> nn.Module:
        from torchao.quantization.qat import QATConfig

        return ways.quantized(model, QATConfig(ways.torchao_config(name, **options), step=step))

    def served(model: nn.Module) -> nn.Module:
        return called(stepped(stepped(model, "prepare"), "convert"))

    return Form(compiled=lambda model: called(stepped(model, "prepare")), served=served)


FORMS = {
    BASELINE: Form(compiled=in_blocks, served=in_blocks),
    **{f"mxcompile {name}": by_mxcompile(name) for name in ("mxfp4", "nvfp4", "mxfp8", "mxint8")},
    "torchao mxfp4": by_torchao("MXDynamicActivationMXWeightConfig", activation_dtype=FP4, weight_dtype=FP4),
    "torchao int8 × int4": by_torchao("Int8DynamicActivationIntxWeightConfig", weight_dtype=INT4),
    "torchao nvfp4": by_torchao("NVFP4DynamicActivationNVFP4WeightConfig", use_triton_kernel=False),
    "torchao mxfp8": by_torchao("MXDynamicActivationMXWeightConfig"),
}
"""Forms by library and format. `int8 × int4`: activations by token, weights in groups of 32."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--formats", nargs="*", choices=[*FORMS][1:], default=[*FORMS][1:])
    options = training.sized(parser)
    rows = []
    with quiet():
        for row in measure(training.text(models.gemma_tokenizer(), options.length), options):
            rows.append(row)
            if not options.dry:
                common.write("qat", [row])
    common.show(rows)


def measure(windows: Tensor, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each pair of training and serving: BF16 in all formats, then each format in itself."""
    tuning = Tuning(windows, options)
    before: dict[str, float] = {}
    baseline: list[float] = []
    sizes = {"steps": options.steps, "batch": f"{options.batch}×{options.length}"}
    about = {"model": "gemma 3 270m", "text": models.fingerprint(windows), **sizes}
    for name, served in {BASELINE: [BASELINE, *options.formats], **{n: [n] for n in options.formats}}.items():
        try:
            weights, seconds = tuning.trained(FORMS[name])
        except (AssertionError, NotImplementedError, RuntimeError) as error:
            yield {**about, "trained": name, "served": name, **_left_out(name, error)}
            continue
        for form in served:
            row = {**about, "trained": name, "served": form}
            try:
                first = [] if form in before else [tuning.first]
                losses = tuning.losses(FORMS[form], [*first, *weights])
            except (AssertionError, NotImplementedError, RuntimeError) as error:
                yield {**row, **_left_out(form, error)}
                continue
            if first:
                before[form] = losses.pop(0)
            baseline = baseline or losses
            gaps = [loss - right for loss, right in zip(losses, baseline, strict=True)]
            yield {
                **row,
                "before": round(before[form], 4),
                "loss": [round(loss, 4) for loss in losses],
                "over_bf16": training.with_error(gaps),
                "processor_s": round(seconds, 2),
            }


def _left_out(name: str, error: Exception) -> dict[str, str]:
    """Returns the figures of a format that this machine cannot run. Raises `error` for other libraries."""
    if not name.startswith("torchao"):
        raise error
    return {"left_out": str(error).partition("\n")[0] or type(error).__name__}


class Tuning:
    """The model, its FP32 weights before training, and the windows."""

    def __init__(self, windows: Tensor, options: argparse.Namespace) -> None:
        model: Any = training.loaded("full")
        self._model, self._options = model, options
        self._held_out, self._rest = training.parted(windows)
        model.get_input_embeddings().requires_grad_(False)
        self._parameters = [p for p in self._model.parameters() if p.requires_grad]
        self.first = [p.detach().clone() for p in self._parameters]
        for parameter in self._model.parameters():  # buffers stay in FP32: rotary frequencies need it
            parameter.data = parameter.data.bfloat16()

    def trained(self, form: Form) -> tuple[list[list[Tensor]], float]:
        """Trains once for each seed. Returns the weights of each, and the median time of a step."""
        torch._dynamo.reset()
        call, seconds, weights = form.compiled(self._model), [], []
        for seed in range(self._options.seeds):
            torch._foreach_copy_([p.data for p in self._parameters], self.first)
            seconds += self._steps(call, seed)
            weights.append([p.detach().clone() for p in self._parameters])
        return weights, statistics.median(seconds)

    def _steps(self, call: Any, seed: int) -> list[float]:
        """Trains the current weights for one seed. Returns the processor time of each step."""
        steps, batch = self._options.steps, self._options.batch
        masters = [values.clone().requires_grad_() for values in self.first]
        optimizer = torch.optim.AdamW(masters, lr=training.LEARNING_RATE["full"], fused=True)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(len(self._rest), generator=generator)[: steps * batch].view(steps, batch)
        seconds = []
        for chosen in tqdm(order, desc=f"seed {seed}", leave=False):
            start = time.process_time()
            training.loss_of(call, self._rest[chosen]).backward()
            for master, parameter in zip(masters, self._parameters, strict=True):
                assert parameter.grad is not None
                master.grad, parameter.grad = parameter.grad.float(), None
            torch.nn.utils.clip_grad_norm_(masters, 1.0)
            optimizer.step()
            torch._foreach_copy_([p.data for p in self._parameters], [m.data for m in masters])
            seconds.append(time.process_time() - start)
        return seconds

    def losses(self, form: Form, weights: list[list[Tensor]]) -> list[float]:
        """Returns the held-out loss of the served model with each of `weights`."""
        torch._dynamo.reset()
        mxcompile.clear_reports()
        losses = []
        for values in weights:
            torch._foreach_copy_([p.data for p in self._parameters], values)
            losses.append(training.evaluated(form.served(self._model), self._held_out, self._options.batch))
        return losses


if __name__ == "__main__":
    main()
