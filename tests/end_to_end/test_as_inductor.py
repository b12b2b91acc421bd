"""The policy ``bf16`` gives what ``backend="inductor"`` gives, bit for bit."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from mxcompile.graph.opsets import may_be_product

NAMES = (
    "__rmatmul__", "addbmm", "addmm", "addmm.decomposed", "addmv", "addr", "baddbmm", "bmm",
    "bmm.triton_optimized", "cdist", "cholesky", "cholesky_inverse", "cholesky_solve", "corrcoef", "cov",
    "einsum", "linalg.cholesky", "linalg.cholesky_ex", "linalg.cond", "linalg.eigh", "linalg.eigvalsh",
    "linalg.householder_product", "linalg.inv", "linalg.inv_ex", "linalg.lstsq",
    "linalg.lstsq.grad_oriented", "linalg.lu", "linalg.lu_factor", "linalg.lu_factor_ex", "linalg.lu_solve",
    "linalg.matrix_norm", "linalg.matrix_power", "linalg.matrix_sqrth", "linalg.multi_dot", "linalg.norm",
    "linalg.norm.subgradients_at_zero", "linalg.pinv", "linalg.pinv.hermitian", "linalg.pinv.singular",
    "linalg.polar", "linalg.qr", "linalg.solve", "linalg.solve_ex", "linalg.solve_triangular", "linalg.svd",
    "linalg.svdvals", "linalg.tensorinv", "linalg.tensorsolve", "lu", "lu_solve", "matmul", "mm", "mv",
    "nn.functional.bilinear", "nn.functional.conv1d", "nn.functional.conv2d", "nn.functional.conv3d",
    "nn.functional.conv_transpose1d", "nn.functional.conv_transpose2d", "nn.functional.conv_transpose3d",
    "nn.functional.linear", "nn.functional.linear_cross_entropy",
    "nn.functional.linear_cross_entropy.chunked", "nn.functional.linear_cross_entropy.chunked_none",
    "nn.functional.multi_head_attention_forward", "nn.functional.scaled_dot_product_attention", "norm.nuc",
    "ormqr", "pca_lowrank", "pinverse", "qr", "sparse.sampled_addmm", "svd", "svd_lowrank", "tensordot",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu", "triangular_solve",
)  # fmt: skip
"""The operators among those that PyTorch has samples of which run a product, forward or backward."""

NOT_EVERYWHERE = {
    "cholesky", "linalg.matrix_sqrth", "linalg.polar", "qr",
    "torch.ops.aten._scaled_dot_product_flash_attention_for_cpu",
}  # fmt: skip
"""Of `NAMES`, those of which only PyTorch before 2.15, or only 2.15, has samples."""


def operators() -> dict[str, Any]:
    """PyTorch's operators with samples in FP32, by name and variant."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from torch.testing._internal.common_methods_invocations import op_db

    chosen = (info for info in op_db if torch.float32 in info.supported_dtypes("cpu"))
    return {".".join(filter(None, [info.name, info.variant_test_name])): info for info in chosen}


