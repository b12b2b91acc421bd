"""Code for each target is generated once; every test looks at it."""

from __future__ import annotations

import functools

import pytest
from llama_block import block

from mxcompile.offline import CodegenResult, codegen


@functools.cache
def _generate(target: str, training: bool) -> CodegenResult:
    model, x = block()
    return codegen(model, x, target=target, training=training)


@pytest.fixture(scope="session")
def generated():
    """Function of a target and whether to train: the code of a Llama block."""
    return _generate
