"""The forms a compiled graph chooses among, each compiled for its chip: no spills, wide loads, it fits."""

from __future__ import annotations

import re

import pytest
import torch
from helpers.rendered import compiled
from torch._inductor import config

from mxcompile import ops
from mxcompile.lowering.chips.tiles import WEIGHT_ONLY
from mxcompile.lowering.choices.weight_only_forms import WeightOnlyForm, forms, most_rows
from mxcompile.lowering.targets import TARGETS
from mxcompile.lowering.templates import weight_only

BF16, F32 = torch.bfloat16, torch.float32
EMULATED = [name for name, target in TARGETS.items() if target.arch is not None and not target.native]
GPUS = [name for name, target in TARGETS.items() if target.arch is not None]
WIDE_LOAD = r"ld\.global\S*\.v4\.b32|cp\.async\.cg|global_load_(?:lds_)?dwordx4|buffer_load_dwordx4"


MX = "e4m3 1x32 rceil"
WEIGHTS = {
    MX: [((1024, 4096), torch.float8_e4m3fn), ((1024, 128), torch.uint8)],
    "e2m1 1x32 rceil packed": [((1024, 2048), torch.uint8), ((1024, 128), torch.uint8)],
    "e2m1 1x16 two-level packed": [
        ((1024, 2048), torch.uint8),
        ((1024, 256), torch.float8_e4m3fn),
        ((1, 1), F32),
    ],
}
"""Shapes and types of a weight [1024, 4096], by its format."""


def generated(form: WeightOnlyForm, rows: int, dtype: torch.dtype, target: str, monkeypatch, word: str):
    """The kernel of a product by such a weight in `form`, and how many follow it."""
    monkeypatch.setattr(weight_only, "forms", lambda *_, **__: [form])
    x = torch.empty(rows, 4096, dtype=dtype, device="meta")
    parts = [torch.empty(shape, dtype=kind, device="meta") for shape, kind in WEIGHTS[word]]

    def multiply(x, qdata, scale, *whole):
        return [ops.weight_only_mm(x, qdata, scale, None, dtype, word, *whole)]

    return compiled(multiply, [x, *parts], TARGETS[target])


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "dtype"), [(1, BF16), (8, BF16), (32, BF16), (4, F32)])
@pytest.mark.parametrize(
    ("target", "word"), [(target, word) for word in WEIGHTS for target in (EMULATED if word == MX else GPUS)]
)
def test_every_autotuned_form_compiles_for_its_chip(target, rows, dtype, word, monkeypatch):
    """In wide loads, without spills; packed codes on NVIDIA's chips by PTX, which shifts no single codes."""
    packed = word != MX
    with config.patch(max_autotune=True):
        tried = forms(rows, 1024, 4096, dtype, TARGETS[target], packed=packed)
    if not packed:
        assert len(tried) == len({form.tile for form in tried}) == 3
        assert len({form.parts for form in tried}) == 1, "the parts are summed alike, whichever wins"
    for form in tried:
        product, others = generated(form, rows, dtype, target, monkeypatch, word)
        assert others == (form.parts > 1), "the parts are summed by a kernel that follows"
        assert product.spill_bytes == 0, form
        assert product.problems == (), form
        assert bool(product.mma) == form.on_tensor_cores, form
        text = product.text.get("ptx") or product.text["amdgcn"]
        assert re.search(WIDE_LOAD, text), form
        if packed:
            assert ("lop3.b32" in text) == ("ptx" in product.text), form
        else:
            assert not re.search(r"\batom\.|\bred\.|_atomic_", text), form  # parts are summed in order


def test_a_weight_is_read_once_by_up_to_32_rows():
    for rows in range(2, 33):
        (form,) = forms(rows, 4096, 4096, BF16, TARGETS["sm_90"])
        assert form.tile.block_m >= rows


@pytest.mark.parametrize("target", EMULATED)
def test_k_is_split_until_the_chip_is_busy(target):
    chip = TARGETS[target]
    for n, k in ((1024, 4096), (4096, 4096), (14336, 4096), (4096, 14336)):
        for rows in (1, 16):
            (form,) = forms(rows, n, k, BF16, chip)
            programs = -(-n // form.tile.block_n) * form.parts
            longest = -(-k // form.tile.block_k) // 2  # a part takes at least two steps
            assert programs >= 1.5 * chip.processors or form.parts >= longest * 0.5, (n, k, rows, str(form))


def test_text_of_a_form_names_tile_split_and_choices():
    (form,) = forms(1, 4096, 4096, BF16, TARGETS["sm_90"])
    assert str(form) == "gemv 1x8x512"
    (form,) = forms(1, 1024, 4096, BF16, TARGETS["sm_90"])
    assert str(form) == "gemv 1x8x512 split 3"
    assert form.one_of(1) == str(form)
    assert form.one_of(3) == "gemv autotuned of 3 split 3"


def test_row_limits_equal_the_table_of_the_chip():
    assert most_rows(TARGETS["sm_90"], BF16) == WEIGHT_ONLY.dot_rows
    assert most_rows(TARGETS["sm_90"], F32) == WEIGHT_ONLY.gemv_rows
    assert most_rows(TARGETS["cpu"], BF16) == 0
