"""Estimates the time of a whole training step per GPU: layers, and the work outside the layers.

    layers       forward and backward of each micro-batch, from the code of one layer
    recompute    "full": forward again; "selective": forward without attention and every second product, as in
                 torchtitan, or a layer's own selection
    head         three products of tokens · width · vocabulary, in BF16
    loss         logits read twice and their gradient written, in BF16
    embedding    rows read, written, and their gradients added
    accumulate   gradients of each further micro-batch added in FP32
    clip         the norm of all gradients, and their product with a factor
    optimizer    AdamW in one kernel on FP32 parameters: 28 bytes each, and their BF16 copies
    exposed      FSDP's gathers of BF16 weights, twice per micro-batch, and its gradient reduction, as far as
                 they take longer than the layers that overlap with them

The estimate is arithmetic on the model's sizes, with kernel times from `estimate`. Not included: host time,
the missing input gradient of the first layer, and waits for slower ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from mxcompile.errors import OptionError, not_allowed
from mxcompile.offline.estimate import Work, library_work, total
from mxcompile.offline.rates import Range, Rates

RECOMPUTE = ("none", "selective", "full")

_COPY_BYTES = 2
_ACCUMULATE_BYTES = 2 + 8


@dataclass(frozen=True, kw_only=True, slots=True)
class LayerWork:
    """The work of a layer for the tokens of a micro-batch, as (kind of launch, work) pairs.

    recomputed: work of selective recomputation; None for torchtitan's selection.
    """

    forward: tuple[tuple[str, Work], ...]
    backward: tuple[tuple[str, Work], ...]
    recomputed: tuple[tuple[str, Work], ...] | None = None

    @property
    def selected(self) -> tuple[tuple[str, Work], ...]:
        """The work that selective recomputation repeats; by default no attention and every second product."""
        if self.recomputed is not None:
            return self.recomputed
        products = [part for part in self.forward if part[0] == "product"]
        others = [part for part in self.forward if part[0] not in ("product", "attention")]
        return (*others, *products[1::2])


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingStep:
    """A training step.

    layers, width, vocabulary, parameters: sizes of the model. tokens: tokens of a micro-batch on a GPU.
    micro_batches: micro-batches in a step. gpus: number of GPUs over which FSDP shards. link_gbs: 10⁹ bytes
    per second that a GPU sends and receives in a collective; required for several GPUs. recompute: one of
    `RECOMPUTE`.
    """

    layers: int
    width: int
    vocabulary: int
    parameters: int
    tokens: int
    micro_batches: int = 1
    gpus: int = 1
    link_gbs: float | None = None
    recompute: str = "none"

    def __post_init__(self) -> None:
        if self.recompute not in RECOMPUTE:
            raise OptionError(not_allowed("recompute", self.recompute, RECOMPUTE))
        if self.gpus > 1 and self.link_gbs is None:
            raise OptionError("several GPUs need link_gbs, the speed of their collectives in 10⁹ bytes/s")

    def parts(self, layer: LayerWork, rates: Rates) -> Mapping[str, float]:
        """Returns µs by part, in the order of the module docstring."""
        forward, backward = ([work for _, work in side] for side in (layer.forward, layer.backward))
        batches, shard = self.micro_batches, self.parameters / self.gpus
        layers_us = self.layers * total([*forward, *backward], rates)
        repeated = {"none": (), "selective": layer.selected, "full": layer.forward}[self.recompute]
        recomputed_us = self.layers * float(total([work for _, work in repeated], rates))
        logits = self.tokens * self.vocabulary
        head = library_work(
            num_bytes=2 * (logits + (self.tokens + self.vocabulary) * self.width),
            flops=2.0 * logits * self.width,
            product="bf16",
            target=rates.target,
        )
        moved = {
            "loss": batches * loss_bytes(2 * logits),
            "embedding": batches * 2 * 4 * self.tokens * self.width,
            "accumulate": (batches - 1) * _ACCUMULATE_BYTES * shard,
            **update_bytes(4 * shard),
        }
        moved["optimizer"] += _COPY_BYTES * shard
        beside = {part: total([Work(num_bytes=size)], rates) if size else 0.0 for part, size in moved.items()}
        return {
            "layers": batches * layers_us,
            "recompute": batches * recomputed_us,
            "head": batches * total([head] * 3, rates),
            **beside,
            "exposed": batches * max(self._collectives_us - layers_us - recomputed_us, 0.0),
        }

    def us(self, layer: LayerWork, rates: Rates) -> float:
        """Returns the µs of the step."""
        return sum(self.parts(layer, rates).values())

    def range(self, layer: LayerWork, rates: Rates) -> Range:
        """Returns the µs of the step at the low, centre and high rates."""
        return Range.from_rates(lambda moved: self.us(layer, moved), rates)

    def over(self, layer: LayerWork, other: LayerWork, rates: Rates) -> Range:
        """Returns the ratio of the steps with `layer` and with `other`."""
        return Range.from_rates(lambda moved: self.us(layer, moved) / self.us(other, moved), rates)

    @property
    def _collectives_us(self) -> float:
        """µs of a micro-batch's collectives: BF16 weights gathered twice, FP32 gradients reduced."""
        if self.gpus == 1 or self.link_gbs is None:
            return 0.0
        parameter_bytes = 2 * 2 + 4
        return parameter_bytes * self.parameters * (self.gpus - 1) / self.gpus / (self.link_gbs * 1e3)


def update_bytes(gradient_bytes: float) -> dict[str, float]:
    """Returns the bytes that an update moves, by part, with gradients in the dtype of their parameters.

    Clipping reads gradients for their norm, then reads and writes them. AdamW reads parameters, gradients and
    two states per parameter, and writes all but the gradients.
    """
    return {"clip": 3 * gradient_bytes, "optimizer": 7 * gradient_bytes}


def loss_bytes(logit_bytes: float) -> float:
    """Returns the bytes that a loss moves: logits read twice, their gradient written once."""
    return 3 * logit_bytes


def scaled(
    works: Sequence[tuple[str, Work]], *, tokens: float, length: float
) -> tuple[tuple[str, Work], ...]:
    """Returns `works` for `tokens` times as many tokens, in sequences `length` times as long.

    The number of launches stays; attention scales with both factors. Weight casts scale with `tokens`, too,
    which overestimates them.
    """
    return tuple(
        (kind, work.times(tokens, products=tokens * (length if kind == "attention" else 1.0)))
        for kind, work in works
    )
