"""Names are the user's: every layer is called what ``named_modules`` calls it."""

import pytest
import torch
from torch import Tensor, nn

import mxcompile
from mxcompile.compiler.capture.locate import steps_of


@pytest.mark.parametrize(
    ("source", "steps"),
    [
        ("L['self'].layers.0.fc", "layers.0.fc"),
        ("L['self']._modules['layers']._modules['0']._parameters['weight']", "layers.0.weight"),
        ("L['s'].__dict__['_modules']['inner'].__dict__['_modules']['d'].0", "inner.d.0"),
        ("L['s'].__dict__['_parameters']['w']", "w"),
        ("""L['s'].d._modules["it's"]._parameters['bias']""", "d.it's.bias"),
        ("L['s'].d.a-b.c d(e)", "d.a-b.c d(e)"),
        ("getattr(getattr(L['s'].d, 'a-b').x, '0')[1]", "d.a-b.x.0.1"),
        ("L['stages'][0].fc", "0.fc"),
        ("L['self']._orig_mod._fsdp_wrapped_module.layers.0", "layers.0"),
        ("L['self']", ""),
        ("G['fn'].__self__.fc", "fc"),
    ],
)
def test_source_has_the_steps_behind_its_variable(source: str, steps: str) -> None:
    variable, *path = steps_of(source)
    assert ".".join(path) == steps
    assert variable in source


class Keyed(nn.Module):
    """Layers and parameters under keys that are no identifiers."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(64, 64) for _ in range(2))
        self.named = nn.ModuleDict({key: nn.Linear(64, 64) for key in ("a-b", "it's", "3", "a b(c)")})
        self.matrices = nn.ParameterDict({"x-y": nn.Parameter(torch.randn(64, 64))})

    def forward(self, x: Tensor) -> Tensor:
        for layer in (*self.blocks, *self.named.values()):
            x = layer(x).relu()
        return x @ self.matrices["x-y"]


class Looking(Keyed):
    """The same with a ``__getattr__`` of its own, as models of diffusers and PEFT have."""

    def __getattr__(self, name: str) -> object:
        return super().__getattr__(name)


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner
        self.tail = nn.Sequential(nn.Linear(64, 64), nn.Sequential(nn.Linear(64, 64)))

    def forward(self, x: Tensor) -> Tensor:
        return self.tail(self.inner(x))


class AroundLooking(Around):
    def __getattr__(self, name: str) -> object:
        return super().__getattr__(name)


def paths(model: nn.Module) -> set[str]:
    """What layers of `model` may be called: its modules, and parameters that are layers by themselves."""
    modules = {path for path, _ in model.named_modules(remove_duplicate=False)}
    return modules | {path for path, _ in model.named_parameters(remove_duplicate=False)}


@pytest.mark.parametrize("outer", [Around, AroundLooking])
@pytest.mark.parametrize("inner", [Keyed, Looking])
def test_names_of_layers_match_module_paths_of_the_model(outer: type[Around], inner: type[Keyed]) -> None:
    model = outer(inner())
    names = {gemm.name for gemm in mxcompile.explain(model, torch.randn(32, 64)).gemms}
    linears = {path for path, module in model.named_modules() if isinstance(module, nn.Linear)}
    assert names == linears | {"inner.matrices.x-y"}
    assert names <= paths(model)


def test_a_rule_finds_layers_of_modules_that_look_attributes_up_themselves() -> None:
    policy = {"version": 1, "preset": "bf16", "rules": [{"match": {"name": "inner.*.1"}, "use": "mxfp8"}]}
    report = mxcompile.explain(AroundLooking(Looking()), torch.randn(32, 64), policy=policy)
    assert {gemm.name for gemm in report.gemms if gemm.precision == "mxfp8"} == {"inner.blocks.1"}
