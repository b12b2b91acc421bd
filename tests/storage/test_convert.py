"""``mxcompile convert`` and ``inspect``: what they write, what they refuse, and what a kill leaves."""

from __future__ import annotations

import hashlib
import io
import json
import os
import random
import resource
import shutil
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from small_models import Model, assert_same_logits, change_json, llama, mixtral, quantized, same_bytes
from test_checkpoints import BF16, TOKENS, llava
from torch import nn
from tqdm import tqdm

import mxcompile
from mxcompile import MXTensor
from mxcompile.checkpoint import files
from mxcompile.checkpoint.convert import convert
from mxcompile.cli import main
from mxcompile.errors import CheckpointError
from mxcompile.models.named import LoadedModel


def written(model: nn.Module, folder: Path, shard: str = "60KB") -> Path:
    """`model` as Transformers writes it, in shards, with a tokenizer's file."""
    model.save_pretrained(folder, max_shard_size=shard)
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    (folder / "optimizer.bin").write_bytes(b"not copied")
    return folder


def digests(folder: Path) -> dict[str, str]:
    files = sorted(file for file in folder.rglob("*") if file.is_file())
    return {str(file.relative_to(folder)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


@pytest.fixture
def source(tmp_path) -> Path:
    return written(llama(), tmp_path / "in")


@pytest.mark.parametrize("layout", ["compressed-tensors", "torchao"])
def test_convert_makes_the_weights_of_quantize_weights(source, tmp_path, layout):
    before = digests(source)
    table = convert(source, tmp_path / "out", layout=layout)
    assert digests(source) == before
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out"]
    assert len(list((tmp_path / "out").glob("*.safetensors"))) > 2
    assert (tmp_path / "out/tokenizer.json").read_text() == '{"version": "1.0"}'
    assert not (tmp_path / "out/optimizer.bin").exists()

    from transformers import LlamaForCausalLM

    expected = LlamaForCausalLM.from_pretrained(source, dtype=BF16).eval()
    table_in_memory = mxcompile.quantize_weights_(expected, progress=False)
    assert_same_logits(TOKENS, expected, mxcompile.load_quantized(tmp_path / "out"))
    stored, expected_names = ({w.name for w in t.weights if w.stored} for t in (table, table_in_memory))
    assert stored == expected_names
    assert table.num_bytes == table_in_memory.num_bytes
    assert all(25 < w.sqnr_db < 40 for w in table.weights if w.stored)
    assert len(json.loads((tmp_path / "out/mxfp8_weights.json").read_text())) == len(table.weights)
    config = json.loads((tmp_path / "out/config.json").read_text())
    assert ("quantization_config" in config) == (layout == "compressed-tensors")


def test_experts_that_are_stacked_when_loaded(tmp_path):
    source = written(mixtral(), tmp_path / "in", shard="1GB")
    table = convert(source, tmp_path / "out")
    names = [w.name for w in table.weights if w.stored and "experts" in w.name]
    assert len(names) == 2 * 4 * 3
    loaded = mxcompile.load_quantized(tmp_path / "out")
    experts = loaded.model.layers[1].mlp.experts.gate_up_proj
    assert isinstance(experts, MXTensor)
    files = load_file(source / "model.safetensors")
    third = files["model.layers.1.block_sparse_moe.experts.2.w3.weight"]
    assert torch.equal(experts[2, 96:].dequantize(), mxcompile.quantize(third).dequantize())
    routers = [w for w in table.weights if w.role == "router"]
    assert len(routers) == 2
    assert not any(w.stored for w in routers)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # Transformers and compressed-tensors comment on themselves
@pytest.mark.parametrize("make", [lambda: llama(tied=True), llava], ids=["tied", "llava"])
def test_transformers_loads_the_result(tmp_path, make):
    source = written(make(), tmp_path / "in")
    convert(source, tmp_path / "out")
    ours = mxcompile.load_quantized(tmp_path / "out")
    theirs, info = type(ours).from_pretrained(tmp_path / "out", dtype=BF16, output_loading_info=True)
    assert not any(info.values()), info
    assert_same_logits(TOKENS, theirs, ours)


@pytest.mark.slow
def test_transposed_layers_are_refused_with_the_layouts_reason(tmp_path, capsys):
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 64, "n_layer": 1, "n_head": 2}
    source = written(GPT2LMHeadModel(GPT2Config(**sizes)), tmp_path / "in")
    assert main(["convert", str(source), str(tmp_path / "out")]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "compressed-tensors has blocks along the last dimension only (4 of them)" in lines[-1]


def _tensor_bytes(folder: Path) -> int:
    return sum(tensor.nbytes for file in folder.glob("*.safetensors") for tensor in load_file(file).values())


def test_the_bar_counts_tensors(source, tmp_path, monkeypatch):
    """One file makes a bar that is more than empty or full."""
    bars = []

    class Bar(tqdm):
        def __init__(self, *args, **settings):
            super().__init__(*args, **settings, file=io.StringIO())
            bars.append(self)

        def update(self, n=1):
            self.seen = [*getattr(self, "seen", []), n]
            return super().update(n)

    monkeypatch.setattr("mxcompile.checkpoint.convert.tqdm", Bar)
    convert(source, tmp_path / "out")
    (bar,) = bars
    entries = sum(len(load_file(file)) for file in source.glob("*.safetensors"))
    assert bar.disable  # not a terminal
    assert len(bar.seen) == bar.total == 2 * entries


def test_other_files_beside_a_whole_model_are_ignored(tmp_path):
    """Publishers put the same weights beside it by other names, and users an adapter."""
    folder = written(llama(), tmp_path / "in", shard="1GB")
    assert [file.name for file in folder.glob("*.safetensors")] == ["model.safetensors"]
    for name in ("consolidated", "adapter_model"):
        save_file({"layers.0.attention.wq.weight": torch.zeros(64, 64)}, folder / f"{name}.safetensors")
    convert(folder, tmp_path / "out")
    assert mxcompile.load_quantized(tmp_path / "out")(TOKENS).logits.isfinite().all()
    save_file({"adapter": torch.zeros(1)}, tmp_path / "out/adapter_model.safetensors")
    mxcompile.load_quantized(tmp_path / "out")


FP4 = torch.float4_e2m1fn_x2
SEVERAL = """
version: 1
preset: inference
rules:
  - {match: {name: '*.q_proj'}, use: {precision: mxfp8, rounding: floor}}
  - {match: {name: '*.o_proj'}, use: nvfp4}
  - {match: {name: '*.mlp.*'}, use: mxfp4}
"""
OTHERS = {
    "q_proj": ("mxfp8", {"rounding": "floor"}),
    "o_proj": ("nvfp4", {"elem_dtype": FP4, "rounding": "two-level"}),
    **dict.fromkeys(("gate_proj", "up_proj", "down_proj"), ("mxfp4", {"elem_dtype": FP4})),
}
"""By layer, the precision under `SEVERAL`, and what `quantize` is told; of the rest MXFP8, and nothing."""


def test_convert_with_several_precisions_names_each(source, tmp_path, capsys):
    """A dry run foresees the bytes; what is read back is what `quantize` makes; the config names all."""
    policy = tmp_path / "policy.yaml"
    policy.write_text(SEVERAL)
    out = tmp_path / "out"
    assert main(["convert", str(source), str(out), "--policy", str(policy), "--dry-run"]) == 0
    foreseen = capsys.readouterr().out.splitlines()[0]
    assert foreseen.startswith("14 of 16 weights in MXFP8, MXFP4 and NVFP4: ")
    table = convert(source, out, policy=policy)
    assert str(table).splitlines()[0] == foreseen
    before = llama_state(source)
    loaded = mxcompile.load_quantized(out)
    for row in table.weights:
        if row.stored:
            weight = loaded.get_parameter(row.name)
            precision, how = OTHERS.get(row.name.split(".")[-2], ("mxfp8", {}))
            assert row.precision == precision
            assert row.num_bytes == weight.stored_bytes
            expected = mxcompile.quantize(before[row.name], **how)
            assert weight.form == expected.form
            assert same_bytes(weight.qdata, expected.qdata)
            assert torch.equal(weight.dequantize(), expected.dequantize())
            low, high = (25, 40) if precision == "mxfp8" else (15, 25)
            assert low < row.sqnr_db < high
    assert main(["inspect", str(out)]) == 0
    printed = capsys.readouterr().out
    assert "of it in MXFP8, MXFP4 and NVFP4" in printed
    assert "mxfp4 e2m1" in printed
    config = json.loads((out / "config.json").read_text())["quantization_config"]
    assert config["format"] == "mixed-precision"
    targets = {group["format"]: group["targets"] for group in config["config_groups"].values()}
    assert "model.layers.0.mlp.up_proj" in targets["mxfp4-pack-quantized"]
    assert "model.layers.0.self_attn.o_proj" in targets["nvfp4-pack-quantized"]


def llama_state(folder: Path) -> dict[str, torch.Tensor]:
    return {name: value for file in folder.glob("*.safetensors") for name, value in load_file(file).items()}


def test_convert_command_writes_the_weights_that_dry_run_lists(source, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["convert", str(source), str(out), "--dry-run"]) == 0
    foreseen = capsys.readouterr().out
    assert "14 of 16 weights in MXFP8" in foreseen
    assert not out.exists()
    assert main(["convert", str(source), str(out)]) == 0
    streams = capsys.readouterr()
    assert streams.err == ""  # no bar where nobody watches
    printed = streams.out
    assert "worst SQNR" in printed
    before, after = (_tensor_bytes(folder) for folder in (source, out))
    sizes = f"{source} {before / 1024:.1f} KiB, {out} {after / 1024:.1f} KiB ({after / before:.0%})"
    assert f"written: {sizes}" in printed
    assert sizes in foreseen
    assert "from_pretrained" not in printed
    assert main(["inspect", str(out)]) == 0
    output = capsys.readouterr().out
    assert "layout: compressed-tensors" in output
    assert max(map(len, output.splitlines())) <= 120
    names = {f"model.layers.0-1.mlp.{name}_proj.weight" for name in ("gate", "up", "down")}
    assert names <= set(output.replace(",", " ").split())  # each name whole on one line
    assert "mxfp8 e4m3" in output
    assert main(["convert", str(source), str(out)]) == 2
    assert "exists already" in capsys.readouterr().err
    assert main(["convert", str(out), str(tmp_path / "again")]) == 0
    assert digests(tmp_path / "again") == digests(out) | {
        "mxfp8_weights.json": digests(tmp_path / "again")["mxfp8_weights.json"]  # SQNR against other values
    }


@pytest.mark.parametrize("layout", ["torchao", "compressed-tensors"])
@pytest.mark.parametrize("precision", ["mxfp4", "mxfp8"])
def test_a_checkpoint_that_is_quantized_in_part_is_converted(tmp_path: Path, layout: str, precision: str):
    """MXFP8 weights keep their bytes; MXFP4 weights are cast from their values, which MXFP8 holds."""
    rules = [{"match": {"name": "blocks.0.*"}, "use": {"fprop": precision}}]
    model, _ = quantized(policy={"version": 1, "preset": "bf16", "rules": rules})
    mxcompile.save_quantized(model, tmp_path / "part", layout=layout)
    partly_quantized = LoadedModel(name="model", model=Model(), args=(torch.arange(12).view(2, 6),))
    table = convert(tmp_path / "part", tmp_path / "out", model=partly_quantized)
    rows = {row.name: row for row in table.weights if row.stored}
    assert set(rows) == {f"blocks.{n}.{name}.weight" for n in range(2) for name in ("gate", "up", "down")}
    loaded = mxcompile.load_quantized(tmp_path / "out", Model())
    for name, row in rows.items():
        before, after = model.get_parameter(name), loaded.get_parameter(name)
        if name.startswith("blocks.0"):
            assert row.sqnr_db is None
            assert torch.equal(after.dequantize(), before.dequantize())
            assert precision == "mxfp4" or same_bytes(after.qdata, before.qdata)
        else:
            assert torch.equal(after.dequantize(), mxcompile.quantize(before).dequantize())


def test_convert_of_fp32_model_prints_the_dtype_for_loading(source, tmp_path, capsys):
    """Layers that compressed-tensors decompresses, always to BF16, failed beside FP32 ones."""
    change_json(source / "config.json", dtype="float32")
    assert main(["convert", str(source), str(tmp_path / "out")]) == 0
    assert "from_pretrained(…, dtype=torch.bfloat16)" in capsys.readouterr().out


REFUSED = {
    "truncated": "not a whole safetensors file",
    "wrong shape": "has shape",
    "lacking": "the checkpoint lacks 'model.layers.1.mlp.up_proj.weight', which the model has (1 in all)",
    "no config": "no config.json",
    "no architecture": "config.json: 'architectures' is missing, which names the model",
    "unknown architecture": "has no model Own, and code that comes with a checkpoint is never run",
    "inside": "lies in the input",
    "fp8_rowwise": "preset fp8_rowwise stores no weight: stored weights have a scale for 32 elements along K",
    "fp8_delayed": "preset fp8_delayed stores no weight: stored weights have a scale for 32 elements along K",
}


@pytest.mark.parametrize("how", REFUSED)
def test_invalid_checkpoints_and_targets_are_refused(source, tmp_path, how, capsys):
    first = sorted(source.glob("*.safetensors"))[0]
    target, policy = tmp_path / "out", []
    match how:
        case "truncated":
            first.write_bytes(first.read_bytes()[:-100])
        case "wrong shape":
            tensors = load_file(first)
            name = next(name for name, value in tensors.items() if value.ndim == 2)
            save_file({**tensors, name: tensors[name][:3].contiguous()}, first)
        case "lacking":
            for file in source.glob("*.safetensors"):
                tensors = load_file(file)
                tensors.pop("model.layers.1.mlp.up_proj.weight", None)
                save_file(tensors, file)
            (source / "model.safetensors.index.json").unlink()
        case "no config":
            (source / "config.json").unlink()
        case "no architecture" | "unknown architecture":
            names = ["Own"] if how.startswith("unknown") else None
            change_json(source / "config.json", architectures=names)
        case "inside":
            target = source / "out"
        case "fp8_rowwise" | "fp8_delayed":
            policy = ["--policy", how]
    before = digests(source)
    assert main(["convert", str(source), str(target), *policy]) == 2
    errors = capsys.readouterr().err
    assert REFUSED[how] in errors
    assert len(errors.splitlines()) == 1
    assert digests(source) == before
    assert not target.exists()


def test_tensors_that_no_parameter_takes_are_named(tmp_path, caplog):
    """What Transformers leaves out without a word is not."""
    source = written(llama(tied=True), tmp_path / "in", shard="1GB")
    file = source / "model.safetensors"
    save_file(load_file(file) | {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(8)}, file)
    convert(source, tmp_path / "old")
    assert not caplog.records
    assert isinstance(mxcompile.load_quantized(tmp_path / "old"), nn.Module)
    save_file(load_file(file) | {"model.adapter.weight": torch.ones(8)}, file)
    convert(source, tmp_path / "more")
    assert "the model has no 'model.adapter.weight' (1 in all): the result keeps such tensors" in caplog.text
    assert "model.adapter.weight" in load_file(tmp_path / "more/model.safetensors")


@pytest.mark.slow
def test_failed_convert_prints_a_line_and_leaves_no_files(source, tmp_path, monkeypatch, capsys):
    """A file system that takes no more, and places that are none."""
    chosen_once(monkeypatch, source)
    (tmp_path / "file").touch()
    limit, written = resource.getrlimit(resource.RLIMIT_FSIZE), files.write_tensors

    def then_full(*tensors) -> None:
        written(*tensors)
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, limit[1]))

    monkeypatch.setattr("mxcompile.checkpoint.convert.write_tensors", then_full)
    try:
        reasons = {"out": "File too large", "file/out": "file: File exists", ".": "exists", "/": "exists"}
        for target, reason in reasons.items():
            assert main(["convert", str(source), str(tmp_path / target)]) == 2
            lines = capsys.readouterr().err.splitlines()
            assert reason in lines[-1]
            assert "Traceback" not in lines
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limit)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["file", "in"]


