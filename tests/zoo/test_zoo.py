"""A zoo of architectures: every layer has the role an engineer expects, whatever its name and spelling.

Each model runs plain and in all disguises at once; `--zoo-disguises scrambled,eager,bf16,training` (and
`grouped_mm,batched_mm,loop` for those with experts) tells what makes a difference. Misfits must be exactly
those of `known.txt`.
"""

from __future__ import annotations

import warnings
from contextlib import nullcontext

import pytest
import torch
from animal import Animal, Build
from animals import ALL_ANIMALS
from checks import Misfit, misfits
from disguise import DISGUISES, PLAIN, Disguise, scramble, spelled_attention, to_bf16
from eager_run import eager_run
from known import animals as known_animals
from known import known

import mxcompile
from mxcompile.errors import MXCompileError

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]  # of the libraries' own code

ZOO = {animal.name: animal for animal in ALL_ANIMALS}


def pytest_generate_tests(metafunc):
    if "disguise" in metafunc.fixturenames:
        wanted = metafunc.config.getoption("--zoo-disguises").split(",")
        pairs = [(a.name, d) for a in ALL_ANIMALS for d in wanted if fits(a, DISGUISES[d])]
        metafunc.parametrize(("name", "disguise"), pairs, ids=[f"{a}-{d}" for a, d in pairs])


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
            return {Misfit(layer="explain", what=f"{type(error).__name__}: {str(error)[:90]}")}
    return misfits(animal, model, report, names, seen)


def test_roles(name, disguise):
    found = look(ZOO[name], DISGUISES[disguise], run=disguise == PLAIN)
    expected = known(name, disguise)
    new, gone = sorted(map(str, found - expected)), sorted(map(str, expected - found))
    assert not new, "\n".join([f"{name} in {disguise}:", *new])
    assert not gone, "\n".join([f"{name} in {disguise}, no longer so; take out of known.txt:", *gone])


def test_known_misfits_are_of_animals_that_exist():
    assert known_animals() <= set(ZOO)


def test_the_zoo_is_large():
    assert len(ZOO) == len(ALL_ANIMALS) >= 80
