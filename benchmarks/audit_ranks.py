"""Compares an audit's ranking of layers with the measured effect of quantizing each layer alone.

    output    estimated change of the model's output by the layer's forward GEMM, from one audit of all layers
    harm      FLOPs × error² of the layer's forward GEMMs
    effect    effect of quantizing this layer alone: for gemma the mean KL divergence of the next token's
              distribution, for minilm the mean squared error of its unit embeddings
    ranks     Spearman's correlation of `output` and of `harm` with the effect, over all layers
    whole     the effect of all layers together; the sum and the largest of the effects of single layers
              follow as shares of it

A model without its package is left out with one line (see `pretrained_models.py`).

Usage: python benchmarks/audit_ranks.py [gemma] [minilm] [--policy nvidia] [--tokens 256] [--positions 64]
                                        [--dry]
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import common
import pretrained_models as models
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

from mxcompile.analysis.audit import audit
from mxcompile.analysis.study.interpreter import Run
from mxcompile.analysis.study.session import Session
from mxcompile.cli.arguments import quiet
from mxcompile.policy import Gemm
from mxcompile.report import GemmNumerics


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """A model, its inputs, its loss, and the distance between a reference output and another output."""

    model: nn.Module
    inputs: dict[str, Any]
    loss: Callable[[Any], Tensor]
    distance: Callable[[Tensor, Tensor], float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=[], help=f"of {', '.join(models.PACKAGES)}; default all")
    parser.add_argument("--policy", default="nvidia")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument(
        "--positions", type=int, default=64, help="of gemma's tokens, those that are predicted"
    )
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    for name in models.chosen(parser, options.models):
        torch.manual_seed(0)
        with quiet():
            case = gemma(options.tokens, options.positions) if name == "gemma" else minilm()
            layers, whole = measured(case, options.policy, name)
        common.show(sorted(layers, key=lambda layer: layer["effect"], reverse=True)[:20])
        shares = {**correlations(layers), **parts_of(whole, layers)}
        row = {"model": name, "policy": options.policy, "layers": len(layers), **shares}
        common.show([row])
        if not options.dry:
            common.write("audit_ranks", [row])


def gemma(tokens: int, positions: int) -> Case:
    """Returns Gemma on a window of text. Its loss covers `positions` evenly spaced next-token predictions."""
    model, tokenizer = models.gemma()
    window = models.windows(tokenizer, 1, tokens)
    kept = torch.arange(1, positions + 1) * (tokens - 1) // positions - 1
    labels = window[0, kept + 1]

    def divergence(reference: Tensor, output: Tensor) -> float:
        p, q = (logits.float().log_softmax(-1) for logits in (reference, output))
        return float((p.exp() * (p - q)).sum(-1).double().mean())

    return Case(
        model=model.requires_grad_(True),
        inputs={"input_ids": window, "use_cache": False, "logits_to_keep": kept},
        loss=lambda output: F.cross_entropy(output.logits[0].float(), labels),
        distance=divergence,
    )


def minilm() -> Case:
    """Returns MiniLM on questions and passages. Its loss classifies the passage of a question among all."""
    model, tokenizer = models.minilm()
    questions, passages = zip(*models.sentence_pairs(), strict=True)
    inputs = dict(tokenizer([*questions, *passages], padding=True, return_tensors="pt"))
    mask = inputs["attention_mask"][..., None].float()

    def embedded(hidden: Tensor) -> Tensor:
        return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)

    def loss(output: Any) -> Tensor:
        vectors, answers = embedded(output.last_hidden_state).chunk(2)
        return F.cross_entropy(vectors @ answers.T * 20, torch.arange(len(vectors)))

    def distance(reference: Tensor, output: Tensor) -> float:
        return float((embedded(reference) - embedded(output)).double().square().sum(-1).mean())

    return Case(model=model.requires_grad_(True), inputs=inputs, loss=loss, distance=distance)


def measured(case: Case, policy: str, name: str) -> tuple[list[dict[str, Any]], float]:
    """Returns a row per layer with its audit and its effect alone, and the effect of all layers together."""
    result = audit(case.model, policy=policy, loss_fn=case.loss, kwargs=case.inputs)
    by_layer: dict[str, list[GemmNumerics]] = {}
    for gemm in result.numerics.gemms:
        if gemm.gemm == Gemm.FPROP:
            by_layer.setdefault(gemm.name, []).append(gemm)
    rows = []
    with torch.no_grad():
        session = Session(case.model, (), case.inputs, policy=policy)
        reference = session.run(Run(quantized=lambda _: False)).logits
        together = session.run(Run(quantized=lambda key: key[0] in by_layer)).logits
        for layer, gemms in tqdm(by_layer.items(), desc=f"{name}: layers alone", leave=False):
            alone = session.run(Run(quantized=lambda key, layer=layer: key[0] == layer)).logits
            flops = sum(gemm.flops for gemm in gemms)
            squares = sum(gemm.flops * gemm.rel_error**2 for gemm in gemms)
            rows.append(
                {
                    "layer": layer,
                    "effect": case.distance(reference, alone),
                    "output": math.sqrt(sum((gemm.output_change or 0.0) ** 2 for gemm in gemms)),
                    "harm": sum(gemm.harm for gemm in gemms),
                    "error": math.sqrt(squares / flops),
                }
            )
    return rows, case.distance(reference, together)


def parts_of(whole: float, layers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns the effect of all layers together, and the sum and largest of single effects as its shares."""
    effects = [layer["effect"] for layer in layers]
    shares = {"sum_of_whole": sum(effects) / whole, "largest_of_whole": max(effects) / whole}
    return {"whole": whole, **{key: round(share, 3) for key, share in shares.items()}}


def correlations(layers: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Returns Spearman's correlation of each ranking with the effects, and the overlap of the first ten."""
    effects = [layer["effect"] for layer in layers]
    ranks: dict[str, float] = {}
    for key in ("output", "harm", "error"):
        ranks[f"ranks_{key}"] = round(spearman([layer[key] for layer in layers], effects), 3)
    first = min(10, len(layers))
    by_effect, by_output = (
        {layer["layer"] for layer in sorted(layers, key=lambda row: row[key], reverse=True)[:first]}
        for key in ("effect", "output")
    )
    return {**ranks, "of_first_ten": len(by_effect & by_output)}


def spearman(a: Sequence[float], b: Sequence[float]) -> float:
    """Returns the correlation of the ranks of two lists without equal values."""
    ranks = [torch.tensor(values, dtype=torch.float64).argsort().argsort().double() for values in (a, b)]
    return float(torch.corrcoef(torch.stack(ranks))[0, 1])


if __name__ == "__main__":
    main()
