"""A pretrained model, on real text: MXFP8 keeps its perplexity, MXFP4 does not."""

from __future__ import annotations

import pytest


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of what reads the file
def test_gemma_keeps_its_perplexity_in_mxfp8(benchmark):
    pretrained, models, ways = map(benchmark, ("pretrained", "pretrained_models", "pretrained_ways"))

    if lack := models.missing("gemma"):
        pytest.skip(lack)
    score = pretrained.Language(6, 256)
    score(pretrained.BASELINE)
    over, error = {}, {}
    for label, policy in {"mxfp8": "nvidia", "mxfp4": ways.use(precision="mxfp4")}.items():
        way = ways.Way(label=label, library="mxcompile", quantized=ways.BOTH, prepare=ways.under(policy))
        over[label], error[label] = score(way)["over_fp32_percent"]
    assert over["mxfp8"] - error["mxfp8"] < 2.5 < over["mxfp4"] - error["mxfp4"]
