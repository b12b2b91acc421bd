"""Every way to write a linear layer and every shape of it: in MXFP8, and equal to the reference casts.

The reference is written per form, as a product of two matrices; both directions are compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from helpers.eager import NVIDIA, Recipe, grouped_product, product
from helpers.eager_backend import EagerBackend
from helpers.paces import mostly_slow
from helpers.reference import sqnr_db
from helpers.reports import EVERYTHING as ALL
from torch import Tensor, nn
from torch.nn import functional as F

import mxcompile
from mxcompile import Backend

K, N = 45, 37  # a short last block along both


OUTER = Recipe({**NVIDIA.formats, "wgrad": None})
"""For a single vector autograd writes the weight gradient as an outer product: elementwise, no GEMM."""


def mm(x: Tensor, w: Tensor, recipe: Recipe = NVIDIA) -> Tensor:
    """x[…, k] · w[k, n] with the reference casts."""
    return product(x.reshape(-1, x.shape[-1]), w, recipe, x.dtype).reshape(*x.shape[:-1], w.shape[-1])


@dataclass(frozen=True, kw_only=True)
class Form:
    """A layer as users write it, `call(x, w, b)`, as a product of matrices, and the shapes of x, w and b.

    gemms: how many of fprop, dgrad and wgrad there are.
    """

    call: Callable[[Tensor, Tensor, Tensor], Tensor]
    reference: Callable[[Tensor, Tensor, Tensor], Tensor]
    x: tuple[int, ...] = (3, 7, K)
    w: tuple[int, ...] = (N, K)
    width: int = N
    gemms: int = 3


def _linear(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w, b)


def _linear_reference(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return mm(x, w.t()) + b


def _plain_reference(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
    return mm(x, w)


def _stacked_reference(x: Tensor, w: Tensor, _: Tensor) -> Tensor:
    return torch.stack([mm(*pair) for pair in zip(x, w, strict=True)])


def _of(view: Callable[[Tensor], Tensor], x: tuple[int, ...]) -> Form:
    """F.linear of a view of x."""
    return Form(
        call=lambda x, w, b: F.linear(view(x), w, b),
        reference=lambda x, w, b: _linear_reference(view(x), w, b),
        x=x,
    )


FORMS = {
    "linear": Form(call=_linear, reference=_linear_reference),
    "linear_1d": Form(call=_linear, reference=_linear_reference, x=(K,)),
    "linear_2d": Form(call=_linear, reference=_linear_reference, x=(33, K)),
    "linear_4d": Form(call=_linear, reference=_linear_reference, x=(2, 3, 5, K)),
    "linear_no_bias": Form(
        call=lambda x, w, _: F.linear(x, w), reference=lambda x, w, _: mm(x, w.t())
    ),
    "one_token": Form(call=_linear, reference=_linear_reference, x=(1, K)),
    "one_in": Form(call=_linear, reference=_linear_reference, x=(5, 1), w=(N, 1)),
    "one_out": Form(call=_linear, reference=_linear_reference, x=(5, K), w=(1, K), width=1),
    "no_token": Form(call=_linear, reference=_linear_reference, x=(0, K)),
    "no_token_3d": Form(call=_linear, reference=_linear_reference, x=(3, 0, K)),
    "matmul": Form(call=lambda x, w, _: torch.matmul(x, w), reference=_plain_reference, w=(K, N)),
    "at": Form(call=lambda x, w, _: x @ w, reference=_plain_reference, x=(21, K), w=(K, N)),
    "at_transposed": Form(
        call=lambda x, w, _: x @ w.t(), reference=lambda x, w, _: mm(x, w.t()), x=(21, K)
    ),
    "at_4d": Form(call=lambda x, w, _: x @ w, reference=_plain_reference, x=(2, 3, 5, K), w=(K, N)),
    "vector_at": Form(call=lambda x, w, _: x @ w, reference=_plain_reference, x=(K,), w=(K, N)),
    "at_vector": Form(
        call=lambda x, w, _: w @ x, reference=lambda x, w, _: mm(x, w.t(), OUTER), x=(K,), gemms=2
    ),
    "addmv": Form(
        call=lambda x, w, b: torch.addmv(b, w, x),
        reference=lambda x, w, b: mm(x, w.t(), OUTER) + b,
        x=(K,),
        gemms=2,
    ),
    "weight_left": Form(
        call=lambda x, w, _: w @ x.t(), reference=lambda x, w, _: mm(x, w.t()).t(), x=(21, K)
    ),
    "weight_left_3d": Form(
        call=lambda x, w, _: w @ x.transpose(1, 2),
        reference=lambda x, w, _: torch.stack([mm(part, w.t()).t() for part in x]),
    ),
    "mm": Form(call=lambda x, w, _: torch.mm(x, w), reference=_plain_reference, x=(21, K), w=(K, N)),
    "addmm": Form(
        call=lambda x, w, b: torch.addmm(b, x, w),
        reference=lambda x, w, b: mm(x, w) + b,
        x=(21, K),
        w=(K, N),
    ),
    "addmm_factors": Form(
        call=lambda x, w, b: torch.addmm(b, x, w, alpha=0.5, beta=3.0),
        reference=lambda x, w, b: 0.5 * mm(x, w) + 3.0 * b,
        x=(21, K),
        w=(K, N),
    ),
    "addmm_no_beta": Form(
        call=lambda x, w, b: torch.addmm(b, x, w, beta=0.0),
        reference=_plain_reference,
        x=(21, K),
        w=(K, N),
    ),
    "einsum": Form(
        call=lambda x, w, _: torch.einsum("btk,kn->btn", x, w), reference=_plain_reference, w=(K, N)
    ),
    "einsum_transposed": Form(
        call=lambda x, w, _: torch.einsum("btk,nk->nbt", x, w),
        reference=lambda x, w, _: mm(x, w.t()).permute(2, 0, 1),
    ),
    "einsum_stack": Form(
        call=lambda x, w, _: torch.einsum("etk,ekn->etn", x, w), reference=_stacked_reference, w=(3, K, N)
    ),
    "bmm": Form(call=lambda x, w, _: torch.bmm(x, w), reference=_stacked_reference, w=(3, K, N)),
    "baddbmm": Form(
        call=lambda x, w, b: torch.baddbmm(b, x, w),
        reference=lambda x, w, b: _stacked_reference(x, w, b) + b,
        w=(3, K, N),
    ),
    "tensordot": Form(
        call=lambda x, w, _: torch.tensordot(x, w, dims=([2], [1])),
        reference=lambda x, w, _: mm(x, w.t()),
    ),
    "transposed": _of(lambda x: x.t(), (K, 21)),
    "strided": _of(lambda x: x[:, ::2, 1:], (3, 14, K + 1)),
    "permuted": _of(lambda x: x.permute(2, 0, 1), (7, K, 3)),
    "expanded": _of(lambda x: x.expand(6, 3, K), (1, 1, K)),
    "expanded_batch": _of(lambda x: x.expand(4, 7, K), (1, 7, K)),
    "flipped": _of(lambda x: x.flip(-1), (21, K)),
}  # fmt: skip


SIZES = {
    f"m{m}_k{k}_n{n}": Form(call=_linear, reference=_linear_reference, x=(m, k), w=(n, k), width=n)
    for m, k, n in itertools.product((0, 1, 31, 33), (1, 31, 65), (1, 32, 33))
}


class Forms(nn.Module):
    """One layer per form; the module's outputs are theirs, in order."""

    def __init__(self, forms: dict[str, Form]) -> None:
        super().__init__()
        self.forms = forms
        generator = torch.Generator().manual_seed(1)
        for name, form in forms.items():
            layer = nn.Module()
            layer.weight = nn.Parameter(torch.randn(form.w, generator=generator))
            layer.bias = nn.Parameter(torch.randn(form.width, generator=generator))
            self.add_module(name, layer)

    def forward(self, inputs: dict[str, Tensor]) -> list[Tensor]:
        return [self.apply_form(name, inputs[name], form.call) for name, form in self.forms.items()]

    def apply_form(self, name: str, x: Tensor, call: Callable[..., Tensor]) -> Tensor:
        layer = self.get_submodule(name)
        return call(x, layer.weight, layer.bias)


