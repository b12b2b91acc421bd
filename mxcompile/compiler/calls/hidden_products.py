"""Finds the matrix products inside of operators of other libraries, in the first call of compiled code.

The first backward is searched too.

    library.op(x) ─▶ its kernel, under a dispatch mode ─▶ aten.mm(x, w)    w: not computed from x

The passes read only the arguments of such an operator. A weight that it holds is seen when its kernel runs. A
kernel that multiplies without PyTorch's operators stays unseen.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.errors import UnsupportedError
from mxcompile.formats import UNQUANTIZED, labels
from mxcompile.graph.opsets import BIASED, MATMULS, is_foreign_call, is_of_other_library
from mxcompile.models.names import joined, layer_name, user_path
from mxcompile.policy import Code, Gemm, Layer, Reason, Role
from mxcompile.report import GemmRecord

_has_kernel = torch._C._dispatch_has_computed_kernel_for_dispatch_key


def hidden_products(compilation: Compilation, gm: fx.GraphModule) -> HiddenProducts | None:
    """Returns the search for hidden products, or None if `gm` calls no operator of another library."""
    graphs = (module.graph for module in gm.modules() if isinstance(module, fx.GraphModule))
    calls = any(is_of_other_library(node.target) for graph in graphs for node in graph.nodes)
    first = Gemm.DGRAD if compilation.capture.backward else Gemm.FPROP
    return HiddenProducts(compilation.owner, first) if calls else None


class HiddenProducts(TorchDispatchMode):
    """Records the products inside operators for which the passes wrote no record.

    first: kind of the products of the first call.
    """

    supports_higher_order_operators = True

    def __init__(self, compilation: Compilation, first: Gemm) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._compilation = compilation
        self._operator: Any = None
        self._gemm = first
        self._derived: set[int] = set()
        self._paths: dict[int, str] = {}
        self._alive: list[Any] = []  # freed memory would get the same identity again
        self._records: list[GemmRecord] = []
        self._refused: dict[str, str] = {}  # precision that the policy chose, by error line
        self._weights: dict[int, str] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Runs `func`. Stays active inside kernels of other libraries, to record their products."""
        kwargs, tensors = kwargs or {}, _tensors((args, kwargs))
        if self._operator is None or not isinstance(func, torch._ops.OpOverload):
            return self._run(func, args, kwargs, tensors)
        with self:
            result = func.decompose(*args, **kwargs)
        if result is not NotImplemented:
            return result
        result = func(*args, **kwargs)
        if func._overloadpacket in MATMULS:
            self._note(*args[func._overloadpacket in BIASED :][:2])
        self._alive.append(result)
        read, results = [*map(_storage, tensors)], [*map(_storage, _tensors(result))]
        if not self._derived.isdisjoint(read):
            self._derived.update(results)
        elif path := next((self._paths[storage] for storage in read if storage in self._paths), ""):
            self._paths |= dict.fromkeys(results, path)
        return result

    def _run(self, func: Any, args: Any, kwargs: Any, tensors: Sequence[Tensor]) -> Any:
        key = tensors[0].device.type.upper() if tensors else ""
        is_known = not is_of_other_library(func) or is_foreign_call(func, tensors)
        if is_known or key not in ("CPU", "CUDA") or not _has_kernel(func.name(), key):
            return func(*args, **kwargs)
        self._operator, self._paths = func, {**self._weights}
        self._derived = {_storage(value) for value in tensors} - self._weights.keys()
        try:
            with self:
                return func.redispatch(
                    torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key)), *args, **kwargs
                )
        finally:
            self._operator = None
            self._alive.clear()

    def _note(self, a: Tensor, b: Tensor) -> None:
        """Records the product of `a` and `b`. An operand computed from no data argument is a weight."""
        weights = [_storage(value) for value in (a, b) if _storage(value) not in self._derived]
        name = next(
            (layer_name("", self._paths[storage]) for storage in weights if storage in self._paths), ""
        )
        *batch, m, k = a.shape
        n = b.shape[-1] if b.ndim > 1 else 1
        reason, options = Reason(Code.OPAQUE, self._operator), self._compilation.options
        decision = options.policy.decide(Layer(name=name, role=Role.OTHER, module="", m=m, n=n, k=k))
        choice = decision.choice(self._gemm)
        if len(weights) == 1 and choice.formats is not None:
            self._refused[f"{name} {self._gemm}: {reason}".strip()] = choice.precision
        record = GemmRecord(
            name=name,
            role=str(Role.OTHER),
            gemm=str(self._gemm),
            batch=batch[0] if batch else 1,
            m=m,
            n=n,
            k=k,
            precision=UNQUANTIZED.name,
            reason=str(reason),
            code=str(reason.code),
            facts=reason.facts,
            dtype=str(a.dtype).removeprefix("torch."),
            kernel=str(self._operator),
        )
        self._records.append(record)

    def run(self, call: Callable[[], Any]) -> Any:
        """Returns the result of `call`, the first call. The products of it and of its backward are recorded.

        Raises `UnsupportedError` in strict mode if the policy quantizes one of them.
        """
        result = self._search(call, self._gemm)
        nodes: list[Any] = [value.grad_fn for value in _tensors(result) if value.grad_fn is not None]
        nodes += [node for view in nodes for node, _ in view.next_functions]
        function: Any = next((node._forward_cls for node in nodes if hasattr(node, "_forward_cls")), None)
        if function is not None:  # the `autograd.Function` of the compiled code, whose next backward counts
            backward = function.backward

            def searched(*args: Any) -> Any:
                result = self._search(lambda: backward(*args), Gemm.DGRAD)
                function.backward = staticmethod(backward)
                return result

            function.backward = staticmethod(searched)
        return result

    def _search(self, call: Callable[[], Any], gemm: Gemm) -> Any:
        """Runs `call`, and adds its products to the report as `gemm`."""
        self._gemm = gemm
        self._records.clear()  # records of a call that failed
        models = {**self._compilation.capture.tree.roots}  # the models that are not freed, alive in this call
        self._weights = {
            _storage(value): joined(outer, user_path(raw))
            for outer, root in models.items()
            for raw, value in chain(root.named_parameters(), root.named_buffers())
        }
        with self:
            result = call()
        self._compilation.add(self._records)
        if self._refused and self._compilation.options.strict:
            raise UnsupportedError.from_refused(self._refused, labels(self._refused.values()))
        return result


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _storage(value: Tensor) -> int:
    """Returns the identity of the memory of `value`, which its views share; 0 for sparse tensors."""
    return value.untyped_storage()._cdata if value.layout is torch.strided else 0
