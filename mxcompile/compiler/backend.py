"""The backend of ``torch.compile(model, backend="mxfp8")``.

    Dynamo's graph → Inductor's compile_fx, with three hooks:
        joint graph      the passes: find, classify, decide, rewrite, share, save
        partitioned      the tensors saved for backward are compressed and counted
        before lowering  mx GEMMs become kernels of the target

For a graph that covers only a part of a model, layer roles come from the plan of the whole model (see
`session`).
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Never, cast

from torch import fx, nn
from torch._inductor.compile_fx import compile_fx

from mxcompile.compiler.calls import delayed_scales, saved_codes
from mxcompile.compiler.calls.compiled_graph import CompiledGraph, weak_references
from mxcompile.compiler.calls.delayed_scales import DelayedScales
from mxcompile.compiler.calls.hidden_products import hidden_products
from mxcompile.compiler.calls.sampling import Compiled, follow, guard, sampling
from mxcompile.compiler.capture.capture import captured
from mxcompile.compiler.capture.prepare import copied
from mxcompile.compiler.hooks.compilation import Compilation
from mxcompile.compiler.hooks.exporting import guard_exports
from mxcompile.compiler.reporting import sharing
from mxcompile.compiler.reporting.attempts import watch_attempts
from mxcompile.compiler.reporting.checks import check_plan
from mxcompile.compiler.reporting.entry import publish, stored_part
from mxcompile.compiler.session.decompositions import table
from mxcompile.compiler.session.options import Options
from mxcompile.compiler.session.session import session_of
from mxcompile.errors import OptionError
from mxcompile.lowering.targets import AUTO, resolve
from mxcompile.models.blocks import Blocks
from mxcompile.models.tree import path_in
from mxcompile.models.wrappers import user_model
from mxcompile.policy import Policy
from mxcompile.rules import name_signature
from mxcompile.versions import warn_once
from mxcompile.watch import Watch

log = logging.getLogger(__name__)


class Backend:
    """The backend as an object, for ``torch.compile(model, backend=Backend(…))`` or ``module.compile``.

    Dynamo reuses the code of one block for the next if their backends are equal. Two backends with `block`
    are equal if the policy treats both blocks equally.

    Args:
        policy: Policy file, preset, dict or `Policy`. Default: the preset ``nvidia``.
        report: File of the report. Its suffix selects the form.
        target: Name of a target or a chip. Default: the device of the inputs.
        strict: Whether to raise instead of a fallback to BF16, and for policy rules without effect.
        inductor: Overrides of ``torch._inductor.config``.
        watch: `Watch`, file for its records, or ``"nonfinite"``.
        mode: Mode of Inductor, as in ``torch.compile(mode=…)``.
        root: Model that layer names are relative to. Default: the module that is compiled.
        block: Part of `root` that this backend compiles, if blocks are compiled one by one.
        parts: Paths of the compiled modules of `root`, if the others stay eager.

    Raises:
        OptionError: An option is unknown or has an invalid value.
        PolicyError: The policy is invalid.
        TargetError: The target is unknown.

    Examples:
        >>> model = torch.compile(model, backend=Backend(policy="ocp", strict=True))
    """

    __name__ = "mxfp8"
    """Name in Dynamo's messages."""

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
        named = {"policy": policy, "report": report, "target": target, "strict": strict, "inductor": inductor}
        self.options = Options.parse(mode, {**named, "watch": watch, **unknown})
        self._root = None if root is None else weakref.ref(root)
        self.parts = parts
        if root is not None and delayed_scales.needed(self.options.policy):
            delayed_scales.expect(root)
        within: object = None  # which rules select each layer of `block`
        if block is not None:
            if root is None:
                raise OptionError("Backend(block=…) needs root=…, the model that contains the block")
            path = path_in(root, block)
            if path is None:
                raise OptionError(
                    f"Backend(block=…) is a {type(block).__name__} that root, a {type(root).__name__}, does"
                    " not contain: pass a module of root"
                )
            within = name_signature(self.options.policy, block, path, Blocks.from_model(root))
        options = self.options
        self._identity = options.fingerprint(), options.report, id(options.watch), within

    def __call__(
        self, gm: fx.GraphModule, example_inputs: Sequence[Any], *, name: str | None = None, **others: Any
    ) -> Compiled:
        """Compiles `gm` for Dynamo. name: name of the compiled region."""
        if others:
            raise OptionError(f"torch.compile got {' and '.join(others)}: pass this to Backend(…) instead")
        if self._root is not None and self.root is None:
            log.warning(
                "Backend(root=…): the model was freed, so names and roles come from the part that runs"
            )
        return compile_graph(gm, example_inputs, self.options, self.root, self.parts, name)

    @property
    def root(self) -> nn.Module | None:
        """Model that layer names are relative to. The backend, which Dynamo keeps, lets it be freed."""
        return None if self._root is None else self._root()

    def __deepcopy__(self, memo: object) -> Backend:
        """Returns itself with the same `root`, because Lightning copies the arguments of torch.compile."""
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
    """Compiles one graph for Dynamo; entry point of ``backend="mxfp8"``.

    options: the dict from ``torch.compile``, or the `Options` that were parsed then (see `_read_early`).
    name: name of the compiled region, in torch versions that pass one.
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
    """Compiles one captured graph and adds it to the report."""
    warn_once()
    capture = captured(gm, example_inputs, root)
    options = follow(options, capture)
    if capture.root is not None:
        session_of(user_model(capture.root)).policies[options.group] = options.policy
    tapped = delayed_scales.tap(gm, example_inputs, capture, options.policy)
    target, has_scales = resolve(options.target, capture.device), delayed_scales.needed(options.policy)
    compilation = Compilation(options, capture, gm, target, tapped=has_scales)
    if tapped is not None:
        gm, example_inputs = tapped.gm, [*example_inputs, *tapped.states]
    guard(compilation, example_inputs)
    check_plan(compilation, parts)
    sharing.guard(capture, options.policy, unlimited=parts is not None)

    region: dict[str, Any] = {} if name is None else {"compile_region_name": name}

    def compiled(graph: fx.GraphModule, part: Compilation) -> Compiled:
        patches, rules = part.config_patches(), table()
        with saved_codes.in_compile():
            code = compile_fx(graph, example_inputs, config_patches=patches, decompositions=rules, **region)
        return cast(Compiled, code)

    stored = stored_part(compilation)  # before the compile: it sets the token in Inductor's cache keys
    return CompiledGraph(
        compiled(gm, compilation),
        attribution=publish(compilation, stored),
        sampling=sampling(compilation, example_inputs, lambda part: compiled(copied(gm), part)),
        scales=DelayedScales(tapped, dict(compilation.part.histories), capture) if tapped else None,
        references=weak_references(),
        hidden=hidden_products(compilation, gm),
    )


def _options_of(backend: Any, keywords: Mapping[str, Any]) -> Options | None:
    """Returns the options of `backend` called with `keywords`, or None for a backend of another package."""
    if backend is mxfp8:
        return Options.parse(keywords.get("mode"), keywords.get("options"))
    options = getattr(backend, "options", None)
    return options if isinstance(options, Options) else None


class _Arguments(dict[str, Any]):
    """Keyword arguments of the backend. Setting ``mode`` or ``options`` calls `Options.parse`."""

    def __setitem__(self, key: str, value: Any) -> None:
        if key == "mode":
            Options.parse(value)
        super().__setitem__(key, Options.parse(None, value) if key == "options" else value)


def _read_early() -> None:
    """Makes ``torch.compile`` parse the options when it is called.

    It stores the user's dict in a wrapper, and Dynamo compares wrappers by this dict before it reuses
    compiled code. A changed policy file of the same name would then count as the old policy, and a change of
    the dict would apply to models that are compiled already. The wrapper therefore stores parsed `Options`,
    which compare by content and do not change. Equal options share code as before.

    The wrapper's attribute ``kwargs`` becomes a property. A patched constructor would miss the first call of
    a process, because that call loads this backend within the constructor. The wrapper's class is private. If
    it has another form, the options are parsed when each graph is compiled.
    """
    try:
        from torch import _TorchCompileWrapper
    except ImportError:
        return

    def record(wrapper: Any, arguments: dict[str, Any]) -> None:
        if vars(wrapper).get("compiler_fn") is mxfp8:
            items, arguments = arguments, _Arguments()
            for key, value in items.items():
                arguments[key] = value
        vars(wrapper)["kwargs"] = arguments

    _TorchCompileWrapper.kwargs = property(lambda wrapper: vars(wrapper)["kwargs"], record)  # type: ignore[assignment]


_read_early()
guard_exports(lambda backend: backend is mxfp8 or isinstance(backend, Backend))
watch_attempts(_options_of)
