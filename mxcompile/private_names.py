"""The names of PyTorch and Triton that are not public and that mxcompile uses: all of them, in one place.

A compiler for Inductor cannot do without them, and any release may rename them. What needs a name that is
missing falls back with a reason (`lowering.pipeline`) or fails where it is imported; `missing`, which
``mxcompile env`` prints, says which those are before anything is compiled. A test holds the table to the
source; `tests/packaging/names_in_wheel.py` holds it to a wheel that is not installed.
"""

from __future__ import annotations

import importlib
from typing import Any

USED: dict[str, tuple[str, ...]] = {
    "torch": (
        "Tensor._make_wrapper_subclass",
        "_C",
        "_dynamo",
        "_from_functional_tensor",
        "_functionalize_sync",
        "_functorch",
        "_guards",
        "_scaled_grouped_mm",
        "_scaled_mm",
        "compiler._is_compiling_flag",
        "ops._c10d_functional",
        "ops.aten._scaled_mm",
    ),
    "torch._C": ("_len_torch_function_stack",),
    "torch._compile": ("_disable_dynamo",),
    "torch._dispatch.python": ("enable_python_dispatcher",),
    "torch._dynamo": ("device_interface",),
    "torch._dynamo.backends.common": ("aot_autograd",),
    "torch._dynamo.eval_frame": (
        "OptimizedModule",
        "innermost_fn",
        "remove_from_cache",
    ),
    "torch._dynamo.utils": ("preserve_rng_state",),
    "torch._functorch": ("config",),
    "torch._functorch._aot_autograd.utils": ("make_boxed_func",),
    "torch._functorch.partitioners": ("min_cut_rematerialization_partition",),
    "torch._guards": (
        "CompileContext",
        "Guard",
        "TracingContext",
        "detect_fake_mode",
    ),
    "torch._inductor": (
        "config",
        "config._post_fusion_custom_pass",
        "config._pre_fusion_custom_pass",
        "debug",
        "debug._inductor_triton_kernel_to_post_grad_node_info",
        "ir",
        "list_mode_options",
    ),
    "torch._inductor.codecache": (
        "CppPythonBindingsCodeCache",
        "PyCodeCache",
    ),
    "torch._inductor.codegen.common": ("init_backend_registration",),
    "torch._inductor.codegen.cpp_template_kernel": ("CppTemplateKernel",),
    "torch._inductor.codegen.cpp_utils": ("cexpr_index",),
    "torch._inductor.codegen.subgraph": ("SubgraphChoiceCaller",),
    "torch._inductor.compile_fx": (
        "compile_fx",
        "compile_fx_inner",
    ),
    "torch._inductor.cpp_builder": ("get_cpp_compiler",),
    "torch._inductor.custom_graph_pass": (
        "CustomGraphPass",
        "CustomPartitionerFn",
        "CustomSchedulerPass",
    ),
    "torch._inductor.decomposition": ("select_decomp_table",),
    "torch._inductor.exc": ("InvalidCxxCompiler",),
    "torch._inductor.fx_passes.joint_graph": ("constant_fold_uniform_value",),
    "torch._inductor.fx_passes.post_grad": ("remove_noop_ops",),
    "torch._inductor.graph": ("GraphLowering",),
    "torch._inductor.kernel": ("mm",),
    "torch._inductor.kernel.mm_common": (
        "mm_grid",
        "persistent_mm_grid",
    ),
    "torch._inductor.lowering": (
        "empty_strided",
        "fallback_handler",
        "lowerings",
        "register_lowering",
        "to_dtype",
    ),
    "torch._inductor.ops_handler": ("OpsHandler",),
    "torch._inductor.runtime": ("triton_helpers",),
    "torch._inductor.runtime.cache_dir_utils": ("cache_dir",),
    "torch._inductor.scheduler": (
        "BaseSchedulerNode",
        "SchedulerNode",
    ),
    "torch._inductor.select_algorithm": (
        "AlgorithmSelectorCache",
        "ExternKernelCaller",
        "ExternKernelChoice",
        "PartialRender",
        "SymbolicGridFn",
        "TritonTemplate",
        "TritonTemplateCaller",
        "TritonTemplateKernel",
        "autotune_select_algorithm",
        "realize_inputs",
    ),
    "torch._inductor.utils": (
        "Placeholder",
        "get_num_sms",
        "parallel_num_threads",
        "sympy_product",
        "triton_type",
        "use_aten_gemm_kernels",
    ),
    "torch._inductor.virtualized": (
        "V",
        "ops",
    ),
    "torch._subclasses": ("fake_tensor",),
    "torch._subclasses.fake_tensor": (
        "DataDependentOutputException",
        "DynamicOutputShapeException",
        "FakeTensor",
        "FakeTensorMode",
        "unset_fake_temporarily",
    ),
    "torch._subclasses.functional_tensor": (
        "FunctionalTensor",
        "FunctionalTensorMode",
    ),
    "torch.export": (
        "_trace",
        "_trace._export",
    ),
    "torch.nn.utils.stateless": ("_reparametrize_module",),
    "torch.overrides": (
        "_pop_mode",
        "_push_mode",
    ),
    "torch.utils._mode_utils": ("no_dispatch",),
    "torch.utils._ordered_set": ("OrderedSet",),
    "torch.utils._python_dispatch": ("return_and_correct_aliasing",),
    "torch.utils._pytree": (
        "tree_flatten",
        "tree_leaves",
        "tree_map",
        "tree_map_only",
        "tree_unflatten",
    ),
    "torch.utils._sympy.functions": (
        "CeilDiv",
        "FloorDiv",
        "ModularIndexing",
    ),
    "triton.runtime": (
        "_allocation",
        "_allocation._allocator",
    ),
}
"""Names by module; of an attribute of a name, both with a dot between them."""


def missing() -> list[str]:
    """Those of `USED` that the installed versions lack, with their modules."""
    import torch._inductor.compile_fx  # noqa: F401 — parts of Inductor import each other, in its order

    return [
        f"{module}.{name}" for module, names in USED.items() for name in names if not _exists(module, name)
    ]


def _exists(module: str, name: str) -> bool:
    try:
        found: Any = importlib.import_module(module)
        for part in name.split("."):
            if not hasattr(found, part):
                found = importlib.import_module(f"{found.__name__}.{part}")
            else:
                found = getattr(found, part)
    except (ImportError, AttributeError):
        return False
    return True
