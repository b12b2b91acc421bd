"""Layers have the names of ``named_modules``, however a forward is written, bound, decorated or called."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.blocks import WIDTH, FeedForward
from helpers.eager_backend import EagerBackend
from helpers.made import Made
from helpers.reports import EVERYTHING, all_gemms
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mxcompile

Forward = Callable[..., Any]


def positional(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return wrapper


def by_keyword(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        bound = dict(zip(("self", "x"), args, strict=False)) | kwargs
        return forward(**bound)

    return wrapper


def from_list(forward: Forward) -> Forward:
    @functools.wraps(forward)
    def wrapper(*args: Any) -> Any:
        positionals = [list(args)]
        return forward(*positionals[0])

    return wrapper


class Descriptor:
    """A decorator that is a class, and gives partials instead of methods."""

    def __init__(self, forward: Forward) -> None:
        self.forward = forward

    def __get__(self, owner: Any, kind: type) -> Any:
        return functools.partial(self.forward, owner)


DECORATORS: dict[str, Callable[[Forward], Any]] = {
    "positional": positional,
    "by keyword": by_keyword,
    "from a list": from_list,
    "descriptor": Descriptor,
}


class Block(FeedForward):
    """With a place at which the graph can be broken."""

    def forward(self, x: Tensor) -> Tensor:
        h = F.gelu(self.up(x))
        here()
        return x + self.down(h)


class Stack(nn.Module):
    def __init__(self, blocks: type[Block] = Block) -> None:
        super().__init__()
        self.layers = nn.ModuleList(blocks() for _ in range(2))
        self.head = nn.Linear(WIDTH, 32)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        here()
        return self.head(x)


BREAKS = False


def here() -> None:
    """A place at which the graph is broken, if tests ask for it."""
    if BREAKS:
        torch._dynamo.graph_break()


@pytest.fixture(params=[False, True], ids=["whole", "broken"])
def breaks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    monkeypatch.setitem(globals(), "BREAKS", request.param)
    return bool(request.param)


def decorated(name: str) -> nn.Module:
    decorate = DECORATORS[name]
    block = type("DecoratedBlock", (Block,), {"forward": decorate(Block.forward)})
    return type("DecoratedStack", (Stack,), {"forward": decorate(Stack.forward)})(block)


def compiled(model: nn.Module, **options: Any) -> set[tuple[str, str]]:
    """Names and precisions of the layers of `model`, compiled whole."""
    torch.compile(model, backend=EagerBackend(**options))(torch.randn(32, WIDTH)).sum().backward()
    return precisions()


def precisions() -> set[tuple[str, str]]:
    return {(gemm.name, gemm.precision) for gemm in all_gemms()}


def explained(model: nn.Module) -> set[str]:
    return {gemm.name for gemm in mxcompile.explain(model, torch.randn(32, WIDTH)).gemms}


def linears(model: nn.Module) -> set[str]:
    return {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}


def keeping(name: str) -> dict[str, Any]:
    """The policy that quantizes every layer but those called `name`."""
    return {"version": 1, "rules": [{"match": {"name": name}, "use": "bf16"}, *EVERYTHING["rules"]]}


@pytest.mark.parametrize("name", DECORATORS)
def test_rules_by_name_reach_layers_of_decorated_forwards(name: str, breaks: bool) -> None:
    model = decorated(name)
    names = linears(model)
    assert explained(model) == names
    kept = {"layers.0.up", "layers.0.down"}
    expected = {(path, "bf16" if path in kept else "mxfp8") for path in names}
    strict = not breaks  # a loop with a break is left to Python
    assert compiled(model, policy=keeping("layers.0.*"), strict=strict) == expected


class Pair(Made, first=Block, second=Block):
    """Two blocks."""

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        here()
        return self.second(x)


class Encoder(Pair):
    """Blocks that another method than ``forward`` runs too."""

    encode = Pair.forward

    def forward(self, x: Tensor) -> Tensor:
        return self.encode(x)


@pytest.mark.parametrize("method", ["forward", "encode"])
def test_method_that_is_compiled_alone_names_layers_by_its_model(method: str, breaks: bool) -> None:
    model = Encoder()
    run = torch.compile(getattr(model, method), backend=EagerBackend(policy=keeping("second.up")))
    run(torch.randn(32, WIDTH)).sum().backward()
    assert precisions() == {(path, "bf16" if path == "second.up" else "mxfp8") for path in linears(model)}


class Replaced(Stack):
    """Blocks whose ``forward`` is replaced on the instance: a closure, a method, a partial."""

    def __init__(self) -> None:
        super().__init__()
        first, second = self.layers
        inner = first.forward
        first.forward = lambda *args: inner(*args)  # type: ignore[method-assign]
        second.forward = types.MethodType(type(second).forward, second)  # type: ignore[method-assign]
        self.layers.append(third := Block())
        third.forward = functools.partial(type(third).forward, third)  # type: ignore[method-assign]


class Borrowing(nn.Module):
    """Calls the forward of another module, had as a method, by an object, by a property."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.run = self.blocks[0].forward
        self.holder = types.SimpleNamespace(inner=[self.blocks[1]])

    @property
    def last(self) -> nn.Module:
        return self.blocks[2]

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.holder.inner[0](self.run(x)))


