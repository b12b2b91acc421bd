"""The options of the backend: every mistake is an error that says what is allowed."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.made import Made
from torch import nn
from torch._dynamo.exc import BackendCompilerFailed

import mxcompile
from mxcompile import Backend
from mxcompile.compiler.session.options import Options
from mxcompile.errors import MXCompileError, OptionError, PolicyError, TargetError
from mxcompile.policy import Policy

OPTIONS_ERRORS = {
    "typo in a key": (
        {"polcy": "nvidia"},
        OptionError,
        "unknown option 'polcy' (did you mean 'policy'?); allowed: policy, report, target, strict, inductor",
    ),
    "capital in a key": ({"Target": "cpu"}, OptionError, "(did you mean 'target'?)"),
    "key of Inductor": ({"max_autotune": True}, OptionError, "unknown option 'max_autotune'; allow"),
    "number for a key": ({1: 2}, OptionError, "unknown option 1; allowed: policy"),
    "number for strict": ({"strict": 1}, OptionError, "'strict' must be True or False, found 1"),
    "word for strict": ({"strict": "no"}, OptionError, "'strict' must be True or False, found 'no'"),
    "number for target": ({"target": 90}, OptionError, "option 'target' must be a name, found 90"),
    "unknown target": (
        {"target": "gfx95"},
        TargetError,
        "unknown target 'gfx95' (did you mean 'gfx950'?); allowed: auto, cpu, cpu_bf16, cpu_fp32, sm_80",
    ),
    "capitals in target": ({"target": "SM_120"}, TargetError, "(did you mean 'sm_120'?)"),
    "number for report": ({"report": 5}, OptionError, "option 'report' must be a file path, found 5"),
    "unknown form of report": (
        {"report": "mx_report.jsn"},
        OptionError,
        "report 'mx_report.jsn': unknown suffix '.jsn' (did you mean '.json'?); allowed: .txt, .md",
    ),
    "report without a suffix": ({"report": "mx_report"}, OptionError, "unknown suffix ''; allowed"),
    "list for inductor": (
        {"inductor": ["max_autotune"]},
        OptionError,
        "option 'inductor' must be a dict of Inductor settings, found ['max_autotune']",
    ),
    "unknown setting of Inductor": (
        {"inductor": {"max_autotun": True}},
        OptionError,
        "unknown Inductor setting 'max_autotun' (did you mean 'max_autotune'?); torch._inductor",
    ),
    "unknown preset": ({"policy": "nvida"}, PolicyError, "'nvida' (did you mean 'nvidia'?)"),
    "missing policy file": ({"policy": "none.yaml"}, PolicyError, "none.yaml: cannot be read"),
    "number for policy": ({"policy": 8}, PolicyError, "a dict or a Policy, found int"),
    "broken policy": (
        {"policy": {"version": 1, "rules": [{"match": {"role": "qvk"}, "use": "bf16"}]}},
        PolicyError,
        "policy: rules[0].match.role: unknown role 'qvk' (did you mean 'qkv'?)",
    ),
}


def compiled(**settings: Any) -> Any:
    return torch.compile(nn.Linear(4, 4), backend="mxfp8", **settings)


@pytest.mark.parametrize("name", OPTIONS_ERRORS)
def test_a_mistake_in_options_is_an_error_of_torch_compile(name: str):
    options, kind, message = OPTIONS_ERRORS[name]
    with pytest.raises(kind, match=re.escape(message)) as caught:
        compiled(options=options)
    assert isinstance(caught.value, MXCompileError)
    assert isinstance(caught.value, ValueError)
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mode": "max-autotun"}, "'max-autotun' (did you mean 'max-autotune'?)"),
        ({"options": ["policy"]}, "options must be a dict with policy, report, target"),
    ],
    ids=["unknown mode", "options in a list"],
)
def test_users_of_torch_compile_see_other_errors(settings, message: str):
    with pytest.raises(OptionError, match=re.escape(message)):
        compiled(**settings)


def test_a_target_of_another_device_is_an_error_of_the_first_call():
    run = compiled(options={"target": "sm_100"})
    with pytest.raises(
        BackendCompilerFailed, match="target sm_100 does not run on cpu: the model is on"
    ) as caught:
        run(torch.ones(2, 4))
    assert type(caught.value.inner_exception) is TargetError


def test_nothing_given_is_the_defaults():
    assert Options.parse() == Options.parse("default", {}) == Options()
    assert Options.parse(None, {"policy": None, "report": None, "inductor": None}) == Options()


def test_parse_keeps_all_given_options(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    options = {
        "policy": "hybrid",
        "report": "out/mx_report.md",
        "target": "sm_100",
        "strict": True,
        "inductor": {"max_autotune": True, "epilogue_fusion": False},
    }
    assert Options.parse("reduce-overhead", options) == Options(
        policy=Policy.preset("hybrid"),
        report=tmp_path / "out" / "mx_report.md",
        target="sm_100",
        strict=True,
        mode="reduce-overhead",
        inductor=(("epilogue_fusion", False), ("max_autotune", True)),
    )
    assert [*tmp_path.iterdir()] == []


CHANGES = [
    {"policy": "ocp"},
    {"policy": {"version": 1, "rules": [{"match": {"role": "head"}, "use": "mxfp8"}]}},
    {"target": "cpu"},
    {"strict": True},
    {"mode": "max-autotune"},
    {"inductor": {"max_autotune": True}},
]


def parsed(settings: dict[str, Any]) -> Options:
    rest = {key: value for key, value in settings.items() if key != "mode"}
    return Options.parse(settings.get("mode"), rest)


def test_all_that_can_change_the_code_is_in_the_fingerprint():
    assert len({parsed(change).fingerprint() for change in [{}, *CHANGES]}) == 1 + len(CHANGES)


def test_fingerprint_ignores_options_that_do_not_change_code(tmp_path: Path):
    path = tmp_path / "policy.yaml"
    Policy.preset("nvidia").dump(path)
    plain = Options().fingerprint()
    assert parsed({"report": "report.md"}).fingerprint() == plain
    assert parsed({"policy": path}).fingerprint() == plain
    assert parsed({"mode": "default"}).fingerprint() == plain


def alike(left: Backend, right: Backend) -> bool:
    """Whether the two are equal; a dict, as Dynamo's, must find one for the other only then."""
    equal = left == right
    assert ({left: 1}.get(right) == 1) is equal
    assert (right == left) is equal
    return equal


