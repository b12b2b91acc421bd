"""A C++ kernel as a node of Inductor's graph: buffers in, new contiguous buffers out, one function between.

Inductor writes the function into the code that it generates, compiles it with its own flags for its own
vector ISA, and calls it as it calls its own loops, from Python or from C++. The headers it needs are pasted
in front, so that what caches compare is all of the code, and an ahead-of-time package is complete.
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
from torch._inductor.select_algorithm import PartialRender
from torch._inductor.utils import Placeholder, parallel_num_threads
from torch._inductor.virtualized import V

from mxcompile.ops import Spec

_HEADERS = Path(__file__).parent

C_TYPES = {torch.bfloat16: "mxcompile::Bfloat16", torch.float32: "float"}
"""What the headers call elements; those of all other dtypes are bytes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CppBody:
    """The body of a kernel.

    header: of this folder, with the function that does it. body: statements, with names from `CppNames`.
    """

    header: str
    body: Callable[[CppNames], str]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Size:
    """A parameter of a kernel, in the place of the symbol that Inductor passes by its name."""

    name: str
    value: int

    def __str__(self) -> str:
        return str(self.value)


class CppNames:
    """C++ for the buffers and sizes of one kernel, known when Inductor writes it."""

    def __init__(self, kernel: CppTemplateKernel, nodes: Mapping[str, Any]) -> None:
        self._kernel = kernel
        self._nodes = nodes

    def pointer(self, name: str) -> str:
        """The first element of the buffer called `name`; null if there is none such, or nobody reads it."""
        node = self._nodes.get(name)
        if node is None:
            return "nullptr"
        const = "" if node.get_name() in self._kernel.args.output_buffers else "const "
        c_type = C_TYPES.get(node.get_dtype(), "uint8_t")
        first = self._kernel.index(node, [0] * len(node.get_size()))
        return f"reinterpret_cast<{const}{c_type}*>(&{first})"

    def sizes(self, *values: Any) -> str:
        """Sizes, which may be symbolic, as arguments."""
        return ", ".join(self._written(value) for value in values)

    def given(self, *values: Any) -> str:
        """Sizes as arguments that the caller of the kernel passes: shapes share the code, compiled once."""
        return ", ".join(
            self._parameter(int(value)) if isinstance(value, (int, sympy.Integer)) else self._written(value)
            for value in values
        )

    def _written(self, value: Any) -> str:
        return str(cexpr_index(self._kernel.rename_indexing(value)))

    def _parameter(self, value: int) -> str:
        parameters = self._kernel.args.sizevars
        name = f"size{len(parameters)}"
        parameters[_Size(name=name, value=value)] = name
        return name

    @property
    def threads(self) -> str:
        """How many threads Inductor gives a kernel."""
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


def obstacle() -> str:
    """Why there can be no C++ kernels in what is compiled now; "" if there can."""
    if config.cpu_backend != "cpp":
        return f"no C++ kernels: Inductor generates {config.cpu_backend} for CPUs"
    if (
        config.cpp.enable_unsafe_math_opt_flag
    ):  # rounding adds and subtracts, which a compiler may then remove
        return "no C++ kernels: config.cpp.enable_unsafe_math_opt_flag is set"
    return _no_compiler()


def usable() -> bool:
    """Whether kernels may be part of what is compiled now."""
    return not obstacle()


def stored(x: ir.TensorBox) -> Any:
    """`x` as a contiguous buffer in memory."""
    if any(size == 0 for size in x.get_size()):  # whose strides are others in Inductor and in PyTorch
        return ir.InputsKernel.unwrap_storage_for_input(ir.ExternKernel.copy_input(x))
    contiguous = ir.ExternKernel.require_contiguous(ir.ExternKernel.realize_input(x))
    return ir.InputsKernel.unwrap_storage_for_input(contiguous)


def call(
    code: CppBody, inputs: Mapping[str, Any], outputs: Mapping[str, Spec], device: torch.device
) -> list[ir.TensorBox]:
    """New tensors, `outputs` by name, which `code` makes of `inputs`, which `stored` gave."""
    layouts = [ir.FixedLayout(device, dtype, list(shape)) for shape, dtype in outputs.values()]
    several = len(layouts) > 1
    layout: Any = ir.MultiOutputLayout(device=device) if several else layouts[0]
    no_template: Any = None  # there is nothing to choose from
    buffer: Any = ir.CppTemplateBuffer(
        layout=layout,
        inputs=list(inputs.values()),
        make_kernel_render=functools.partial(_render, code, inputs, list(outputs)),
        template=no_template,
        choice=None,
    )
    buffer.allow_epilogue_fusion = False
    V.graph.no_fuse_buffer_names.add(buffer.get_name())
    if not several:
        return [ir.TensorBox.create(buffer)]
    buffer.outputs = [ir.MultiOutput(layout, buffer, [(list, index)]) for index, layout in enumerate(layouts)]
    return [ir.TensorBox.create(output) for output in buffer.outputs]


def _render(
    code: CppBody,
    inputs: Mapping[str, Any],
    outputs: Sequence[str],
    buffer: Any,
    flag_template_buffer_has_other_users: bool = False,
    epilogue_nodes: Sequence[Any] | None = None,
) -> tuple[CppTemplateKernel, Callable[[], str]]:
    """The kernel of `buffer` and the function that writes it: what Inductor asks of a template."""
    assert not epilogue_nodes, "the kernel has no place for epilogues"
    kernel = CppTemplateKernel(str(Placeholder.KERNEL_NAME), parallel_num_threads())
    buffers = zip(outputs, buffer.outputs or [buffer], strict=True)
    results = {name: node for name, node in buffers if node.get_name() not in V.graph.removed_buffers}

    def render() -> str:
        head = kernel.def_kernel(inputs=dict(inputs), outputs=results)
        body = code.body(CppNames(kernel, {**inputs, **results}))
        profile = kernel.maybe_codegen_profile()
        source = f'{text(code.header)}\nextern "C" {head}\n{{\n{profile}\n{body}\n}}\n'
        return str(PartialRender(source, kernel.render_hooks).finalize_all())

    return kernel, render


@functools.cache
def text(header: str) -> str:
    """`header` and what it includes of this folder."""
    lines = ["#include <torch/csrc/inductor/cpp_prefix.h>"]
    for line in (_HEADERS / header).read_text(encoding="utf-8").splitlines():
        local = line.removeprefix('#include "').removesuffix('"')
        lines.append(text(local) if line.startswith('#include "') else line)
    return "\n".join(lines)
