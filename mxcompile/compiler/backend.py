"""The backend: ``torch.compile(model, backend="mxfp8")``.

    Dynamo's graph → Inductor's compile_fx, with three hooks:
        joint graph      the passes: find, classify, decide, rewrite, share, save
        partitioned      what is saved for backward is counted
        before lowering  mx GEMMs become what the target runs

Of a graph that is but a part of a model, the plan of the whole says what its layers are (see `plans`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Never, cast

from torch import fx, nn
from torch._inductor.compile_fx import compile_fx

from mxcompile.compiler.calls import delayed_scales
from mxcompile.compiler.calls.compiled_graph import CompiledGraph
from mxcompile.compiler.calls.delayed_scales import DelayedScales
from mxcompile.compiler.calls.sampling import follow, guard, sampling
from mxcompile.compiler.capture.capture import captured
from mxcompile.compiler.decompositions import table
from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.hooks.exporting import guard_exports
from mxcompile.compiler.hooks.trace import copied
from mxcompile.compiler.options import Options
from mxcompile.compiler.reading import read_early
from mxcompile.compiler.reporting import sharing
from mxcompile.compiler.reporting.attempts import watch_attempts
from mxcompile.compiler.reporting.checks import check_plan
from mxcompile.compiler.reporting.entry import publish, recall
from mxcompile.compiler.session.session import session_of
from mxcompile.errors import OptionError
from mxcompile.lowering.targets import AUTO, resolve
from mxcompile.models.blocks import Blocks
from mxcompile.models.tree import path_in
from mxcompile.models.wrappers import users_own
from mxcompile.policy import Policy
from mxcompile.rules import name_signature
from mxcompile.versions import warn_once
from mxcompile.watch import Watch

Compiled = Callable[..., Any]


class Backend:
    """The backend as a value, for ``torch.compile`` or ``module.compile``.

    policy, report, target, strict, inductor, watch: as in ``options``. mode: as for Inductor. root: the model
    that layer names are relative to; by default the module ``torch.compile`` was applied to. block: the
    part of `root` this backend is for, when blocks are compiled one by one: Dynamo reuses a block's code
    for the next one if their backends are equal, and these are if the policy treats both blocks alike.
    parts: paths of the modules of `root` that are compiled, where the others stay as they are.
    Raises `OptionError`, `PolicyError` or `TargetError`.
    """

    __name__ = "mxfp8"
    """As registered. For others Dynamo keeps weak references, which `torch.utils.swap_tensors` refuses."""

    def __init__(
        self,
        *,
        policy: Policy | str | Path | Mapping[str, Any] | None = None,
        report: str | Path | None = None,
        target: str = AUTO,
        strict: bool = False,
        inductor: Mapping[str, Any] | None = None,
        watch: Watch | str | Path | None = None,
        mode: str | None = None,
        root: nn.Module | None = None,
        block: nn.Module | None = None,
        parts: tuple[str, ...] | None = None,
        **unknown: Never,
    ) -> None:
        given = {"policy": policy, "report": report, "target": target, "strict": strict, "inductor": inductor}
        self.options = Options.parse(mode, {**given, "watch": watch, **unknown})
        self.root = root
        self.parts = parts
        if root is not None and delayed_scales.needed(self.options.policy):
            delayed_scales.expect(root)
        options = self.options
        self._identity = options.fingerprint(), options.report, id(options.watch), self._within(block)

    def _within(self, block: nn.Module | None) -> object:
        """How the name patterns of the policy fall on the layers of `block`, in its order."""
        if block is None:
            return None
        if self.root is None:
            raise OptionError("Backend(block=…) needs root=…, the model the block is a part of")
        path = path_in(self.root, block)
        if path is None:
            raise OptionError("Backend(block=…) is not a module of root")
        return name_signature(self.options.policy, block, path, Blocks.of(self.root))

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], *, name: str | None = None, **others: Any
    ) -> Compiled:
        """Compile `gm`; Dynamo calls it. name: name of the compiled region."""
        if others:
            raise OptionError(f"{' and '.join(others)}: give Backend(…) this, not torch.compile")
        return compile_graph(gm, example_inputs, self.options, self.root, self.parts, name)

    def __deepcopy__(self, memo: object) -> Backend:
        """Itself, of its own `root`: Lightning copies what ``torch.compile`` is called with."""
        return self

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Backend) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    def __repr__(self) -> str:
        return f"Backend(policy={self.options.policy.label!r}, target={self.options.target!r})"


def mxfp8(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    mode: str | None = None,
    options: Mapping[str, Any] | Options | None = None,
    name: str | None = None,
) -> Compiled:
    """The entry point that ``backend="mxfp8"`` names; Dynamo calls it with each graph.

    options: as ``torch.compile`` got them, or as they were read then (see `reading`). name: of the compiled
    region, where ``torch.compile`` takes one.
    """
    return compile_graph(gm, example_inputs, Options.parse(mode, options), None, name=name)


def compile_graph(
    gm: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: Options,
    root: nn.Module | None,
    parts: tuple[str, ...] | None = None,
    name: str | None = None,
) -> Compiled:
    """Compile one captured graph and put it in the report."""
    warn_once()
    capture = captured(gm, example_inputs, root)
    options = follow(options, capture)
    if capture.root is not None:
        session_of(users_own(capture.root)).policies[options.group] = options.policy
    tapped = delayed_scales.tap(gm, example_inputs, capture, options.policy)
    compilation = Compilation(
        options,
        capture,
        gm,
        resolve(options.target, capture.device),
        tapped=delayed_scales.needed(options.policy),
    )
    if tapped is not None:
        gm, example_inputs = tapped.gm, [*example_inputs, *tapped.states]
    guard(compilation, example_inputs)
    check_plan(compilation, parts)
    sharing.guard(capture, options.policy, unlimited=parts is not None)

    region: dict[str, Any] = {} if name is None else {"compile_region_name": name}

    def compiled(graph: fx.GraphModule, one: Compilation) -> Compiled:
        patches, known = one.config_patches(), table()
        code = compile_fx(graph, example_inputs, config_patches=patches, decompositions=known, **region)
        return cast(Compiled, code)

    stored = recall(compilation)
    return CompiledGraph(
        compiled(gm, compilation),
        attribution=publish(compilation, stored),
        sampling=sampling(compilation, example_inputs, lambda one: compiled(copied(gm), one)),
        scales=DelayedScales(tapped, dict(compilation.part.histories), capture.root) if tapped else None,
    )


def _options_of(backend: Any, keywords: Mapping[str, Any]) -> Options | None:
    """The options of `backend`, called with `keywords`; None if it is another one."""
    if backend is mxfp8:
        return Options.parse(keywords.get("mode"), keywords.get("options"))
    options = getattr(backend, "options", None)
    return options if isinstance(options, Options) else None


read_early(lambda backend: backend is mxfp8)
guard_exports(lambda backend: backend is mxfp8 or isinstance(backend, Backend))
watch_attempts(_options_of)
