"""Quality of pretrained models: every preset and precision beside torchao and llama.cpp, against FP32.

    gemma     perplexity on real text; KL divergence of the next token's distribution from FP32's (mean, 99th
              percentile, worst); how often the likeliest token is the same
    minilm    cosine between embeddings and FP32's; Spearman's correlation of the order in which a question
              ranks all passages; how often the right passage comes first

The head and the embedding stay in FP32. Errors are standard deviations over bootstrap resamples of windows of
text or of sentences. All ways get the same tokens. `pretrained_models.py` lists the required packages. A
model without its package is omitted with one line, a way that this machine cannot run with its reason.

Usage: python benchmarks/pretrained.py [gemma] [minilm] [--ways GLOB …] [--windows 16] [--length 256] [--dry]
"""

from __future__ import annotations

import argparse
import fnmatch
import math
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import common
import pretrained_models as models
import torch
from pretrained_ways import Way, all_ways
from torch import Tensor, nn
from torch.nn import functional as F
from tqdm import tqdm

import mxcompile
from mxcompile.cli.arguments import quiet

BASELINE = Way(label="fp32", library="torch", quantized="", prepare=lambda model: model)
RESAMPLES = 1000


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("models", nargs="*", default=[], help=f"of {', '.join(models.PACKAGES)}; default all")
    parser.add_argument("--ways", nargs="*", help="globs of LIBRARY/LABEL/WHAT; default all")
    parser.add_argument("--windows", type=int, default=16)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--dry", action="store_true", help="write no results")
    options = parser.parse_args()
    for name in models.chosen(parser, options.models):
        rows = []
        for row in measure(name, options):
            rows.append(row)
            if not options.dry:
                common.write("pretrained", [row])
        common.show([_shown(row) for row in rows])


def _shown(row: dict[str, Any]) -> dict[str, Any]:
    """Returns `row` for a table, with errors after ±."""
    rest = {key: value for key, value in row.items() if key not in ("model", "text")}
    return {key: f"{v[0]} ± {v[1]}" if isinstance(v, tuple) else v for key, v in rest.items()}


