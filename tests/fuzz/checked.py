"""What must hold of every drawn case.

- Nothing raises, and the report has every matrix product: its sizes are those that an eager run dispatches.
- Outputs and gradients are those of the model with the reference casts in the layers that the report names.
  In BF16 a last bit may choose another expert or another element of E5M2: a case that comes out further off
  there is held to FP32's bound in FP32.
- Of every sixth, under the policy bf16 they are, bit for bit, those of the same path without the passes.
- Of every second whose program is one graph, names, roles and decisions are explain's.
- The process is left as it was: gradient, autocast and tracing modes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
from drawn import Drawn, Model, build
from functorch.compile import make_boxed_func
from helpers.eager import reference_linears
from helpers.eager_backend import EagerBackend, node_by_node
from helpers.reference import noise_db
from torch import Tensor, nn
from torch._dynamo.backends.distributed import DDPOptimizer
from torch._guards import TracingContext, detect_fake_mode
from torch._inductor.decomposition import select_decomp_table
from torch.utils._python_dispatch import TorchDispatchMode

import mxcompile

LEAST_DB = {"float32": 36.0, "bfloat16": 15.0, "autocast": 15.0}
"""Between this and an unquantized product (about 27 dB) lies what FP32 cases can tell apart."""

aten = torch.ops.aten
_MATMULS = {aten.mm: (0, 1), aten.addmm: (1, 2), aten.bmm: (0, 1), aten.baddbmm: (1, 2)}


def check(case: Drawn) -> None:
    """Raise what is wrong with `case`."""
    before = _surroundings()
    _check(case)
    residue = {
        name: (value, before[name]) for name, value in _surroundings().items() if value != before[name]
    }
    assert not residue, f"left behind by the case (now, before): {residue}"


def _surroundings() -> dict[str, Any]:
    """What of the process a case may change only while it runs: the next one would feel it."""
    nesting = torch.autocast_increment_nesting()
    torch.autocast_decrement_nesting()
    return {
        "gradients": (torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
        "default dtype": torch.get_default_dtype(),
        "autocast": (torch.is_autocast_enabled("cpu"), torch.is_autocast_cache_enabled(), nesting),
        "modes": (torch._C._len_torch_dispatch_stack(), torch._C._len_torch_function_stack()),
        "functorch's level": torch._C._functorch.maybe_current_level(),
        "tracing": (torch.compiler.is_compiling(), TracingContext.try_get(), detect_fake_mode()),
        "fast attention": torch.backends.mha.get_fastpath_enabled(),
    }


def _check(case: Drawn) -> None:
    torch._dynamo.reset()
    mxcompile.clear_reports()
    model, x = build(case)
    results = _run(case, model, x, _backend(case, policy=case.policy))
    (report,) = mxcompile.reports()
    model.wrapper = "none"
    with _Products() as products, _without_fast_path():
        _values(case, model, x, model)
    _check_records(case, report, products)
    with reference_linears(model, report) as replaced:
        expected = _values(case, model, x, model)
    in_mxfp8 = {gemm.name for gemm in report.gemms if gemm.precision == "mxfp8"}
    assert in_mxfp8 <= replaced.used, f"not in the model: {in_mxfp8 - replaced.used}"
    largest = max(value.float().norm().item() for value in expected.values())
    for name, value in expected.items():
        if name.endswith(".k.bias"):  # softmax does not feel it: its gradient is nothing but rounding
            continue
        got = noise_db(value.float(), results[name].float(), largest)
        if got <= LEAST_DB[case.dtype] and case.dtype != "float32":
            check(dataclasses.replace(case, dtype="float32"))
            break
        assert got > LEAST_DB[case.dtype], f"{name}: {got:.1f} dB from the reference"
    if case.whole and case.number % 2:
        _check_explained(case, model, x, report)
    if case.number % 6 == 0 and not case.real:
        _check_bf16(case)


def _check_records(case: Drawn, report: mxcompile.Report, products: _Products) -> None:
    products_of_attention = ("attn_scores", "attn_values")
    linears = [g for g in report.gemms if g.role not in products_of_attention and g.name != "stem"]
    in_report = Counter(gemm.flops // 2 for gemm in linears)
    assert in_report == products.sizes or case.attention in ("eager", "module"), (
        f"products of the report {in_report - products.sizes}, of the model {products.sizes - in_report}"
    )
    assert in_report <= products.sizes
    paths = {path for path, module in build(case)[0].named_modules() if isinstance(module, nn.Linear)}
    names = {gemm.name for gemm in linears}
    missing = {path for path in paths - names if not path.endswith("out_proj")}
    assert not missing, f"layers without a record: {missing}"


def _check_explained(case: Drawn, model: Model, x: Tensor, report: mxcompile.Report) -> None:
    explained = mxcompile.explain(model, x, policy=case.policy, training=case.training, strict=False)
    if case.dtype == "autocast":
        return  # explain sees no autocast around the call
    assert _decisions(explained) == _decisions(report)


def _decisions(report: mxcompile.Report) -> Counter[Any]:
    return Counter((g.name, g.gemm, g.role, g.precision, g.formats, g.reason, g.block) for g in report.gemms)


def _check_bf16(case: Drawn) -> None:
    torch._dynamo.reset()
    model, x = build(case)
    ours = _run(case, model, x, _backend(case, policy="bf16"))
    torch._dynamo.reset()
    plain = _run(case, model, x, _split(case, _without_passes))
    for name, value in plain.items():
        assert torch.equal(value, ours[name]), f"{name} differs under the policy bf16"


def _backend(case: Drawn, **options: Any) -> Any:
    return _split(case, mxcompile.Backend(**options) if case.real else EagerBackend(**options))


def _split(case: Drawn, backend: Any) -> Any:
    """`backend` behind cuts like those at DDP's buckets, if `case` asks for them."""
    if case.wrapper != "split":
        return backend
    cap = 20_000
    return DDPOptimizer(cap, backend_compile_fn=backend, first_bucket_cap=cap).compile_fn


