"""Tests on the GPU of this machine; without one they skip.

The folder has its own settings (`pytest.ini`), so that ``make gpu`` runs it from a bare checkout, with any
pytest, and beside PyTorch, transformers and pytest imports nothing that a GPU machine may lack.
"""

from __future__ import annotations

import pytest


@pytest.fixture(autouse=True)
def _fresh_state():
    from helpers.fresh import fresh_state

    yield from fresh_state()


@pytest.fixture(autouse=True)
def _needs_gpu(_fresh_state):
    import torch

    if not torch.cuda.is_available():
        pytest.skip("no CUDA or ROCm device")