def test_backends_of_equal_options_are_equal(tmp_path: Path):
    path = tmp_path / "policy.yaml"
    Policy.preset("nvidia").dump(path)
    assert alike(Backend(), Backend(policy="nvidia", target="auto", strict=False, mode=None, inductor={}))
    assert alike(Backend(), Backend(policy=path))
    assert alike(Backend(mode="default"), Backend(root=nn.Linear(1, 1)))


@pytest.mark.parametrize("change", [*CHANGES, {"report": "report.md"}], ids=str)
def test_backends_of_unequal_options_are_not(change: dict[str, Any]):
    assert alike(Backend(**change), Backend(**change))
    assert not alike(Backend(**change), Backend())


def test_a_backend_equals_nothing_else():
    assert Backend() != Options()
    assert Backend() != "mxfp8"


def test_repr_of_backend_names_policy_and_target():
    assert repr(Backend(policy="ocp", target="cpu")) == "Backend(policy='preset ocp', target='cpu')"


def blocks() -> nn.Module:
    return nn.ModuleList(Made(up=nn.Linear(4, 8), down=nn.Linear(8, 4)) for _ in range(2))


class Model(Made, blocks=blocks, tail=(4, 4)):
    """Two equal blocks, and one of another kind."""


def backend_of(model: Model, block: nn.Module, *patterns: str) -> Backend:
    rules = [{"match": {"name": pattern}, "use": "bf16"} for pattern in patterns]
    return Backend(policy={"version": 1, "rules": rules}, root=model, block=block)


@pytest.mark.parametrize(
    ("patterns", "equal"),
    [
        ([], True),
        (["*.up"], True),
        (["blocks.*"], True),
        (["re:blocks.[01].down"], True),
        (["tail"], True),
        (["blocks.0.*"], False),
        (["*.1.up"], False),
        (["*.0.down", "*.1.down"], False),
        (["blocks.1.down.weight"], False),
    ],
)
def test_blocks_have_equal_backends_if_the_policy_treats_them_alike(patterns, equal: bool):
    model = Model()
    first, second = (backend_of(model, block, *patterns) for block in model.blocks)
    assert alike(first, second) is equal