def _without_passes(gm: Any, inputs: Any) -> Any:
    def run(graph: Any, _: Any) -> Any:
        return make_boxed_func(graph.forward)

    return node_by_node(run, decompositions=select_decomp_table())(gm, inputs)


def _run(case: Drawn, model: Model, x: Tensor, backend: Any) -> dict[str, Tensor]:
    compiled = torch.compile(model, backend=backend, dynamic=case.dynamic)
    return _values(case, model, x, compiled)


def _values(case: Drawn, model: Model, x: Tensor, call: Any) -> dict[str, Tensor]:
    """Output and, in training, gradients of all parameters, of a call in the context of `case`."""
    autocast = torch.autocast("cpu", torch.bfloat16) if case.dtype == "autocast" else nullcontext()
    model.zero_grad()
    with autocast, nullcontext() if case.training else torch.no_grad():
        y = call(x)
    values = {"output": y.detach().clone()}
    if case.training:
        weights = torch.linspace(-1, 1, y.numel()).reshape(y.shape)
        (y.float() * weights).sum().backward()
        values |= {
            f"gradient of {n}": p.grad.clone() for n, p in model.named_parameters() if p.grad is not None
        }
    return values


@contextmanager
def _without_fast_path() -> Iterator[None]:
    """``nn.MultiheadAttention`` in inference as products of matrices, and not as one operator."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


class _Products(TorchDispatchMode):
    """Counts multiply-adds of the matrix products that are dispatched, but for those inside attentions."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: Counter[int] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = _MATMULS.get(func.overloadpacket)
        if product is not None:
            a, b = (args[index] for index in product)
            self.sizes[a.numel() * b.shape[-1]] += 1
        return func(*args, **(kwargs or {}))
