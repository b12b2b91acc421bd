"""One model, however it is cut: every layer has the role, decision, formats and name that `explain` gives.

Of eight families graphs are broken at every kind of place that they have, several at once, in `CUTS` rounds,
and that `DRAWS` times; each is compiled in pieces in all `WAYS`: over 200 cuts. A model of transformers is
beside them. ``--drawn-every 8`` deals the places once, and takes the ways that cut through a family, all
ways of three families.
"""

from __future__ import annotations

import functools
import itertools
import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any
from unittest import mock

import families
import pytest
import torch
import torch.distributed as dist
from families import FAMILIES, POINTS, Family, build
from helpers import models
from helpers.blocks import FeedForward
from helpers.eager_backend import EagerBackend
from helpers.fresh import forget
from helpers.made import Made, calling
from helpers.reference import noise_db
from torch import Tensor, nn
from torch._dynamo.exc import Unsupported
from torch.utils.checkpoint import checkpoint
from ways import (
    HEADLESS,
    WAYS,
    Row,
    around,
    broken,
    front_door,
    pending,
    policy,
    report_of_all,
    rows,
    values,
    whole,
)  # fmt: skip

import mxcompile
from mxcompile.errors import OptionError

pytestmark = pytest.mark.filterwarnings("ignore:FSDP2-wrapped module .* returned a view")
CUTS, DRAWS = 4, 5
CUTTING = ("by_block", "front_door", "buckets")
"""Ways whose pieces are the family's own; the others wrap a model without a look at what is in it."""
WRAPPED = ("llama", "t5", "moe")
"""One stack of blocks, two, and weights that are no module's of their own."""
LEAST_DB = 50
"""Between sums in another order, and one layer in another format (below 30)."""


@dataclass(frozen=True, kw_only=True)
class Uncut:
    """What `explain` says of a family, and what it computes in one graph."""

    policy: Any
    rows: set[Row]
    values: dict[str, Tensor]


@pytest.fixture(scope="module")
def uncut() -> Iterator[Any]:
    cache: dict[str, Uncut] = {}

    def of(name: str) -> Uncut:
        if name not in cache:
            cache[name] = _uncut(build(name))
            forget()
        return cache[name]

    return of


def _uncut(family: Family) -> Uncut:
    decided = policy(family.model)
    explained = mxcompile.explain(family.model, *family.inputs, policy=decided, target="cpu")
    computed = values(family, whole(family.model, policy=decided))
    assert rows(report_of_all()) == rows(explained)
    return Uncut(policy=decided, rows=rows(explained), values=computed)


