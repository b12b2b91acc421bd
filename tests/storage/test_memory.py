"""Peak memory of storing, converting and loading: the quantized model and a layer, within 10 %.

Each runs in a process of its own, on a Llama of 411 MB in BF16; what is imported and cached is imported and
cached before, by the same call for a small model. The peak is the kernel's, over what was resident before.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="Linux alone resets a peak"),
]

_BEGIN = """
import ctypes, gc, sys
import torch
import mxcompile
import demo
from mxcompile.checkpoint.convert import convert
from pathlib import Path
torch.set_num_threads(1)
folder = Path(sys.argv[1])
sizes = {
    "small": demo.Wide(layers=2, width=128, feed_forward=256, heads=2, key_value_heads=2),
    "large": demo.Wide(layers=4, width=2048, feed_forward=5632, heads=16, key_value_heads=16),
}

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(key))

def settle():
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # the peak is what is resident
    return status("VmRSS")
"""

PROJECTIONS = 4 * (4 * 2048 * 2048 + 3 * 2048 * 5632)
QUANTIZED = PROJECTIONS * 33 // 32 + 2 * 2 * 256 * 2048
LAYER = 2 * 2048 * 5632


def printed(folder: Path, *lines: str) -> list[int]:
    """The numbers that a process prints last."""
    command = [sys.executable, "-c", "\n".join([_BEGIN, *lines]), str(folder)]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}  # with the package `demo`
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr
    return [int(word) for word in done.stdout.splitlines()[-1].split()]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints in BF16, one file each: ``small`` and ``large``."""
    directory = tmp_path_factory.mktemp("memory")
    printed(
        directory,
        "for name, size in sizes.items():",
        "    demo.wide(size).save_pretrained(folder / name, max_shard_size='10GB')",
        "print(0)",
    )
    return directory


def test_storing_weights_needs_memory_of_one_layer(folder: Path):
    """Beside the model a layer of it; and at the end it takes what it says."""
    most, remaining = printed(
        folder,
        "mxcompile.quantize_weights_(demo.wide(sizes['small']), progress=False)",
        "without = settle()",
        "model = demo.wide(sizes['large'])",
        "before = settle()",
        "mxcompile.quantize_weights_(model, progress=False)",
        "most = status('VmHWM') - before",
        "print(most, settle() - without)",
    )
    assert most <= 0.1 * QUANTIZED + LAYER
    assert remaining <= 1.1 * QUANTIZED


def test_converting_needs_memory_of_a_few_layers(folder: Path):
    """Of one file as large as the model; what is loaded is read to its end."""
    (most,) = printed(
        folder,
        "convert(folder / 'small', folder / 'small out', progress=False)",
        "before = settle()",
        "convert(folder / 'large', folder / 'large out', progress=False)",
        "print(status('VmHWM') - before)",
    )
    assert most <= 3 * LAYER + 60e6  # the file is written as it is made
    most, resident = printed(
        folder,
        "mxcompile.load_quantized(folder / 'small out')",
        "before = settle()",
        "model = mxcompile.load_quantized(folder / 'large out')",
        "for parameter in model.parameters():",
        "    getattr(parameter, 'qdata', parameter).view(torch.uint8).max()",
        "print(status('VmHWM') - before, demo.serving.weight_bytes(model))",
    )
    assert resident == QUANTIZED + 9 * 2 * 2048
    assert most <= 1.1 * QUANTIZED + LAYER


EXPERTS = """
import json
from safetensors.torch import save_file
from transformers import MixtralConfig, MixtralForCausalLM
from transformers.core_model_loading import revert_weight_conversion

def write_mixtral(folder, layers, width):
    config = MixtralConfig(
        vocab_size=256, hidden_size=width, intermediate_size=width, num_hidden_layers=layers,
        num_attention_heads=8, num_key_value_heads=8, head_dim=8, num_local_experts=8, dtype="bfloat16",
    )
    with torch.device("meta"):
        model = MixtralForCausalLM(config)
    tensors = {}
    for name, value in revert_weight_conversion(model, dict(model.state_dict())).items():
        if ".experts." in name:
            tensors[name] = torch.zeros(value.shape).to(torch.float8_e4m3fn)
            tensors[name + "_scale"] = torch.full((value.shape[0], value.shape[1] // 32), 127).byte()
        else:
            tensors[name] = torch.zeros(value.shape, dtype=torch.bfloat16)
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    raw = json.loads(config.to_json_string()) | {"architectures": ["MixtralForCausalLM"]}
    raw["quantization_config"] = {"quant_method": "compressed-tensors", "format": "mxfp8-quantized"}
    (folder / "config.json").write_text(json.dumps(raw))
"""


def test_loading_experts_needs_memory_of_one_stack(tmp_path: Path):
    """Files have single experts; the model has one tensor for all experts of a layer."""
    printed(
        tmp_path,
        EXPERTS,
        "write_mixtral(folder / 'small', 1, 64)",
        "write_mixtral(folder / 'large', 8, 1024)",
        "print(0)",
    )
    most, resident, largest = printed(
        tmp_path,
        "mxcompile.load_quantized(folder / 'small')",
        "before = settle()",
        "ctypes.CDLL(None).mallopt(-3, 1 << 20)  # M_MMAP_THRESHOLD: freed tensors leave the process",
        "model = mxcompile.load_quantized(folder / 'large')",
        "for parameter in model.parameters():",
        "    getattr(parameter, 'qdata', parameter).view(torch.uint8).max()",
        "sizes = [getattr(p, 'stored_bytes', p.nbytes) for p in model.parameters()]",
        "print(status('VmHWM') - before, sum(sizes), max(sizes))",
    )
    assert resident > 10 * largest
    assert most <= 1.1 * resident + largest