class Recomputed(Stack):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        return self.head(x)


class Functional(Made, first=Block, second=Block):
    """Layers that a decorated function runs, which has the module as an argument."""

    @positional
    def forward(self, x: Tensor) -> Tensor:
        return both(self.second, both(self.first, x))


@positional
def both(block: Block, x: Tensor) -> Tensor:
    h = F.linear(x, block.up.weight).relu()
    here()
    return F.linear(h, block.down.weight)


def nested() -> nn.Module:
    return nn.Sequential(nn.Sequential(Block()), Block())


@pytest.mark.parametrize("make", [Replaced, Borrowing, Functional, nested])
def test_layers_that_other_code_runs_keep_their_names(make: Callable[[], nn.Module], breaks: bool) -> None:
    model = make()
    assert explained(model) == {name for name, _ in compiled(model)} == linears(model)


def test_checkpoint_around_decorated_forwards_keeps_names() -> None:
    kind = type("DecoratedRecomputed", (Recomputed,), {"forward": positional(Recomputed.forward)})
    model = kind(type("DecoratedBlock", (Block,), {"forward": positional(Block.forward)}))
    assert {name for name, _ in compiled(model)} == linears(model)


class Unregistered(nn.Module):
    """Blocks in plain lists and dicts, which are no modules: their paths are the steps to them."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks, self.tail = [Block(), Block()], nn.Linear(WIDTH, WIDTH)
        self.deep = {"a": [(nn.Linear(WIDTH, WIDTH),)]}

    @positional
    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return self.tail(self.deep["a"][0][0](x))


def test_layers_of_modules_in_a_plain_list_are_named_by_it(breaks: bool) -> None:
    model = Unregistered()
    names = {f"blocks.{index}.{layer}" for index in range(2) for layer in ("up", "down")}
    names |= {"tail", "deep.a.0.0"}
    assert explained(model) == {name for name, _ in compiled(model)} == names


class Adapter:
    def __init__(self, side: Any) -> None:
        self.side = side

    def __call__(self, block: nn.Module, args: Any, out: Tensor) -> Tensor:
        return out + times(self.side, args[0])


def times(side: Any, x: Tensor) -> Tensor:
    return side(x) if isinstance(side, nn.Module) else F.linear(x, side)


def hook_of(way: str, side: Any) -> Callable[..., Tensor]:
    if way == "closure":
        return lambda block, args, out: out + times(side, args[0])
    if way == "partial":
        return functools.partial(lambda side, block, args, out: out + times(side, args[0]), side)
    return Adapter(side) if way == "object" else Adapter(side).__call__


@pytest.mark.parametrize("way", ["closure", "partial", "object", "method"])
@pytest.mark.parametrize("kind", ["module", "tensor"])
def test_layer_held_by_a_hook_is_named_by_module_and_variable(way: str, kind: str, breaks: bool) -> None:
    if (way, kind, breaks) == ("partial", "tensor", True):
        pytest.skip("for the frame of the hook its tensor is an argument")
    model = Pair()
    model.first.register_forward_hook(
        hook_of(way, nn.Linear(WIDTH, WIDTH) if kind == "module" else torch.randn(WIDTH, WIDTH))
    )
    names = linears(model) | {"first.side"}
    assert explained(model) == names
    expected = {(name, "bf16" if name == "second.up" else "mxfp8") for name in names}
    assert compiled(model, policy=keeping("second.up"), strict=True) == expected


class Repeated(Made, layers=lambda: nn.ModuleList([Block()] * 3)):
    """One block under three paths, of which the code takes the last two."""

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers[1:]:
            x = layer(x)
        return x


def test_block_with_many_paths_has_the_first(breaks: bool) -> None:
    names = {"layers.0.up", "layers.0.down"}
    assert explained(Repeated()) == {name for name, _ in compiled(Repeated())} == names


def test_function_of_one_model_behind_a_decorator_names_layers_by_the_model() -> None:
    model = Stack()

    @torch.compile(backend=EagerBackend())
    @positional
    def step(containers: dict[str, Any], x: Tensor) -> Tensor:
        return containers["models"][0](x)

    step({"models": (model,)}, torch.randn(32, WIDTH))
    assert {gemm.name for gemm in all_gemms()} == linears(model)


def test_module_stack_of_dynamo_has_the_id_of_each_module() -> None:
    """The key of an entry is the module's ``id``: without it, names would follow from Dynamo's text alone."""
    model, stacks = decorated("positional"), []

    def backend(gm: torch.fx.GraphModule, _: Any) -> Any:
        stacks.extend(node.meta.get("nn_module_stack") for node in gm.graph.nodes)
        return gm.forward

    torch.compile(model, backend=backend)(torch.randn(32, WIDTH))
    innermost = {next(reversed(stack)).partition("@")[0] for stack in stacks if stack}
    assert innermost >= {str(id(module)) for module in model.modules() if isinstance(module, nn.Linear)}


def unread(module: nn.Module) -> Callable[[Tensor], Any]:
    """A call of `module` that Dynamo does not read, so that its weights are no inputs of the graph."""

    @torch._dynamo.nonstrict_trace
    def call(x: Tensor) -> Any:
        return module(x)

    return call


class Unread(nn.Module):
    """Calls a block that is a module of it, and one that only a function holds."""

    def __init__(self) -> None:
        super().__init__()
        self.block, self.last = Block(), nn.Linear(WIDTH, WIDTH)
        self.inner, self.other = unread(self.block), unread(Block())

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.other(self.inner(x)))


def test_weights_in_functions_that_dynamo_does_not_read_have_names() -> None:
    rule = {"match": {"name": ["*.up", "*.down", "last"]}, "use": "mxfp8"}
    policy = {"version": 1, "preset": "bf16", "rules": [rule]}
    torch.compile(Unread(), backend=EagerBackend(policy=policy, strict=True))(torch.randn(32, WIDTH))
    names = {"block.up", "block.down", "module.up", "module.down", "last"}
    assert precisions() == {(name, "mxfp8") for name in names}


def test_weights_of_a_function_that_dynamo_does_not_read_have_names() -> None:
    model = Stack()
    call = unread(model)
    torch.compile(lambda x: call(x) + 1, backend=EagerBackend())(torch.randn(32, WIDTH))
    assert {gemm.name for gemm in all_gemms()} == linears(model)