def step(outputs: list[Tensor], inputs: dict[str, Tensor], model: nn.Module) -> dict[str, Tensor]:
    """All outputs and the gradients of all inputs and parameters, by name."""
    generator = torch.Generator().manual_seed(2)
    loss = sum((y * torch.randn(y.shape, generator=generator)).sum() for y in outputs)
    wanted = {**{f"{k} x": v for k, v in inputs.items()}, **dict(model.named_parameters())}
    gradients = torch.autograd.grad(loss, list(wanted.values()), materialize_grads=True)
    return {
        **{f"{i} y": y.detach() for i, y in enumerate(outputs)},
        **dict(zip(wanted, gradients, strict=True)),
    }


def check(forms: dict[str, Form], backend: Any) -> None:
    """All `forms` in one graph: all GEMMs in MXFP8, and what they compute."""
    model = Forms(forms)
    inputs = {name: torch.randn(form.x).requires_grad_() for name, form in forms.items()}
    results = step(torch.compile(model, backend=backend, fullgraph=True)(inputs), inputs, model)
    reference = step(
        [model.apply_form(name, inputs[name], form.reference) for name, form in forms.items()], inputs, model
    )
    for name, value in results.items():
        assert value.shape == reference[name].shape, name
        assert sqnr_db(reference[name], value) > 110, name
    (report,) = mxcompile.reports()
    gemms: dict[str, list[str]] = {name: [] for name in forms}
    for record in report.gemms:
        assert record.precision == "mxfp8", record
        gemms[record.name].append(record.gemm)
    assert {name: sorted(kinds) for name, kinds in gemms.items()} == {
        name: sorted(["fprop", "dgrad", "wgrad"][: form.gemms]) for name, form in forms.items()
    }


