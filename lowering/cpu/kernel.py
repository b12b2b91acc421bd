"""A C++ kernel as a node of Inductor's graph: its function reads buffers and writes new contiguous buffers.

Inductor writes the function into the code that it generates, compiles it with its own flags for its own
vector ISA, and calls it as it calls its own loops, from Python or from C++. The code contains the text of the
headers, so that caches compare all of the code, and an ahead-of-time package is complete.
"""

from __future__ import annotations

import functools
import shutil
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sympy
import torch
import torch._inductor.compile_fx  # first: Inductor's lowerings and its C++ templates import each other
from torch._inductor import config, ir
from torch._inductor.codegen.cpp_template_kernel import CppTemplateKernel
from torch._inductor.codegen.cpp_utils import cexpr_index
from torch._inductor.cpu_vec_isa import pick_vec_isa
from torch._inductor.lowering import add, expand, to_dtype
from torch._inductor.select_algorithm import PartialRender
from torch._inductor.utils import Placeholder, parallel_num_threads
from torch._inductor.virtualized import V

from mxcompile.ops import Spec

_HEADERS = Path(__file__).parent

C_TYPES = {torch.bfloat16: "mxcompile::Bfloat16", torch.float32: "float"}
"""C++ types of elements; elements of all other dtypes are bytes."""

_CONTRACTION = "cpp.enable_floating_point_contract_flag"
"""The only setting whose text Inductor passes on to the compiler."""

EXACT: dict[str, Any] = {"cpp.enable_unsafe_math_opt_flag": False, _CONTRACTION: "off"}
"""On CPUs casts round by additions and subtractions, which a C++ compiler could otherwise remove or fuse."""

_WHOLE_STORES = "-fno-tree-loop-distribute-patterns"
"""Without it, GCC 12 for AVX-512 turns a loop of stores into a copy, and drops the stores to its source.

In kernels of Inductor that transpose two tensors of 16 bits, most elements would be wrong.
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """A size that the caller passes to a kernel: Inductor's map of symbols has it in place of a symbol."""

    name: str
    value: int

    def __str__(self) -> str:
        return str(self.value)


class CppNames:
    """C++ expressions for the buffers and sizes of one kernel, made while Inductor writes it."""

    def __init__(self, kernel: CppTemplateKernel, nodes: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._nodes = nodes

    def pointer(self, name: str) -> str:
        """Returns a pointer to the buffer `name`; null if it does not exist or Inductor removed it."""
        node = self._nodes.get(name)
        if node is None:
            return "nullptr"
        const = "" if node.get_name() in self._kernel.args.output_buffers else "const "
        c_type = C_TYPES.get(node.get_dtype(), "uint8_t")
        first = self._kernel.index(node, [0] * len(node.get_size()))
        return f"reinterpret_cast<{const}{c_type}*>(&{first})"

    def optional(self, name: str) -> str:
        """Returns a pointer to the buffer `name`; if it does not exist, null as a pointer to FP32."""
        return self.pointer(name) if name in self._nodes else "static_cast<const float*>(nullptr)"

    def size_arguments(self, *values: Any) -> str:
        """Returns sizes as arguments that the kernel's caller passes, so that shapes share compiled code."""
        return ", ".join(
            self._parameter(int(value))
            if isinstance(value, (int, sympy.Integer))
            else cexpr_index(self._kernel.rename_indexing(value))
            for value in values
        )

    def _parameter(self, value: int) -> str:
        parameters = self._kernel.args.sizevars
        name = f"size{len(parameters)}"
        parameters[_Size(name=name, value=value)] = name
        return name

    @property
    def threads(self) -> str:
        """The number of threads that Inductor gives a kernel."""
        return str(parallel_num_threads())


@functools.cache
def _no_compiler() -> str:
    from torch._inductor.cpp_builder import get_cpp_compiler
    from torch._inductor.exc import InvalidCxxCompiler

    try:
        compiler = get_cpp_compiler()
    except (InvalidCxxCompiler, RuntimeError, OSError) as error:
        return f"no C++ compiler: {type(error).__name__}"
    return "" if shutil.which(compiler) else f"no C++ compiler: {compiler} is not found"


def exact_settings() -> dict[str, Any]:
    """Returns the settings of Inductor under which the C++ compiler keeps every rounding and every store."""
    from torch._inductor import cpp_builder

    is_gcc = not _no_compiler() and cpp_builder.is_gcc()
    return EXACT | ({_CONTRACTION: f"{EXACT[_CONTRACTION]} {_WHOLE_STORES}"} if is_gcc else {})


def obstacle() -> str:
    """Returns the reason why the current compilation cannot use C++ kernels; "" if it can."""
    if config.cpu_backend != "cpp":
        return f"no C++ kernels: Inductor generates {config.cpu_backend} for CPUs"
    # with this flag the compiler may remove the additions and subtractions that round
    if config.cpp.enable_unsafe_math_opt_flag:
        return "no C++ kernels: config.cpp.enable_unsafe_math_opt_flag is set"
    return _no_compiler()


def takes(x: ir.TensorBox, *dtypes: torch.dtype) -> bool:
    """Whether C++ kernels can run on the device of `x`, and read elements of `dtypes` (see `obstacle`)."""
    is_cpu = x.get_device_or_error().type == "cpu"
    return is_cpu and all(dtype in C_TYPES for dtype in dtypes) and not obstacle()


def instructions() -> frozenset[str]:
    """Returns Inductor's names of the instructions for which it compiles C++, such as "avx2" or "amx_tile".

    Settings may exclude instructions that the CPU has: ``config.cpp.simdlen``, ``ATEN_CPU_CAPABILITY``.
    """
    return frozenset(str(pick_vec_isa()).split())


def stored(x: ir.TensorBox) -> Any:
    """Returns `x` as a contiguous buffer in memory."""
    if any(size == 0 for size in x.get_size()):  # Inductor and PyTorch give empty tensors different strides
        return ir.InputsKernel.unwrap_storage_for_input(ir.ExternKernel.copy_input(x))
    contiguous = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
    return ir.InputsKernel.unwrap_storage_for_input(contiguous)


Body = Callable[[CppNames], str]
"""Returns the C++ statements of a kernel."""


def call(
    header: str,
    body: Body,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Spec],
    absent: Mapping[str, Any] | None = None,
) -> list[ir.TensorBox]:
    """Returns a tensor for each of `outputs`, computed from `inputs`, which `stored` returned.

    header: file of this folder with the function that `body` calls. absent: empty buffers in place of outputs
    that other calls have, so that their code is the same.
    """
    absent = absent or {}
    device = next(iter(inputs.values())).get_device_or_error()
    layouts = [ir.FixedLayout(device, dtype, list(shape)) for shape, dtype in outputs.values()]
    several = len(layouts) > 1
    layout: Any = ir.MultiOutputLayout(device=device) if several else layouts[0]
    no_template: Any = None  # Inductor has no other kernel to choose
    buffer: Any = ir.CppTemplateBuffer(
        layout=layout,
        inputs=[*inputs.values(), *absent.values()],
        make_kernel_render=functools.partial(_render, header, body, inputs, list(outputs), absent),
        template=no_template,
        choice=None,
    )
    buffer.allow_epilogue_fusion = False
    V.graph.no_fuse_buffer_names.add(buffer.get_name())
    if not several:
        return [ir.TensorBox.create(buffer)]
    buffer.outputs = [ir.MultiOutput(layout, buffer, [(list, index)]) for index, layout in enumerate(layouts)]
    return [ir.TensorBox.create(output) for output in buffer.outputs]