def chosen_once(monkeypatch, source: Path) -> None:
    """Trace the model once for all conversions of `source`."""
    from mxcompile.checkpoint import convert as conversion

    owner, config = conversion.architecture(source, conversion.read_json(source / "config.json"))
    with torch.device("meta"):
        weights = conversion.planned_weights(owner(config).to(torch.bfloat16))
    monkeypatch.setattr(conversion, "planned_weights", lambda *_: weights)


def test_the_directory_of_a_killed_conversion_stays_and_is_named(source, tmp_path, monkeypatch, caplog):
    """A process on another machine may still write it."""
    chosen_once(monkeypatch, source)
    mark = 16 * "0f"
    partial, other = (tmp_path / f".{name}.{mark}.partial" for name in ("out[{}]", "out[{}].2"))
    for folder in (partial, other):
        folder.mkdir()
        (folder / "model.safetensors").touch()
    convert(source, tmp_path / "out[{}]")
    assert sorted(tmp_path.iterdir()) == sorted([partial, other, source, tmp_path / "out[{}]"])
    assert caplog.messages == [
        f"{partial} is from an interrupted run: remove it, unless a process still writes it"
    ]
    assert "model.safetensors" not in {file.name for file in (tmp_path / "out[{}]").iterdir()}


def test_a_conversion_that_is_overtaken_leaves_the_result(source, tmp_path, monkeypatch):
    """Of another machine, say, which this one cannot see."""
    chosen_once(monkeypatch, source)
    written = files.write_json

    def overtaken(file: Path, value: object) -> None:
        written(file, value)
        (tmp_path / "out").mkdir(exist_ok=True)
        (tmp_path / "out/theirs").touch()

    monkeypatch.setattr("mxcompile.checkpoint.convert.write_json", overtaken)
    with pytest.raises(CheckpointError, match="out: Directory not empty"):
        convert(source, tmp_path / "out")
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out"]
    assert [file.name for file in (tmp_path / "out").iterdir()] == ["theirs"]


