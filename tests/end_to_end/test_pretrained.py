"""A pretrained model, on real text: MXFP8 keeps its perplexity, MXFP4 does not."""

from __future__ import annotations

from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::ResourceWarning")  # of what reads the file
def test_gemma_keeps_its_perplexity_in_mxfp8(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import pretrained
    import pretrained_models as models
    from pretrained_ways import BOTH, Way, under, use

    if lack := models.missing("gemma"):
        pytest.skip(lack)
    score = pretrained.Language(6, 256)
    score(pretrained.BASELINE)
    over, error = {}, {}
    for label, policy in {"mxfp8": "nvidia", "mxfp4": use(precision="mxfp4")}.items():
        way = Way(label=label, library="mxcompile", quantized=BOTH, prepare=under(policy))
        over[label], error[label] = score(way)["over_fp32_percent"]
    assert over["mxfp8"] - error["mxfp8"] < 2.5 < over["mxfp4"] - error["mxfp4"]
