"""A head whose input and result are gathered from ranks that share Inductor's caches."""

from __future__ import annotations

from pathlib import Path

import gathered_head
import pytest
import torch
from helpers.ranks import on_ranks


@pytest.mark.slow
def test_no_rank_is_given_the_code_of_another(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Torch has one key for all ranks, so the second run would find code of either rank."""
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path / "caches"))
    for temperature in ("cold", "warm"):
        results_of_ranks = on_ranks(gathered_head.RANKS, tmp_path, gathered_head.gradients_of_ways)
        for rank, results in enumerate(results_of_ranks):
            for (way, sequence), values in results.items():
                for name, right in results["plain", sequence].items():
                    close = torch.allclose(values[name], right, rtol=1e-4, atol=1e-6)
                    assert close, (temperature, rank, way, sequence, name)