def measure(name: str, options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yields a row for each way to serve the model `name`, the baseline first."""
    wanted = [way for way in all_ways(language=name == "gemma") if _is_selected(way, options.ways)]
    with quiet(), torch.no_grad():
        score = Language(options.windows, options.length) if name == "gemma" else Encoder()
        for way in (bar := tqdm([BASELINE, *wanted], desc=name, leave=False)):
            bar.set_postfix_str(f"{way.library} {way.label}")
            torch._dynamo.reset()
            mxcompile.clear_reports()
            about = {"library": way.library, "way": way.label, "quantized": way.quantized}
            start = time.perf_counter()
            try:
                figures = score(way)
            except (AssertionError, ImportError, NotImplementedError, RuntimeError) as error:
                if way.library == "mxcompile":
                    raise
                figures = {"left_out": str(error).partition("\n")[0] or type(error).__name__}
            took = round(time.perf_counter() - start, 1)
            yield {"model": name, "text": score.text, **about, **figures, "seconds": took}


def _is_selected(way: Way, words: Sequence[str] | None) -> bool:
    name = f"{way.library}/{way.label}/{way.quantized}"
    return words is None or any(fnmatch.fnmatchcase(name, word) for word in words)


class Language:
    """Computes the figures of a causal language model."""

    def __init__(self, count: int, length: int, sources: tuple[str, ...] = models.TEXTS) -> None:
        self._model, tokenizer = models.gemma()
        self._tokens = models.windows(tokenizer, count, length, sources)
        self._logits: list[Tensor] = []  # of the FP32 model
        self._losses: Tensor | None = None
        self.text = f"{count}×{length} tokens, {models.fingerprint(self._tokens)}"

    def __call__(self, way: Way) -> dict[str, Any]:
        """Returns the figures of `way`. The first call must be for the baseline."""
        served = way.prepare(self._model)
        scores = []
        for index, window in enumerate(self._tokens):
            logits = _logits(served, window, cached=way.cached)
            if way is BASELINE:
                self._logits.append(logits)
            scores.append(_scores(logits, self._logits[index], window[1:]))
        losses, divergence, same = (torch.stack([*column]) for column in zip(*scores, strict=True))
        if self._losses is None:
            self._losses = losses
        return {
            "perplexity": round(math.exp(losses.mean()), 4),
            "over_fp32_percent": _with_error((losses - self._losses).mean(1), _growth),
            "kl_mean": _with_error(divergence.mean(1), _mean, digits=5),
            "kl_p99": round(float(divergence.flatten().quantile(0.99)), 4),
            "kl_worst": round(float(divergence.max()), 3),
            "same_top_percent": _with_error(same.mean(1), _percent),
        }


def _logits(served: Any, window: Tensor, *, cached: bool) -> Tensor:
    """Returns the FP32 logits [length - 1, vocabulary] of all tokens of `window` except the last."""
    arguments: dict[str, Any] = {"use_cache": False}
    if cached:
        arguments = {"cache": mxcompile.static_cache(served, len(window))}
    logits: Tensor = served(input_ids=window[None, :-1], **arguments).logits[0]
    return logits.float()


def _scores(logits: Tensor, expected: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, by token, the loss, the KL divergence from `expected` in nats, and top-token agreement."""
    losses, divergence, same = [], [], []
    for ours, theirs, target in zip(logits.split(64), expected.split(64), targets.split(64), strict=True):
        result, wanted = ours.log_softmax(-1), theirs.log_softmax(-1)
        losses.append(-result.gather(-1, target[:, None])[:, 0].double())
        divergence.append((wanted.exp() * (wanted - result)).sum(-1).double())
        same.append((ours.argmax(-1) == theirs.argmax(-1)).double())
    return torch.cat(losses), torch.cat(divergence), torch.cat(same)


class Encoder:
    """Computes the figures of a sentence encoder."""

    def __init__(self) -> None:
        self._model, tokenizer = models.minilm()
        pairs = models.sentence_pairs()
        sentences = [*(question for question, _ in pairs), *(passage for _, passage in pairs)]
        self._tokens = tokenizer(sentences, padding=True, return_tensors="pt")
        self._count = len(pairs)
        self._expected: Tensor | None = None  # embeddings of the FP32 model
        self.text = f"{len(pairs)} pairs, {models.fingerprint(self._tokens.input_ids)}"

    def __call__(self, way: Way) -> dict[str, Any]:
        """Returns the figures of `way`. The first call must be for the baseline."""
        vectors = embeddings(way.prepare(self._model), self._tokens)
        if self._expected is None:
            self._expected = vectors
        cosines = F.cosine_similarity(vectors, self._expected).double()
        ranks, expected = _ranks(vectors, self._count), _ranks(self._expected, self._count)
        first = (ranks.argmin(1) == torch.arange(self._count)).double()
        return {
            "cosine_mean": _with_error(cosines, _mean, digits=5),
            "cosine_worst": round(float(cosines.min()), 5),
            "rank_correlation": _with_error(_spearman(ranks, expected), _mean, digits=4),
            "right_first_percent": _with_error(first, _percent, digits=1),
        }


def embeddings(model: nn.Module, tokens: Any) -> Tensor:
    """Returns the normalized mean over the tokens of each sentence, FP32 [sentences, width]."""
    hidden = model(**tokens).last_hidden_state.float()
    mask = tokens.attention_mask[..., None].float()
    return F.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


def _ranks(vectors: Tensor, count: int) -> Tensor:
    """Returns the rank of every passage for each question, 0 for the nearest: [questions, passages]."""
    similarity = vectors[:count] @ vectors[count:].T
    return similarity.argsort(1, descending=True).argsort(1).double()


def _spearman(ranks: Tensor, others: Tensor) -> Tensor:
    """Returns the correlation of each row of `ranks` with the same row of `others`."""
    a, b = ranks - ranks.mean(1, keepdim=True), others - others.mean(1, keepdim=True)
    return (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))


def _mean(values: Tensor) -> float:
    return float(values.mean())


def _percent(values: Tensor) -> float:
    return 100 * float(values.mean())


def _growth(values: Tensor) -> float:
    """Returns the growth of the perplexity in per cent if the losses grow by `values`."""
    return 100 * math.expm1(values.mean())


def _with_error(values: Tensor, figure: Callable[[Tensor], float], digits: int = 2) -> tuple[float, float]:
    """Returns a figure of `values`, and its standard deviation over resamples of `values`."""
    generator = torch.Generator().manual_seed(0)
    drawn = torch.randint(len(values), (RESAMPLES, len(values)), generator=generator)
    spread = torch.tensor([figure(values[places]) for places in drawn], dtype=torch.float64).std()
    return round(figure(values), digits), round(float(spread), digits)


if __name__ == "__main__":
    started = time.perf_counter()
    main()
    print(f"took {time.perf_counter() - started:.0f} s")
