"""Activations that are computed again: by wrappers of blocks, on one rank of a mesh."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import meshed
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh

import mxcompile
from mxcompile.mesh import RankReport
from mxcompile.models.fake_copy import rewrapped
from mxcompile.plan.repeats import fold
from mxcompile.policy import Policy

DEPTH = 5


def wrapped(mesh: DeviceMesh) -> meshed.Prepared:
    example = meshed.plain(DEPTH)
    for index, block in enumerate(example[0].layers):
        example[0].layers[index] = checkpoint_wrapper(block)
    meshed.fully_shard_(example[0], mesh["dp"], mp_policy=meshed.MIXED)
    return example


def kept(mesh: DeviceMesh) -> meshed.Prepared:
    example = meshed.plain(DEPTH)
    meshed.fully_shard_(example[0], mesh["dp"], mp_policy=meshed.MIXED)
    return example


SETTINGS = {"mesh": "dp=8", "target": "b200", "links": "nvlink=900", "policy": "bf16"}


def explained(factory: Any) -> RankReport:
    return mxcompile.explain_rank(factory, **SETTINGS)


def decisions(rank: RankReport) -> Counter[Any]:
    return Counter((gemm.name, gemm.role, gemm.gemm, gemm.precision) for gemm in rank.report.gemms)


def products(rank: RankReport) -> Counter[str]:
    assert rank.time is not None
    total: Counter[str] = Counter()
    for side in rank.time.works[0].works.values():
        for (kind, _), times in side.items():
            total[kind] += times if kind in ("product", "attention") else 0
    return total


def test_wrapped_blocks_keep_less_and_compute_again():
    """Six products and the attention of each block run again, and the last product of the last block.

    A block saves its input, which is the result of the block before. Nothing saves the last block's.
    """
    checkpointed_rank, once = explained(wrapped), explained(kept)
    assert checkpointed_rank.memory.saved < 0.5 * once.memory.saved
    assert products(checkpointed_rank) - products(once) == Counter(product=DEPTH * 6 + 1, attention=DEPTH)
    assert not re.search("checkpoint", str(checkpointed_rank))
    assert set(decisions(checkpointed_rank)) == set(decisions(once))
    assert Counter(checkpointed_rank.collectives) == Counter(once.collectives)


def test_wrapped_blocks_are_traced_once():
    plain, model = meshed.Llama(DEPTH), meshed.Llama(DEPTH)
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block)
    assert rewrapped(plain, model) is plain
    assert fold(plain, Policy.preset("nvidia")).standing_for == {"layers.1": ("layers.2", "layers.3")}


def test_wrappers_inside_wrappers_are_kept():
    plain, model = meshed.Llama(1), meshed.Llama(1)
    name, _ = next(model.layers[0].named_children())
    setattr(model.layers[0], name, checkpoint_wrapper(getattr(model.layers[0], name)))
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    rewrapped(plain, model)
    assert [path for path, _ in plain.named_modules()] == [path for path, _ in model.named_modules()]


def test_ways_by_name_keep_the_wrappers():
    model, args, _ = meshed.plain()
    before = mxcompile.explain_rank(model, *args, parallel="fsdp", **SETTINGS).memory.saved
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block)
    assert mxcompile.explain_rank(model, *args, parallel="fsdp", **SETTINGS).memory.saved < 0.6 * before


def checkpointed(mesh: DeviceMesh) -> meshed.Prepared:
    """A model that is checkpointed as a whole."""
    model, args, kwargs = meshed.plain()
    wrapped = checkpoint_wrapper(model)
    meshed.fully_shard_(model, mesh["dp"], mp_policy=meshed.MIXED)
    return wrapped, args, kwargs


def test_a_model_in_a_wrapper_keeps_it():
    wrapped_rank, once = explained(checkpointed), explained(meshed.fsdp)
    assert wrapped_rank.memory.saved < 0.2 * once.memory.saved
    assert set(decisions(wrapped_rank)) == set(decisions(once))


def test_explain_without_a_mesh_keeps_the_wrappers():
    model, args, _ = meshed.plain()
    before = mxcompile.explain(model, *args, target="b200", policy="bf16")
    for index, block in enumerate(model.layers):
        model.layers[index] = checkpoint_wrapper(block)
    after = mxcompile.explain(model, *args, target="b200", policy="bf16")
    assert after.summary.saved_bytes < 0.6 * before.summary.saved_bytes
    assert {(gemm.name, gemm.kernel) for gemm in after.gemms} == {
        (gemm.name, gemm.kernel) for gemm in before.gemms
    }
