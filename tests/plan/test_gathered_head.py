"""A head whose input and result are gathered from ranks that share Inductor's caches."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import gathered_head
import pytest
import torch


def run(folder: Path, caches: Path) -> list[dict[tuple[str, bool], dict[str, torch.Tensor]]]:
    """The results of each rank."""
    folder.mkdir()
    environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(caches)}
    command = [sys.executable, gathered_head.__file__, str(folder)]
    subprocess.run(command, env=environment, check=True)
    return [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(gathered_head.RANKS)]


@pytest.mark.slow
def test_no_rank_is_given_the_code_of_another(tmp_path: Path):
    """Torch has one key for all ranks, so the second run would find code of either rank."""
    for temperature in ("cold", "warm"):
        for rank, results in enumerate(run(tmp_path / temperature, tmp_path / "caches")):
            for (way, sequence), values in results.items():
                for name, right in results["plain", sequence].items():
                    close = torch.allclose(values[name], right, rtol=1e-4, atol=1e-6)
                    assert close, (temperature, rank, way, sequence, name)