@pytest.mark.slow
def test_a_conversion_that_is_killed_at_any_point_leaves_nothing_broken(source, tmp_path, monkeypatch):
    chosen_once(monkeypatch, source)
    torch.set_num_threads(1)
    before = digests(source)
    start = time.perf_counter()
    convert(source, tmp_path / "expected")
    whole = time.perf_counter() - start
    expected = digests(tmp_path / "expected")
    out, generator = tmp_path / "out", random.Random(0)
    killed = unfinished = 0
    while killed < 50:
        child = os.fork()
        if child == 0:
            # tqdm's own lock is one semaphore of all processes: if its holder is killed, all others wait
            tqdm.set_lock(threading.RLock())
            try:
                convert(source, out)
            finally:
                os._exit(0)
        time.sleep(generator.uniform(0, 1.2 * whole))
        os.kill(child, signal.SIGKILL)
        _, status = os.waitpid(child, 0)
        assert digests(source) == before
        killed += os.WIFSIGNALED(status)
        for folder in tmp_path.glob(".out.*.partial"):
            unfinished += 1
            shutil.rmtree(folder)
        if out.exists():
            assert digests(out) == expected
            shutil.rmtree(out)
    assert unfinished > 5, "kills fell before the first file was written"
    convert(source, out)
    assert digests(out) == expected
    assert isinstance(mxcompile.load_quantized(out).model.layers[0].mlp.up_proj.weight, MXTensor)


def test_a_bare_file_with_a_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("factory.py").write_text(
        "import torch\nfrom torch import nn\n"
        "class Block(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.up, self.down = nn.Linear(64, 96), nn.Linear(96, 64)\n"
        "    def forward(self, x):\n"
        "        return x + self.down(torch.relu(self.up(x)))\n"
        "def make():\n"
        "    return nn.Sequential(Block(), Block()), (torch.randn(2, 64),), {}\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import factory

    model = factory.make()[0]
    save_file(model.state_dict(), "model.safetensors")
    with pytest.raises(CheckpointError, match="--model"):
        convert("model.safetensors", "out")
    assert main(["convert", "model.safetensors", "out", "--model", "factory:make"]) == 0
    with torch.device("meta"):
        empty = factory.make()[0]
    loaded = mxcompile.load_quantized("out", empty, dtype=torch.float32)
    dense = mxcompile.quantize(model[1].up.weight).dequantize(torch.float32)
    assert torch.equal(loaded[1].up.weight + 0, dense)
