"""Reports models without a plan, whose layers outside of compiled graphs are unknown.

The report has a note, and a record for each weight that no compiled graph reads. Strict mode raises.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Collection, Iterator

from torch import nn

from mxcompile.compiler.capture.capture import Capture
from mxcompile.compiler.session.options import Options
from mxcompile.compiler.session.session import no_plan, session_of
from mxcompile.errors import UnsupportedError
from mxcompile.formats import UNQUANTIZED
from mxcompile.models.names import joined, layer_name, rebased, user_path
from mxcompile.policy import Code, Gemm, Reason, Role
from mxcompile.report import REGISTRY, GemmRecord, Part

log = logging.getLogger(__name__)

_TABLES = (nn.Embedding, nn.EmbeddingBag)
_UNSEEN = (
    "the report may lack layers outside of its compiled graphs: remove the graph breaks"
    " (TORCH_LOGS=graph_breaks shows them)"
)


def check(capture: Capture, options: Options, twin: str = "") -> None:
    """Adds a note and records to the report of the model of `capture` if it has no plan.

    twin: path of another module that runs the code. Raises `UnsupportedError` in strict mode.
    """
    root, missing = capture.root, capture.planned.missing
    if root is None or not missing or capture.backward:
        return
    message = no_plan(root, missing)
    if options.strict and any(matrices(module) for module in root.modules()):
        raise UnsupportedError(f"strict: {message}; {_UNSEEN}")
    names_read = session_of(root).read
    if options.group not in names_read:
        log.warning("%s", message)
    read = names_read.setdefault(options.group, set())
    paths = [graph_input.path for graph_input in capture.inputs if graph_input.static]
    read.update(rebased(path, capture.prefix, twin) if twin else path for path in paths)
    REGISTRY.plan(root, options.group, tuple(records(root, read)), note=f"{message}; {_UNSEEN}")


def check_function(capture: Capture, options: Options, part: Part, frame: object) -> None:
    """Adds a note to the report of a compiled function that graph breaks split.

    part: report of one of its graphs. frame: Dynamo's number of the function. Raises `UnsupportedError` in
    strict mode.
    """
    if capture.root is None and capture.planned.missing and part.gemms:
        message = (
            f"a function {capture.planned.missing} has no plan, and its graph is only the code {capture.cut}"
        )
        if options.strict:
            raise UnsupportedError(f"strict: {message}; {_UNSEEN}, or compile the module that has its layers")
        REGISTRY.note(f"{message}; {_UNSEEN}", options.group, model=None, frame=frame)


def matrices(module: nn.Module) -> dict[str, nn.Parameter]:
    """Returns the parameters of `module` itself that may be weights of GEMMs, by name."""
    if isinstance(module, _TABLES):
        return {}
    owned = module._parameters.items()
    return {name: value for name, value in owned if value is not None and value.ndim > 1}


def records(root: nn.Module, read: Collection[str] = ()) -> Iterator[GemmRecord]:
    """Yields records for the weights of `root` whose paths are not in `read`."""
    for raw, module in root.named_modules():
        inside = joined(session_of(root).name, user_path(raw))
        for name, weight in matrices(module).items():
            path = joined(inside, name)
            if path in read:
                continue
            *batch, n, k = weight.shape
            reason = Reason(Code.NO_PLAN)
            yield GemmRecord(
                name=layer_name(inside, path),
                role=str(Role.OTHER),
                gemm=str(Gemm.FPROP),
                m=None,
                n=n,
                k=k,
                batch=math.prod(batch),
                precision=UNQUANTIZED.name,
                reason=str(reason),
                code=str(reason.code),
                module=type(module).__name__,
                dtype=str(weight.dtype).removeprefix("torch."),
            )
