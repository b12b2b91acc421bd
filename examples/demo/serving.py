"""The demonstration of serving: the plain model, weights stored in MXFP8, and also MXFP8 activations.

    quality    a small Llama trained on text: perplexity per byte on held-out text, e^(mean loss), and the
               distance of its logits from the logits of the first way, ‖l − l_first‖ / ‖l_first‖
    speed      blocks with the width of a large model and random weights: a prompt, then single tokens, by
               Hugging Face's `generate` with a static cache

Two models are necessary. A model that trains in a minute fits in CPU caches, so the bytes of its weights do
not affect its speed. The speed of a wide model does not depend on the values of its weights.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from demo.training import BASELINES, VOCABULARY, Settings, Text, Trainee, batches
from mxcompile.errors import OptionError
from mxcompile.report import Report, clear_reports, reports
from mxcompile.serving import quantize_weights_, static_cache
from mxcompile.storage import MXTensor

_WINDOWS = 8
"""Number of windows of text in a batch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to serve a model.

    backend, options: arguments of ``torch.compile``. prepare: changes the weights of the model before the
    compile. cached: whether keys and values are stored in MXFP8.
    """

    label: str
    backend: str = "inductor"
    options: dict[str, Any] | None = None
    prepare: Callable[[nn.Module], object] | None = None
    cached: bool = False


def _store(model: nn.Module) -> None:
    if not any(isinstance(parameter, MXTensor) for parameter in model.parameters()):
        quantize_weights_(model, progress=False)


STORED = (
    Way(label="stored weights", backend="mxfp8", options={"policy": "bf16"}, prepare=_store),
    Way(
        label="stored weights, mxfp8 activations",
        backend="mxfp8",
        options={"policy": "inference"},
        prepare=_store,
    ),
)
"""Ways with stored weights. They change the model in place, so they come after the plain model."""


def ways(dtype: torch.dtype) -> tuple[Way, ...]:
    """Returns all ways of the demonstration; the first is a model of `dtype` under Inductor."""
    return Way(label=BASELINES[dtype]), *STORED


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """The quality of a language model that is served in one way.

    perplexity: e^(mean loss per byte). logits_gap: relative distance of the logits from the first way's.
    weight_bytes: bytes of all parameters. report: report of the compile, None without mxcompile.
    """

    label: str
    perplexity: float
    logits_gap: float
    weight_bytes: int
    report: Report | None


@dataclass(frozen=True, kw_only=True, slots=True)
class Speed:
    """The speed of a model that is served in one way.

    prefill_ms: time from a prompt to the first token. tokens_per_s: speed of further tokens, one sequence,
    greedy. weight_bytes: bytes of all parameters.
    """

    label: str
    prefill_ms: float
    tokens_per_s: float
    weight_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wide:
    """Sizes of a model whose speed is bound by reading its weights: by default two blocks of a Llama 3 8B.

    prompt, tokens: number of given and of generated tokens. repeats: timed runs, of which the fastest counts.
    """

    layers: int = 2
    width: int = 4096
    feed_forward: int = 14336
    heads: int = 32
    key_value_heads: int = 8
    prompt: int = 128
    tokens: int = 16
    repeats: int = 2
    device: str = "cpu"
    dtype: torch.dtype = torch.bfloat16


def _as_it_is(model: nn.Module) -> nn.Module:
    return model


def trained(
    settings: Settings,
    text: Text,
    progress: Callable[[int, float], None],
    compile_model: Callable[[nn.Module], Callable[..., Any]] = _as_it_is,
) -> nn.Module:
    """Returns a model trained for `settings.steps` steps, with parameters in `settings.dtype`.

    progress: called with step and loss after each step. compile_model: returns the callable to train; by
    default the model itself, because a compile takes longer than some hundred steps of such a small model.
    Buffers, such as a rotary embedding's, stay in FP32.
    """
    models: list[nn.Module] = []

    def keep(model: nn.Module) -> Callable[..., Any]:
        models.append(model)
        return compile_model(model)

    last = replace(settings, validate_every=settings.steps, validation_batches=1)
    Trainee(settings.baseline, last, text, keep).run(
        settings.seed, lambda run, step: progress(step, run.train[-1])
    )
    return _in(settings.dtype, models[0])


def wide(size: Wide) -> nn.Module:
    """Returns the model of `size`. Its weights repeat a few random numbers, to save time.

    Raises `OptionError` without transformers.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
        from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
    except ImportError:
        raise OptionError("the demo needs transformers: pip install 'mxcompile[demo]'") from None
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=size.width,
        intermediate_size=size.feed_forward,
        num_hidden_layers=size.layers,
        num_attention_heads=size.heads,
        num_key_value_heads=size.key_value_heads,
        max_position_embeddings=size.prompt + size.tokens + 1,
        tie_word_embeddings=False,
        dtype=str(size.dtype).removeprefix("torch."),
    )
    with torch.device("meta"):
        model: Any = LlamaForCausalLM(config)
        model.to(size.dtype)
    model.to_empty(device=size.device)
    model.model.rotary_emb = LlamaRotaryEmbedding(config).to(size.device)  # its buffers, too, need values
    numbers = torch.randn(1 << 16, generator=torch.Generator().manual_seed(0)).to(size.device)
    for parameter in model.parameters():
        flat = parameter.data.view(-1)
        whole = flat[: flat.numel() // len(numbers) * len(numbers)].view(-1, len(numbers))
        scale = 1.0 if parameter.ndim == 1 else parameter.shape[-1] ** -0.5
        whole.copy_(numbers * scale)
        flat[whole.numel() :].copy_(numbers[: flat.numel() - whole.numel()] * scale)
    return _in(size.dtype, model)


def _in(dtype: torch.dtype, model: nn.Module) -> nn.Module:
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model.eval().requires_grad_(False)


@torch.no_grad()
def quality(
    model: nn.Module, settings: Settings, text: Text, ways: Iterable[Way], count: int = 4
) -> Iterator[Quality]:
    """Yields the quality of `model` in each of `ways` on `count` batches of text. The first is the baseline.

    Changes the weights of `model` in place, as the ways do.
    """
    windows = batches(text.validation, replace(settings, batch=_WINDOWS), seed=1)
    samples = [next(windows) for _ in range(count)]
    expected: list[Tensor] = []
    for way in ways:
        with _Served(model, way):
            logits = [_logits(model, sample[:, :-1], cached=way.cached) for sample in samples]
        expected = expected or logits
        yield Quality(
            label=way.label,
            perplexity=math.exp(_loss(logits, samples)),
            logits_gap=_gap(logits, expected),
            weight_bytes=weight_bytes(model),
            report=next(iter(reports()), None),
        )


@torch.no_grad()
def speed(model: nn.Module, size: Wide, ways: Iterable[Way]) -> Iterator[Speed]:
    """Yields the speed of `model` served in each of `ways`, which change its weights in place."""
    prompt = torch.arange(size.prompt, device=size.device)[None] % VOCABULARY
    for way in ways:
        cache = _cache(model, size, way)
        with _Served(model, way):
            _generate(model, prompt, 1 + size.tokens, cache)  # compiles both graphs
            first = min(_seconds(model, prompt, 1, cache) for _ in range(size.repeats))
            whole = min(_seconds(model, prompt, 1 + size.tokens, cache) for _ in range(size.repeats))
        yield Speed(
            label=way.label,
            prefill_ms=first * 1e3,
            tokens_per_s=size.tokens / (whole - first),
            weight_bytes=weight_bytes(model),
        )


class _Served:
    """A context in which `model` is prepared, and its forward compiled, as in `way`."""

    def __init__(self, model: nn.Module, way: Way) -> None:
        self._model, self._way = model, way

    def __enter__(self) -> None:
        torch._dynamo.reset()
        clear_reports()
        if self._way.prepare is not None:
            self._way.prepare(self._model)
        self._model.forward = torch.compile(
            self._model.forward, backend=self._way.backend, options=self._way.options, dynamic=False
        )

    def __exit__(self, *_: object) -> None:
        del self._model.forward


def weight_bytes(model: nn.Module) -> int:
    """Returns the bytes of all parameters of `model`, with all inner tensors of wrapper subclasses."""
    return sum(_bytes(parameter) for parameter in model.parameters())


def _bytes(x: Any) -> int:
    if not hasattr(x, "__tensor_flatten__"):
        return int(x.nbytes)
    return sum(_bytes(getattr(x, name)) for name in x.__tensor_flatten__()[0])


def _logits(model: Any, tokens: Tensor, *, cached: bool) -> Tensor:
    """Returns the FP32 logits of one call. cached: whether attention reads an MXFP8 cache."""
    cache = {"cache": static_cache(model, tokens.shape[1])} if cached else {}
    logits: Tensor = model(input_ids=tokens, **cache).logits.float()
    return logits


def _loss(logits: Sequence[Tensor], samples: Sequence[Tensor]) -> float:
    losses = [
        nn.functional.cross_entropy(scores.flatten(0, 1), sample[:, 1:].flatten())
        for scores, sample in zip(logits, samples, strict=True)
    ]
    return float(torch.stack(losses).mean())


def _gap(logits: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    actual, wanted = torch.cat([*logits]), torch.cat([*expected])
    return float((actual - wanted).norm() / wanted.norm())


def _cache(model: Any, size: Wide, way: Way) -> Any:
    """Returns a static cache for all calls, allocated now, so that the first call compiles all graphs."""
    from transformers import StaticCache

    room = size.prompt + 1 + size.tokens
    cache = static_cache(model, room) if way.cached else StaticCache(model.config, room)
    head_dim, device = size.width // size.heads, torch.device(size.device)
    cache.early_initialization(1, size.key_value_heads, head_dim, size.dtype, device)
    return cache


def _generate(model: Any, prompt: Tensor, tokens: int, cache: Any) -> Tensor:
    """Returns `prompt` followed by `tokens` greedily generated tokens."""
    cache.reset()
    output: Tensor = model.generate(
        prompt,
        cache=cache,
        max_new_tokens=tokens,
        min_new_tokens=tokens,
        do_sample=False,
        pad_token_id=0,
        use_cache=True,
        disable_compile=True,
    )
    return output


def _seconds(model: nn.Module, prompt: Tensor, tokens: int, cache: Any) -> float:
    start = time.perf_counter()
    output = _generate(model, prompt, tokens, cache)
    output[0, -1].item()  # waits for the device
    return time.perf_counter() - start
