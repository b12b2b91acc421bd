"""Kept copies of weights: the fingerprint against its formula, what it sees, and how long copies live."""

from __future__ import annotations

import gc
import struct
import threading
from typing import Any

import pytest
import torch
from torch import Tensor

from mxcompile import ops
from mxcompile.lowering.cpu import copies
from mxcompile.lowering.cpu.copies import COPIES, fingerprint

E4M3, E5M2, BF16 = torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16
LOW = 2**32


def by_formula(w: Tensor) -> list[list[int]]:
    """NH and NH under the shifted key, in integers of any size."""
    key = [word % 2**64 for word in copies._key().tolist()]
    raw = w.flatten().view(torch.uint8).numpy().tobytes()
    found = []
    for start in range(0, len(raw), 8192):
        words = struct.unpack("<1024Q", raw[start : start + 8192].ljust(8192, b"\0"))
        sums = [
            sum(
                ((x + key[i + t]) % LOW) * ((x // LOW + key[i + t] // LOW) % LOW) for i, x in enumerate(words)
            )
            % 2**64
            for t in (0, 1)
        ]
        found.append(sums)
    return found


@pytest.mark.parametrize("shape", [(3,), (64, 64), (37, 333), (0, 5)])
@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
def test_a_fingerprint_is_its_formula(shape: tuple[int, ...], dtype: torch.dtype):
    w = torch.randn(shape).to(dtype)
    assert [[s % 2**64 for s in sums] for sums in fingerprint(w).tolist()] == by_formula(w)


def test_every_bit_counts_and_every_place():
    w = torch.randn(70, 70).to(BF16)
    bits = w.view(torch.int16)
    before = fingerprint(w)
    seen = {tuple(before.flatten().tolist())}
    for place in (0, 1, 2, 3, 4095, 4096, 4899):
        for bit in range(16):
            bits.view(-1)[place] ^= 1 << bit if bit < 15 else -(1 << 15)
            seen.add(tuple(fingerprint(w).flatten().tolist()))
            bits.view(-1)[place] ^= 1 << bit if bit < 15 else -(1 << 15)
    assert len(seen) == 1 + 7 * 16
    assert torch.equal(fingerprint(w), before)
    for a, b in ((0, 1), (0, 4), (3, 4095), (5, 4097)):
        swapped = w.clone().view(-1)
        swapped[[a, b]] = swapped[[b, a]]
        assert not torch.equal(fingerprint(swapped), before)
    zeros = torch.zeros(64, 64)
    assert not torch.equal(fingerprint(zeros), fingerprint(-zeros))


@pytest.mark.parametrize("dtype", [BF16, torch.float32], ids=str)
@pytest.mark.parametrize("how", [(E4M3, "rceil"), (E5M2, "floor"), (E4M3, "even")], ids=str)
@pytest.mark.parametrize("square", [False, True])
def test_copies_are_casts(dtype: torch.dtype, how: tuple[Any, str], square: bool):
    for shape in ((64, 96), (37, 333), (3, 70, 45), (0, 5)):
        w = (torch.randn(shape) * torch.exp2(torch.randint(-40, 40, shape))).to(dtype)
        for dim in (-1, -2):
            for found, expected in zip(
                ops.quantize_cached(w, dim, *how, square), ops.quantize(w, dim, *how, square), strict=True
            ):
                assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
            values = ops.quantize_dequantize_cached(w, dim, *how, square, dtype)
            assert torch.equal(values, ops.quantize_dequantize(w, dim, *how, square, dtype))


def cast(w: Tensor) -> Tensor:
    values: Tensor = ops.quantize_dequantize_cached(w, -1, E4M3, "rceil", False, BF16)
    return values


def test_who_holds_an_old_copy_holds_what_it_was():
    w = torch.randn(64, 64).to(BF16)
    old = cast(w)
    before = old.clone()
    w.mul_(3)
    assert not torch.equal(cast(w), before)
    assert torch.equal(old, before)


def test_views_of_one_storage_have_copies_of_their_own():
    whole = torch.randn(96, 64).to(BF16)
    parts = [whole[:32], whole[32:], whole[:32, :], whole.view(64, 96)]
    found = [cast(part) for part in parts]
    for part, values in zip(parts, found, strict=True):
        assert torch.equal(values, ops.quantize_dequantize(part, -1, E4M3, "rceil", False, BF16))
    before = COPIES.casts
    whole[40].add_(1)
    cast(parts[0])
    assert COPIES.casts == before
    cast(parts[1])
    assert COPIES.casts == before + 1


def test_copies_live_as_long_as_the_storage():
    gc.collect()
    before = COPIES.num_bytes
    w = torch.nn.Parameter(torch.randn(64, 64).to(BF16))
    cast(w.detach())
    view = w.detach()[:32]
    del w
    gc.collect()
    assert COPIES.num_bytes == before + 64 * 64 * 2
    del view
    gc.collect()
    assert COPIES.num_bytes == before


def test_threads_get_the_copy_of_their_weight():
    made = [torch.full((64, 64), float(2**i)).to(BF16) for i in range(4)]
    wrong: list[int] = []

    def run(index: int) -> None:
        wrong.extend(index for _ in range(50) if not torch.equal(cast(made[index]), made[index]))

    threads = [threading.Thread(target=run, args=(i % 4,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_weight_that_does_not_lie_as_it_is_cast():
    w = torch.randn(64, 96).to(BF16).t()
    assert torch.equal(cast(w), ops.quantize_dequantize(w, -1, E4M3, "rceil", False, BF16))


def test_all_copies_can_be_forgotten():
    w = torch.randn(64, 64).to(BF16)
    cast(w)
    before = COPIES.casts
    COPIES.clear()
    cast(w)
    assert COPIES.casts == before + 1