def test_the_same_block_has_equal_backends():
    model = Model()
    left, right = (backend_of(model, model.blocks[0], "blocks.0.*") for _ in range(2))
    assert alike(left, right)


def test_a_block_does_not_share_with_the_whole_model():
    model = Model()
    assert not alike(backend_of(model, model.blocks[0]), Backend(root=model))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block": nn.Linear(1, 1)}, "Backend(block=…) needs root=…"),
        (
            {"block": nn.Linear(1, 1), "root": Model()},
            "Backend(block=…) is a Linear that root, a Model, does not contain",
        ),
        ({"mode": "fast"}, "unknown mode 'fast'"),
        ({"polcy": "nvidia"}, "unknown option 'polcy' (did you mean 'policy'?)"),
    ],
)
def test_a_mistake_in_a_backend_is_an_error_at_once(settings: dict[str, Any], message: str):
    with pytest.raises(OptionError, match=re.escape(message)):
        Backend(**settings)


@pytest.mark.usefixtures("in_this_process")
def test_deep_copy_of_compile_arguments_copies_no_model(monkeypatch):
    """Lightning deep-copies them: a backend that knows its model, what `explain` compiles with."""
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    copied = copy.deepcopy({"backend": mxcompile.Backend(root=model)})
    assert copied["backend"].root is model
    plain, calls = torch.compile, []

    def copying(*args, **keywords):
        calls.append((keywords, copy.deepcopy(keywords)))
        return plain(*args, **keywords)

    monkeypatch.setattr(torch, "compile", copying)
    mxcompile.explain(model, torch.randn(4, 64))
    assert calls
    assert all(copied["backend"] is original["backend"] for original, copied in calls)


def test_arguments_of_compile_can_be_deep_copied(tmp_path: Path):
    """As Lightning and Accelerate copy them: the copy writes to the same watch, of the same policy."""
    watch = mxcompile.Watch(tmp_path / "run.jsonl", every=1)
    policy = Policy.resolve({"version": 1, "rules": [{"match": {"name": "*"}, "use": "mxfp8"}]})
    options = {"watch": watch, "policy": policy, "report": tmp_path / "report.json"}
    copied = copy.deepcopy({"backend": "mxfp8", "options": options})
    assert copied["options"] == options
    assert copied["options"]["watch"] is watch
    model = nn.Sequential(nn.Linear(64, 64))
    optimizer = torch.optim.SGD(model.parameters())
    torch.compile(model, **copied)(torch.randn(32, 64)).sum().backward()
    optimizer.step()
    watch.close()
    assert (tmp_path / "run.jsonl").read_text().count('"sample"') >= 1
    assert (tmp_path / "report.json").exists()


def test_a_copy_of_inductors_configuration_in_a_compile_copies_no_model():
    """As torch.compile makes it where an operator compiles a graph of its own, such as scan."""

    class Single(nn.Linear):
        def __deepcopy__(self, memo: object) -> Any:
            raise AssertionError("the model is copied")

    copies = []

    def copies_configuration(_graph: torch.fx.Graph) -> None:
        copies.append(torch._inductor.config.get_config_copy())

    settings = {"inductor": {"post_grad_custom_post_pass": copies_configuration}}
    torch.compile(Single(64, 32), backend="mxfp8", options=settings)(torch.randn(4, 64))
    assert copies


def test_a_compile_is_one_line_of_the_log(caplog):
    options = {"policy": {"version": 1, "rules": [{"match": {"name": "0"}, "use": "mxfp8"}]}}
    model = torch.compile(nn.Sequential(*(nn.Linear(64, 64) for _ in "01")), backend="mxfp8", options=options)
    with caplog.at_level("INFO", logger="mxcompile"):
        model(torch.randn(32, 64)).sum().backward()
    (line,) = (message for message in caplog.messages if message.startswith("compiled "))
    target = mxcompile.reports()[-1].summary.target
    assert line.startswith(f"compiled the model for {target}, policy: ")
    assert ": 40.0% of matmul FLOPs in MXFP8 (2 of 5 GEMMs), 4 casts, left as they are: 3 by " in line
    assert line.endswith("Inductor cache miss")
