"""The callable that Dynamo gets for a graph.

    call  →  scales         adds an input for each weight, from the amax histories
          →  attribution    records the model that runs the code
          →  sampling       runs the code or, in a sampled step, the measuring code
          →  saved codes    shows codes to saved-tensor hooks as bytes

Each step is optional. The first call after the compile drops the weak references that the compile kept.
"""

from __future__ import annotations

from collections.abc import Callable, MutableMapping
from typing import Any

from torch._dynamo.output_graph import OutputGraph
from torch._guards import TracingContext
from torch._subclasses.fake_tensor import FakeTensorMode

from mxcompile.compiler.calls import saved_codes
from mxcompile.compiler.calls.delayed_scales import DelayedScales
from mxcompile.compiler.calls.hidden_products import HiddenProducts
from mxcompile.compiler.calls.sampling import Sampling
from mxcompile.compiler.reporting.shared_code import Attribution
from mxcompile.compiler.session.frames import TORCH, frames

Tables = tuple[MutableMapping[Any, Any], ...]


class CompiledGraph:
    """Compiled code of a graph, with the optional steps around each call."""

    def __init__(
        self,
        code: Callable[..., Any],
        *,
        attribution: Attribution | None,
        sampling: Sampling | None,
        scales: DelayedScales | None,
        references: Tables,
        hidden: HiddenProducts | None = None,
    ) -> None:
        self._code = code
        self._attribution = attribution
        self._sampling = sampling
        self._scales = scales
        self._references = references
        self._hidden = hidden

    def __call__(self, *args: Any) -> Any:
        """Runs the code."""
        return self._run(*args) if self._scales is None else self._scales.run(self._run, args)

    def _run(self, *args: Any) -> Any:
        if self._references and TracingContext.try_get() is None:  # DDP's splitter calls while compiling
            for table in self._references:
                table.clear()
            self._references = ()
        if self._attribution is not None:
            self._attribution.note(args)
        if self._hidden is None or TracingContext.try_get() is not None:
            return self._call(args)
        result = self._hidden.run(lambda: self._call(args))
        self._hidden = None
        return result

    def _call(self, args: Any) -> Any:
        with saved_codes.in_call():
            return self._code(*args) if self._sampling is None else self._sampling.run(self._code, args)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or self._scales is not None:  # the bare code lacks the scale inputs
            raise AttributeError(name)
        return getattr(self._code, name)  # torch serializes code by its attributes


def weak_references() -> Tables:
    """Returns the tables of weak references to the user's tensors, which guards read until the compile ends.

    ``torch.utils.swap_tensors`` rejects tensors with weak references. Dynamo drops its own at the end of a
    compile, but from torch 2.15 on only for backends given by name, not for a `Backend`.
    """
    context = TracingContext.try_get()
    if context is None:
        return ()
    modes = [] if context.fake_mode is None else [context.fake_mode]
    # a read of a user frame's locals keeps its objects alive
    torch_frames = (frame for frame in frames() if frame.f_code.co_filename.startswith(TORCH))
    owners = (frame.f_locals.get("self") for frame in torch_frames)
    graph = next((owner for owner in owners if isinstance(owner, OutputGraph)), None)
    if isinstance(mode := getattr(graph, "_old_fake_mode", None), FakeTensorMode):
        modes.append(mode)  # Dynamo's mode of the same graph
    describers = (mode.fake_tensor_converter.meta_converter.describer for mode in modes)
    return (
        context.tensor_to_context,
        *(table for describer in describers for table in (describer.lookup_tensor, describer.lookup_storage)),
    )
