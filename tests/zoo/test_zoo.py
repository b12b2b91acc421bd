"""A zoo of architectures: every layer has the role an engineer expects, whatever its name and spelling.

Each model runs plain and with renamed modules, spelled-out attention and BF16 weights at once; some run in
training too, or with other implementations of their experts. `--zoo-disguises scrambled,eager,bf16` tells
which of these makes a difference; ``training:3`` is every third animal. `--zoo-misfits FILE` writes down what
was found. Misfits must be exactly those that `docs/zoo.md` lists.
"""

from __future__ import annotations

import re
import warnings
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from animal import Animal, Build
from animals import ALL_ANIMALS
from checks import Misfit, misfits
from disguise import DISGUISES, PLAIN, Disguise, scramble, spelled_attention, to_bf16
from eager_run import eager_run
from known import FILE, known_misfits
from known import animals as known_animals
from share import share_of

import mxcompile
from mxcompile.errors import MXCompileError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the libraries' own code

ZOO = {animal.name: animal for animal in ALL_ANIMALS}


def pytest_generate_tests(metafunc):
    if "disguise" in metafunc.fixturenames:
        pairs = []
        for wanted in metafunc.config.getoption("--zoo-disguises").split(","):
            disguise, _, step = wanted.partition(":")
            fitting = [a.name for a in ALL_ANIMALS if fits(a, DISGUISES[disguise])]
            pairs += [(name, disguise) for name in fitting[:: int(step or 1)]]
        metafunc.parametrize(("name", "disguise"), pairs, ids=[f"{name}-{d}" for name, d in pairs])


def fits(animal: Animal, disguise: Disguise) -> bool:
    """Whether `disguise` makes a difference to `animal`."""
    if disguise.experts:
        return disguise.experts in animal.experts
    return disguise != Disguise(bf16=True) or animal.bf16


def look(animal: Animal, disguise: Disguise, *, run: bool) -> set[Misfit]:
    """What is wrong with the report of `animal` in `disguise`. run: whether to run it eagerly too."""
    torch.manual_seed(0)
    attention = "eager" if disguise.eager and "eager" in animal.attentions else animal.attentions[0]
    with warnings.catch_warnings(action="ignore"):
        model, args, kwargs = animal.make(Build(attention=attention, experts=disguise.experts))
        model.eval()
        seen = eager_run(model, args, kwargs) if run else None
        things = (*model.named_modules(), *model.named_parameters(remove_duplicate=False))
        names = {name: name for name, _ in things}
        if disguise.bf16 and animal.bf16:
            args, kwargs = to_bf16(model, args, kwargs)
        if disguise.scrambled:
            names = scramble(model)
        spelling = spelled_attention() if disguise.eager else nullcontext()
        try:
            with spelling:
                report = mxcompile.explain(
                    model, *args, training=disguise.training and animal.training, **kwargs
                )
        except MXCompileError as error:
            return {Misfit(layer="explain", problem=f"{type(error).__name__}: {_first_words(error)}")}
    return misfits(animal, model, report, names, seen)


def _first_words(error: MXCompileError) -> str:
    """What `error` says before it names a place or a cause."""
    return re.split(r" in |:| \(", str(error))[0]


def test_every_layer_has_the_expected_role(name, disguise, request):
    faults = look(ZOO[name], DISGUISES[disguise], run=disguise == PLAIN)
    if file := request.config.getoption("--zoo-misfits"):
        with Path(file).open("a") as lines:
            lines.writelines(
                f"{name} | {disguise} | {misfit.layer} | {misfit.problem}\n" for misfit in faults
            )
    expected = known_misfits(name, disguise)
    new, gone = sorted(map(str, faults - expected)), sorted(map(str, expected - faults))
    assert not new, "\n".join([f"{name} in {disguise}:", *new])
    assert not gone, "\n".join([f"{name} in {disguise}, no longer so; take out of docs/zoo.md:", *gone])


def test_projections_and_feed_forward_layers_are_quantized():
    shares = {animal.name: share_of(animal) for animal in ALL_ANIMALS}
    layers = sum(share.layers for share in shares.values())
    left_out = {name: share.left_out for name, share in shares.items() if share.left_out}
    assert layers > 2000
    assert sum(left_out.values()) <= 0.03 * layers, f"of {layers}: {left_out}"


def test_known_misfits_are_of_animals_that_exist():
    assert known_animals() <= set(ZOO)


def test_the_zoo_is_large():
    assert len(ZOO) == len(ALL_ANIMALS)
    assert f"the roles in {len(ZOO)} architectures" in FILE.read_text(encoding="utf-8")