class Products(TorchDispatchMode):
    """Notes the products that run, with the forms of their operands."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[str] = set()

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if may_be_product(function):
            form = tree_map_only(Tensor, lambda x: (x.shape, x.layout is torch.strided and x.stride()), args)
            self.seen.add(f"{function} {form}")
        return function(*args, **(kwargs or {}))


def call(function: Any, arguments: Any) -> list[Tensor]:
    """Outputs and gradients of `function` with copies of `arguments`."""
    torch.manual_seed(0)
    arguments = tree_map_only(Tensor, lambda x: x.detach().clone().requires_grad_(x.requires_grad), arguments)
    outputs = [value for value in tree_leaves(function(arguments)) if isinstance(value, Tensor)]
    summed = [value for value in outputs if value.requires_grad and value.is_floating_point()]
    if summed:
        torch.autograd.backward(summed, [torch.ones_like(value) for value in summed])
    gradients = [value.grad for value in tree_leaves(arguments) if isinstance(value, Tensor)]
    return [value.detach() for value in [*outputs, *gradients] if value is not None]


def compiled(function: Any, arguments: Any, **settings: Any) -> list[Tensor]:
    torch._dynamo.reset()
    return call(torch.compile(function, **settings), arguments)


def check(function: Any, arguments: Any, expected: list[Tensor], **settings: Any) -> None:
    computed = compiled(function, arguments, backend="mxfp8", options={"policy": "bf16"}, **settings)
    torch.testing.assert_close(computed, expected, rtol=0, atol=0, equal_nan=True)


def samples(operator: Any) -> Iterator[tuple[Any, Any]]:
    """Calls with the samples of `operator`, those whose products no sample before had."""

    def function(arguments: Any) -> Any:
        return operator(arguments[0], *arguments[1], **arguments[2])

    targets: set[str] = set()
    for sample in operator.sample_inputs("cpu", torch.float32, requires_grad=operator.supports_autograd):
        arguments = sample.input, sample.args, sample.kwargs
        with Products() as products:
            call(function, arguments)
        if products.seen - targets:
            targets |= products.seen
            yield function, arguments


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # of operators that are deprecated, and of Dynamo about them
@pytest.mark.parametrize("name", NAMES)
def test_bf16_policy_equals_inductor_on_samples_of_operators(name: str):
    count, infos = 0, operators()
    if name in NOT_EVERYWHERE - infos.keys():
        pytest.skip("this PyTorch has no samples of it")
    for function, arguments in samples(infos[name]):
        try:
            expected = compiled(function, arguments, backend="inductor")
        except Exception:  # Inductor does not compile the sample
            continue
        check(function, arguments, expected)
        count += 1
    assert count


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_operators_without_a_product_are_left_out():
    infos = operators()
    assert set(NAMES) - set(infos) <= NOT_EVERYWHERE
    for name in infos.keys() - set(NAMES):
        assert not [*_products(infos[name])], name


def _products(operator: Any) -> Iterator[str]:
    try:
        for function, arguments in samples(operator):
            with Products() as products:
                call(function, arguments)
            yield from products.seen
    except Exception:  # a sample that raises, as some do to be caught
        return


SHAPES = {
    "mm": [
        ((5, 1), (1, 3)),
        ((50, 1), (1, 30)),
        ((1, 40), (40, 1)),
        ((1, 40), (40, 30)),
        ((30, 40), (40, 1)),
    ],
    "bmm": [
        ((2, 5, 1), (2, 1, 3)),
        ((2, 1, 40), (2, 40, 1)),
        ((2, 1, 40), (2, 40, 3)),
        ((0, 5, 4), (0, 4, 3)),
    ],
    "mv": [((5, 10), (10,)), ((1, 10), (10,)), ((5, 1), (1,))],
    "addmm": [
        ((3,), (1, 10), (10, 3)),
        ((3,), (1, 40), (40, 3)),
        ((1,), (1, 40), (40, 1)),
        ((3,), (5, 1), (1, 3)),
    ],
    "addmv": [((5,), (5, 10), (10,)), ((5,), (5, 1), (1,)), ((0,), (0, 4), (4,))],
    "baddbmm": [((2, 5, 3), (2, 5, 1), (2, 1, 3))],
}
"""Operands of products that Inductor makes something else of, by operator."""


@pytest.mark.parametrize(
    ("dtype", "dynamic"),
    [
        (torch.float32, None),
        pytest.param(torch.bfloat16, None, marks=pytest.mark.slow),
        pytest.param(torch.float32, True, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_bf16_policy_equals_inductor_on_empty_and_small_products(dtype: torch.dtype, dynamic: bool | None):
    """In one graph, with bias and scalars."""
    arguments = {
        name: [[torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes] for shapes in cases]
        for name, cases in SHAPES.items()
    }

    def function(arguments: Any) -> list[Tensor]:
        scalars = {"alpha": 0.7, "beta": 1.3}
        return [
            getattr(torch, name)(*operands, **(scalars if name.startswith(("add", "badd")) else {}))
            for name, cases in arguments.items()
            for operands in cases
        ]

    settings: dict[str, Any] = {"dynamic": dynamic, "fullgraph": True}
    check(function, arguments, compiled(function, arguments, backend="inductor", **settings), **settings)