def product(
    header: str,
    body: Body,
    inputs: Mapping[str, Any],
    bias: ir.TensorBox | None,
    size: list[Any],
    out_dtype: torch.dtype,
) -> ir.TensorBox:
    """Returns the product [M, N] of `inputs` (+ bias), as `call`; the kernel adds only a vector as bias."""
    inside = bias is not None and len(bias.get_size()) == 1
    if bias is not None and inside:
        inputs = {**inputs, "bias": stored(expand(bias, size[1:]))}
    alone = (inside or bias is None) and out_dtype in C_TYPES
    (matrix,) = call(header, body, inputs, {"out": (size, out_dtype if alone else torch.float32)})
    if alone:
        return matrix
    total: Any = matrix if bias is None or inside else add(matrix, bias)
    result: ir.TensorBox = to_dtype(total, out_dtype)
    return result


def _render(
    header: str,
    write: Body,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    absent: Mapping[str, Any],
    buffer: Any,
    flag_template_buffer_has_other_users: bool = False,
    epilogue_nodes: Sequence[Any] | None = None,
) -> tuple[CppTemplateKernel, Callable[[], str]]:
    """Returns the kernel of `buffer` and the function that writes it, as Inductor's templates do."""
    assert not epilogue_nodes, "the kernel has no place for epilogues"
    kernel = CppTemplateKernel(str(Placeholder.KERNEL_NAME), parallel_num_threads())
    buffers = zip(outputs, buffer.outputs or [buffer], strict=True)
    results = {name: node for name, node in buffers if node.get_name() not in V.graph.removed_buffers}
    results = dict(sorted({**results, **absent}.items()))

    def render() -> str:
        head = kernel.def_kernel(inputs=dict(inputs), outputs=results)
        body = write(CppNames(kernel, {**inputs, **results}))
        profile = kernel.maybe_codegen_profile().replace(str(Placeholder.KERNEL_NAME), Path(header).stem)
        profiler = "#include <torch/csrc/inductor/aoti_runtime/utils.h>\n" if profile else ""
        source = f'{profiler}{text(header)}\nextern "C" {head}\n{{\n{profile}\n{body}\n}}\n'
        return str(PartialRender(source, kernel.render_hooks).finalize_all())

    return kernel, render


@functools.cache
def text(header: str) -> str:
    """Returns the text of `header`, with this folder's headers in place of the lines that include them."""
    lines = ["#include <torch/csrc/inductor/cpp_prefix.h>"]
    for line in (_HEADERS / header).read_text(encoding="utf-8").splitlines():
        local = line.removeprefix('#include "').removesuffix('"')
        lines.append(text(local) if line.startswith('#include "') else line)
    return "\n".join(lines)
