"""A whole training step: its parts by hand."""

from __future__ import annotations

import dataclasses

import pytest

from mxcompile.errors import OptionError
from mxcompile.lowering.targets import TARGETS
from mxcompile.offline.estimate import Work, library_work
from mxcompile.offline.rates import Rates
from mxcompile.offline.training import LayerWork, TrainingStep, scaled

B200 = TARGETS["sm_100"]
RATES = Rates.for_target(B200)
BANDWIDTH = 0.78 * 8000e3  # bytes a µs
LAUNCH = 3.0

PRODUCT = library_work(num_bytes=0.0, flops=1e12, product="bf16", target=B200)
CAST = Work(num_bytes=1e9)
LAYER = LayerWork(
    forward=(("product", PRODUCT), ("cast", CAST), ("rest", CAST)), backward=(("product", PRODUCT),)
)
STEP = TrainingStep(layers=4, width=1024, vocabulary=32000, parameters=10**9, tokens=2048)

PRODUCT_US, CAST_US = 1e12 / (2250e6 * 0.67) + LAUNCH, 1e9 / BANDWIDTH + LAUNCH


def test_parts_of_a_step_equal_sums_by_hand():
    parts = STEP.parts(LAYER, RATES)
    assert list(parts) == [
        *("layers", "recompute", "head", "loss", "embedding", "accumulate", "clip", "optimizer", "exposed")
    ]
    assert parts["layers"] == pytest.approx(4 * (2 * PRODUCT_US + 2 * CAST_US))
    logits = 2048 * 32000
    assert parts["head"] == pytest.approx(3 * (2 * logits * 1024 / (2250e6 * 0.67) + LAUNCH))
    assert parts["loss"] == pytest.approx(6 * logits / BANDWIDTH + LAUNCH)
    assert parts["optimizer"] == pytest.approx(30e9 / BANDWIDTH + LAUNCH)
    assert parts["clip"] == pytest.approx(12e9 / BANDWIDTH + LAUNCH)
    assert (parts["recompute"], parts["accumulate"], parts["exposed"]) == (0, 0, 0)
    assert STEP.us(LAYER, RATES) == pytest.approx(sum(parts.values()))


@pytest.mark.parametrize(
    ("recompute", "selected"),
    [("none", 0), ("full", 3 * PRODUCT_US + 2 * CAST_US), ("selective", PRODUCT_US + 2 * CAST_US)],
)
def test_recompute_part_counts_the_selected_launches(recompute, selected):
    """Selected are the second of two products and what multiplies nothing, or what the layer says."""
    step = dataclasses.replace(STEP, recompute=recompute)
    attention = ("attention", PRODUCT)
    layer = LayerWork(forward=(*LAYER.forward, ("product", PRODUCT), attention), backward=LAYER.backward)
    assert step.parts(layer, RATES)["recompute"] == pytest.approx(4 * selected)
    other = dataclasses.replace(layer, recomputed=(attention,) * 3)
    chosen = 3 * PRODUCT_US if recompute == "selective" else selected
    assert step.parts(other, RATES)["recompute"] == pytest.approx(4 * chosen)


def test_micro_batches_share_an_optimizer():
    single, three = STEP.parts(LAYER, RATES), dataclasses.replace(STEP, micro_batches=3).parts(LAYER, RATES)
    assert three["layers"] == pytest.approx(3 * single["layers"])
    assert three["optimizer"] == single["optimizer"]
    assert three["accumulate"] == pytest.approx(2 * 10e9 / BANDWIDTH + LAUNCH)


def test_collectives_show_where_layers_do_not_cover_them():
    fast = dataclasses.replace(STEP, gpus=8, link_gbs=9000.0)
    slow = dataclasses.replace(STEP, gpus=8, link_gbs=0.5)
    assert fast.parts(LAYER, RATES)["exposed"] == 0
    parts = slow.parts(LAYER, RATES)
    sent = (4 + 4) * 1e9 * 7 / 8 / 0.5e3
    assert parts["exposed"] == pytest.approx(sent - parts["layers"])
    assert parts["optimizer"] == pytest.approx(30e9 / 8 / BANDWIDTH + LAUNCH)


@pytest.mark.parametrize(
    ("fields", "words"),
    [({"recompute": "some"}, "unknown recompute 'some'"), ({"gpus": 8}, "need link_gbs")],
)
def test_training_step_with_invalid_field_raises(fields, words):
    with pytest.raises(OptionError, match=words):
        dataclasses.replace(STEP, **fields)


def test_scaled_work_grows_with_tokens_and_attention_with_length():
    """Attention grows with the length as well; what is launched does not."""
    attention = dataclasses.replace(PRODUCT, num_bytes=1e6)
    (kind, product), (_, scores) = scaled(
        [("product", PRODUCT), ("attention", attention)], tokens=8, length=0.25
    )
    assert (kind, product.mma_us) == ("product", 8 * PRODUCT.mma_us)
    assert (scores.mma_us, scores.num_bytes) == (2 * PRODUCT.mma_us, 8e6)


def test_ratio_of_steps_is_nearer_to_one_than_of_layers():
    """What stands beside the layers brings it nearer to 1."""
    faster = LayerWork(forward=LAYER.forward[:1], backward=LAYER.backward)
    ratio = STEP.over(faster, LAYER, RATES)
    layers = 2 * PRODUCT_US / (2 * PRODUCT_US + 2 * CAST_US)
    assert layers < ratio.centre < 1
    assert ratio.low < ratio.centre < ratio.high
