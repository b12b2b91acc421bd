"""A candidate means the same over every start policy, whichever formats its preset has."""

from __future__ import annotations

import pytest

from mxcompile.analysis.study.mixes import Candidate
from mxcompile.formats import (
    E5M2,
    PRECISIONS,
    Amax,
    AmaxKind,
    Choices,
    ElemRounding,
    Rounding,
    Scales,
    Tile,
)
from mxcompile.policy.presets import PRESETS

BASES = {
    "nothing": Choices(),
    "pow2": Choices(scale=Scales.POW2, elem_dtype=E5M2, grad_dtype=E5M2),
    "delayed": Choices(scaling="delayed", history=16, margin=2),
    "percentile": Choices(amax=Amax(kind=AmaxKind.PERCENTILE, value=99.0), rounding=Rounding.FLOOR),
    "blocks": Choices(block="16", weight_block=Tile(32, 32), hadamard=7),
    "stochastic": Choices(grad_rounding=ElemRounding.STOCHASTIC, weight_block=Tile(16, 16)),
}
WORDS = [name for name, preset in PRESETS.items() if preset.gemms] + [
    name for name, row in PRECISIONS.items() if row.quantizes and name not in PRESETS
]


@pytest.mark.parametrize("base", BASES)
@pytest.mark.parametrize("word", WORDS)
def test_candidate_has_its_own_formats_over_every_base(word, base):
    choices = PRESETS[word].formats if word in PRESETS else Choices()
    row = PRESETS[word].precision if word in PRESETS else PRECISIONS[word]
    use = Candidate.parse(word, BASES[base]).use
    assert use is not None
    assert row.formats(use.over(BASES[base])) == row.formats(choices)
    assert use.history is None or use.scaling == "delayed", "a policy file has a history of these alone"
