"""One architecture of the zoo: how to build it small, and what an engineer says each of its layers is."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

QUANTIZED = frozenset(
    {"qkv", "attn_out", "ffn_in", "ffn_out", "expert_in", "expert_out", "mixer_in", "mixer_out"}
)
"""The roles that go to MXFP8 by default: projections and feed-forward networks."""
BF16 = frozenset({"head", "router", "embedding", "conditioning", "attn_scores", "attn_values", "other"})
WORDS = {"mx": QUANTIZED, "bf16": BF16}
"""What an expectation may say where it leaves the role open, beside the roles themselves."""

Call = tuple[nn.Module, tuple[Any, ...], dict[str, Any]]
"""A model, and the positional and keyword arguments it is called with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Build:
    """How a model is to be built. attention: "sdpa" or "eager". experts: "" for the library's default."""

    attention: str = "sdpa"
    experts: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Expectation:
    """What layers of some names are: one of `roles`, or, where `all_of`, each of them and nothing else.

    optional: a name some spellings of the model have; its roles have to be found, but under any name.
    """

    pattern: re.Pattern[str]
    roles: frozenset[str]
    all_of: bool = False
    optional: bool = False

    @classmethod
    def from_words(cls, pattern: str, words: str) -> Expectation:
        """From a regular expression for the end of a path, and ``qkv``, ``a|b``, ``a+b`` or one of WORDS.

        A ``?`` in front of the expression makes it optional.
        """
        roles: frozenset[str] = frozenset()
        for word in re.split(r"[|+]", words):
            roles |= WORDS.get(word, frozenset({word}))
        assert roles <= QUANTIZED | BF16, words
        regex = re.compile(rf"(?:.*\.)?(?:{pattern.removeprefix('?')})")
        return cls(pattern=regex, roles=roles, all_of="+" in words, optional=pattern.startswith("?"))

    @property
    def quantized(self) -> bool:
        """Whether every role that is right goes to MXFP8."""
        return self.roles <= QUANTIZED

    @property
    def certain(self) -> bool:
        """Whether each of its roles has to be there."""
        return self.all_of or len(self.roles) == 1


@dataclass(frozen=True, kw_only=True, slots=True)
class Animal:
    """An architecture.

    make: builds it; small, and no two widths alike. expect: end of a layer's path → roles, the first that
    fits counts. attentions: spellings of attention it has. experts: implementations of its experts. bf16:
    whether its code runs in BF16. flops_tolerance: by how much the report's FLOPs may be off an eager run's,
    as a part of these. dead: ends of the paths of layers whose results nothing reads.
    """

    name: str
    make: Callable[[Build], Call]
    expect: Mapping[str, str]
    attentions: tuple[str, ...] = ("sdpa",)
    experts: tuple[str, ...] = ()
    bf16: bool = True
    training: bool = True
    flops_tolerance: float = 0.01
    dead: str = ""

    @property
    def expectations(self) -> tuple[Expectation, ...]:
        """`expect`, parsed."""
        return tuple(Expectation.from_words(pattern, words) for pattern, words in self.expect.items())


def expectation(name: str, among: tuple[Expectation, ...]) -> Expectation | None:
    """The first of `among` that speaks of the layer `name`."""
    return next((e for e in among if e.pattern.fullmatch(name)), None)