@pytest.mark.parametrize("forms", [FORMS, SIZES], ids=["forms", "sizes"])
def test_every_form_of_linear_layer_equals_reference_after_passes(forms: dict[str, Form]):
    check(forms, EagerBackend(policy=ALL))


def test_forms_with_views_and_strides_equal_reference_compiled():
    """The forms whose views, strides or sizes Inductor could trip over."""
    names = ("linear_4d", "one_in", "no_token", "at_vector", "weight_left_3d", "addmm_factors", "bmm",
             "strided", "expanded")  # fmt: skip
    check({name: FORMS[name] for name in names}, Backend(policy=ALL))


class Grouped(nn.Module):
    """Experts by F.grouped_mm, their weights stored either way."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(1)
        self.up = nn.Parameter(torch.randn(4, 48, 40, generator=generator).bfloat16())
        self.down = nn.Parameter(torch.randn(4, 56, 40, generator=generator).bfloat16())

    def forward(self, x: Tensor, offs: Tensor, multiply: Any = None) -> Tensor:
        multiply = multiply or F.grouped_mm
        return multiply(multiply(x, self.up, offs=offs), self.down.transpose(-2, -1), offs=offs)


def check_groups(rows: tuple[int, ...], offs: Tensor | None, backend: Any) -> mxcompile.Report:
    """The report of experts whose products are compiled, and equal to those of the reference."""
    model, x = Grouped(), torch.randn(*rows, 48).bfloat16().requires_grad_()

    def reference(x: Tensor, w: Tensor, *, offs: Tensor | None) -> Tensor:
        if offs is None:
            return torch.stack([product(*pair, NVIDIA, x.dtype) for pair in zip(x, w, strict=True)])
        return grouped_product(x, w, offs, NVIDIA)

    results = step([torch.compile(model, backend=backend, fullgraph=True)(x, offs)], {"": x}, model)
    expected = step([model(x, offs, reference)], {"": x}, model)
    for name, value in results.items():
        assert sqnr_db(expected[name], value) > 40, name
    (report,) = mxcompile.reports()
    assert sorted((gemm.name, gemm.precision) for gemm in report.gemms) == [
        (name, "mxfp8") for name in ("down", "up") for _ in range(3)
    ]
    return report


@pytest.mark.parametrize("ends", [(5, 5, 38, 45), (45, 45, 45, 45)], ids=str)
def test_grouped_product_equals_reference_for_groups_of_any_length(ends: tuple[int, ...]):
    check_groups((45,), torch.tensor(ends, dtype=torch.int32), EagerBackend(policy=ALL))


def test_grouped_product_without_offsets_equals_the_reference_of_stacks():
    check_groups((4, 21), None, EagerBackend(policy=ALL))


@pytest.mark.parametrize(
    "ends",
    mostly_slow([(10, 10, 17, 37), (0, 20, 44, 44), (5, 9, 20, 40), (0, 1, 1, 1)], (10, 10, 17, 37)),
    ids=str,
)
def test_groups_of_any_rows_train_compiled(ends: tuple[int, ...]):
    """PyTorch's grouped product takes operands whose groups begin at multiples of 16 bytes."""
    offs = torch.tensor(ends, dtype=torch.int32)
    report = check_groups((ends[-1],), offs, Backend(policy=ALL, target="cpu_bf16"))
    kernels = {gemm.kernel for gemm in report.gemms if gemm.gemm != "wgrad" or ends[-1] > 1}
    assert kernels == {"aten._grouped_mm (bfloat16, dequantized)"}
