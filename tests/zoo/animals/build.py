"""Small models from the configs of libraries, and inputs for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from animal import Build, Call

TOKENS = 19
"""Length of a sequence of text; no multiple of a block."""
VOCAB = 517

SIZES = {
    "hidden_size": 96, "intermediate_size": 208, "num_hidden_layers": 2, "num_attention_heads": 6,
    "vocab_size": VOCAB,
}  # fmt: skip
"""What most configs of transformers call their sizes; no two alike."""
GQA = {**SIZES, "num_key_value_heads": 2}


def ids(rows: int = 2, tokens: int = TOKENS, vocab: int = VOCAB) -> torch.Tensor:
    """Token numbers from 5 on: none is special."""
    return torch.randint(5, vocab, (rows, tokens), generator=torch.Generator().manual_seed(1))


def image(*shape: int) -> torch.Tensor:
    """Floating-point input of `shape`."""
    return torch.randn(*shape, generator=torch.Generator().manual_seed(1))


def text() -> dict[str, Any]:
    """What a language model is called with."""
    return {"input_ids": ids()}


def about_animal(settings: dict[str, Any], **defaults: Any) -> dict[str, Any]:
    """What `settings` say of the animal, not of its config; it is taken out of them."""
    words = ("attentions", "experts", "bf16", "flops_tolerance", "dead", "training")
    return defaults | {word: settings.pop(word) for word in words if word in settings}


def hf(
    model: str,
    inputs: Callable[[], dict[str, Any]] = text,
    *,
    config: str = "",
    sub: dict[str, str] | None = None,
    **settings: Any,
) -> Callable[[Build], Call]:
    """A maker of the class `model` of transformers from its config with `settings`.

    sub: of those settings that are configs themselves, the class.
    """

    def make(build: Build) -> Call:
        import transformers

        kind = getattr(transformers, model)
        values = dict(settings)
        for key, name in (sub or {}).items():
            values[key] = getattr(transformers, name)(**values[key])
        hf_config = (getattr(transformers, config) if config else kind.config_class)(**values)
        hf_config._attn_implementation = build.attention
        if build.experts:
            hf_config._experts_implementation = build.experts
        return kind(hf_config), (), inputs()

    return make