@pytest.fixture(scope="module")
def alone() -> Iterator[None]:
    """A process group of one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def follows(whole_model: Uncut, computed: dict[str, Tensor], case: Any) -> None:
    """What was compiled is as `explain` has it; what was not is in the report, and in BF16 anyway."""
    report = report_of_all()
    compiled, waiting = rows(report), pending(report)
    assert compiled <= whole_model.rows, f"{case}: {sorted(compiled - whole_model.rows)[:3]}"
    assert waiting <= whole_model.rows, f"{case}: {sorted(waiting - whole_model.rows)[:3]}"
    assert {row[0] for row in whole_model.rows - compiled} == {row[0] for row in waiting}, case
    assert {row[3] for row in waiting} <= {"bf16"}, case
    largest = max(value.norm().item() for value in whole_model.values.values())
    values = whole_model.values
    worst = min((noise_db(values[name], computed[name], largest), name) for name in values)
    assert worst[0] > LEAST_DB, f"{case}: {worst}"


def cuts(family: Family, rng: random.Random) -> list[tuple[set[str], set[str]]]:
    """Modules to break graphs in front of, and points inside their code: every kind of either is in one cut.

    Modules are of a kind whose paths differ by numbers alone. Not torch's own, which Dynamo does not compile
    where a graph that calls them is given up.
    """
    kinds: dict[str, list[str]] = {}
    for path, module in family.model.named_modules():
        if path and not type(module).__module__.startswith("torch."):
            kinds.setdefault(re.sub(r"\d+", "N", path), []).append(path)
    families.POINTS.clear()
    family.model(*family.inputs)
    places = [(rng.choice(paths), "") for paths in kinds.values()] + [("", point) for point in sorted(POINTS)]
    rng.shuffle(places)
    dealt = [places[number::CUTS] for number in range(CUTS)]
    return [({path for path, _ in cut if path}, {point for _, point in cut if point}) for cut in dealt]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    every = metafunc.config.getoption("--drawn-every")
    if "draw" in metafunc.fixturenames:
        metafunc.parametrize("draw", range(0, DRAWS, every))
    if "way" in metafunc.fixturenames:
        pairs = itertools.product(FAMILIES, WAYS)
        chosen = [(name, way) for name, way in pairs if every == 1 or way in CUTTING or name in WRAPPED]
        metafunc.parametrize(("name", "way"), chosen)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_graph_breaks_change_nothing(name: str, draw: int, uncut: Any):
    whole_model = uncut(name)
    with torch._dynamo.config.patch(recompile_limit=64):
        for paths, points in cuts(build(name), random.Random(f"{name}/{draw}")):
            assert paths or points
            forget()
            family = build(name)
            with broken(family.model, paths, points):
                computed = values(family, whole(family.model, policy=whole_model.policy))
            follows(whole_model, computed, (paths, points))


@pytest.mark.slow
def test_model_in_pieces_has_the_decisions_of_the_whole(name: str, way: str, uncut: Any, alone: None):
    whole_model, family = uncut(name), build(name)
    with around(way):
        computed = values(family, WAYS[way](family.model, policy=whole_model.policy))
    if way in HEADLESS:
        inside = {row for row in whole_model.rows if any(part.isdecimal() for part in row[0].split("."))}
        assert rows(report_of_all()) <= whole_model.rows
        assert inside - rows(report_of_all()) == set()
    follows(whole_model, computed, way)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:FSDP is switching to use `NO_SHARD`")  # of one rank
def test_flat_parameters_are_refused(alone: None):
    """Dynamo takes no frame of such a model, and asks no backend: only where it must, it is an error."""
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = build("llama").model
    flat = FullyShardedDataParallel(model, device_id=torch.device("cpu"), use_orig_params=False)
    with pytest.raises(OptionError, match="use_orig_params"):
        mxcompile.compile(flat)
    with pytest.raises(Unsupported):
        torch.compile(flat, backend="mxfp8", fullgraph=True)(*build("llama").inputs)


def test_a_training_step_that_breaks_around_the_model(uncut: Any):
    """PyTorch's pattern for compiled autograd: the step is a function, and ``backward`` breaks its graph."""
    whole_model, family = uncut("llama"), build("llama")
    model = family.model

    @torch.compile(backend=EagerBackend(policy=whole_model.policy))
    def step() -> None:
        torch._dynamo.graph_break()
        model(*family.inputs).square().mean().backward()

    with torch._dynamo.config.patch(compiled_autograd=True):
        step()
    assert rows(report_of_all()) == whole_model.rows


@pytest.mark.parametrize("compiled", [front_door, whole], ids=["mxcompile.compile", "torch.compile"])
def test_kernels_of_a_backward_under_compiled_autograd_are_named(compiled: Any):
    """Compiled autograd compiles all backwards in one graph, which is not a model that strict mode checks."""
    family = build("llama")
    backend = EagerBackend(lowers=True, strict=True)
    with mock.patch("ways.EagerBackend", functools.partial(EagerBackend, lowers=True)):
        call = compiled(family.model)
        with torch._dynamo.compiled_autograd._enable(torch.compile(backend=backend)):
            call(*family.inputs).square().mean().backward()
    gemms = report_of_all().gemms
    assert {gemm.gemm for gemm in gemms if gemm.precision == "mxfp8"} == {"fprop", "dgrad", "wgrad"}
    assert [gemm for gemm in gemms if not gemm.kernel] == []
    assert all("dequantized" in gemm.kernel for gemm in gemms if gemm.precision == "mxfp8")


class Recomputing(Made, blocks=lambda: nn.ModuleList(FeedForward() for _ in range(3)), head=(64, 32)):
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return self.head(x)


def test_checkpoints_around_compiled_blocks_run_backward():
    """Checkpoints count the tensors that a forward saves: those of the plan's trace are not among them."""
    model = Recomputing()
    for block in model.blocks:
        block.compile(backend=EagerBackend())
    for _ in range(2):
        model(torch.randn(32, 64)).square().mean().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def hugging() -> Family:
    """A model of transformers that gives its logits alone."""
    torch.manual_seed(0)
    case = models.llama(families.LAYERS)
    logits = calling(lambda self, ids: self.model(input_ids=ids, return_dict=True).logits, model=case.model)
    return Family(model=logits, inputs=(case.kwargs["input_ids"],))


@pytest.mark.slow
def test_hugging_face_model_in_pieces_has_the_decisions_of_the_whole():
    whole_model = _uncut(hugging())
    for way in ("graph breaks", "front_door", "buckets"):
        forget()
        family = hugging()
        paths = set() if way in WAYS else {"model.model.layers.1.mlp", "model.model.layers.2"}
        with torch._dynamo.config.patch(recompile_limit=64), broken(family.model, paths, set()):
            computed = values(family, WAYS.get(way, whole)(family.model, policy=whole_model.policy))
        follows(whole_model, computed, (way, paths))
