"""Speed of generating text with Gemma 3 270M: FP32, BF16, stored MXFP8 and MXINT8, int8, llama.cpp's Q8_0.

Every way has its own process, so that start-up time and memory are separate; each peak includes Python and
torch. The processes take turns, with equal numbers of threads. Prefill ends with the first token. Decoding is
greedy, for one sequence, by Hugging Face's `generate` with a static cache. Compiled models have no guards on
modules and weights, because nothing replaces these while a model serves. llama.cpp comes from the package
`xllamacpp`. It reads a GGUF file in Q8_0, and the other ways read a checkpoint. The first start writes these
files from the same weights, and compiles the package (`save_package`). `pretrained_models.py` lists the
required packages.

Usage: python benchmarks/pretrained_speed.py [--ways NAME …] [--repeats 5] [--threads 2] [--dry]
"""

from __future__ import annotations

import argparse
import functools
import importlib.util
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import common
import pretrained_models as models
from tqdm import tqdm

PROMPTS, TOKENS = (128, 512), 64
ROOM = 640
"""Capacity of the cache in tokens."""
PRESETS = {"mxfp8": "inference", "mxint8": "mxint8"}
"""Presets that store the weights of the blocks, by precision."""
LLAMA_CPP = "llama.cpp q8_0"


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ways", nargs="*", choices=WAYS, default=list(WAYS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--dry", action="store_true", help="write no results")
    parser.add_argument("--serve", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve(options.serve, options.threads)
        return
    if lack := models.missing("gemma"):
        print(lack)
        return
    rows = measure(options.ways, options.repeats, options.threads)
    common.show([{key: value for key, value in row.items() if not key.startswith("times")} for row in rows])
    if not options.dry:
        common.write("pretrained_speed", rows)


def measure(ways: list[str], repeats: int, threads: int) -> list[dict[str, Any]]:
    """Returns a row per way. The first way is the baseline of ratios."""
    servers = {way: Server(way, threads) for way in tqdm(ways, desc="start", leave=False)}
    ways = [way for way, server in servers.items() if server.ready]
    requests = [(prompt, count) for prompt in PROMPTS for count in (1, TOKENS + 1)]
    times: dict[tuple[str, int, int], list[float]] = {
        (way, *request): [] for way in ways for request in requests
    }
    for _ in tqdm(range(repeats), desc="repeats", leave=False):
        for prompt, count in requests:
            for way in ways:
                times[way, prompt, count].append(servers[way].seconds(prompt, count))
    rows = []
    for way in ways:
        prefill = {prompt: statistics.median(times[way, prompt, 1]) for prompt in PROMPTS}
        whole = times[way, PROMPTS[0], TOKENS + 1]
        decode = TOKENS / (statistics.median(whole) - prefill[PROMPTS[0]])
        rows.append(
            {
                "model": "gemma 3 270m",
                "run": way,
                **{f"prefill_{prompt}_per_s": round(prompt / taken, 1) for prompt, taken in prefill.items()},
                "decode_per_s": round(decode, 2),
                **servers[way].ready,
                "peak_mb": servers[way].stop(),
                "times_s": {f"{p}+{n}": [round(t, 3) for t in times[way, p, n]] for p, n in requests},
            }
        )
    return [
        {**row, "decode_over_first": round(row["decode_per_s"] / rows[0]["decode_per_s"], 3)} for row in rows
    ]


class Server:
    """A process that generates text in one way.

    ready: start-up figures that the process reports; {} if the way cannot run, with the reason printed.
    """

    def __init__(self, way: str, threads: int) -> None:
        command = [sys.executable, __file__, "--serve", way, "--threads", str(threads)]
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        answer = self._answer()
        self.ready: dict[str, Any] = answer if "left_out" not in answer else {}
        if not self.ready:
            print(f"{way}: {answer['left_out']}")

    def seconds(self, prompt: int, count: int) -> float:
        """Returns the seconds to generate `count` tokens after a prompt of `prompt` tokens."""
        return float(self._answer(f"{prompt} {count}")["seconds"])

    def stop(self) -> int:
        """Ends the process. Returns its peak memory in MB."""
        peak = int(self._answer("peak")["peak_mb"])
        self._process.communicate()
        return peak

    def _answer(self, question: str = "") -> dict[str, Any]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        if question:
            print(question, file=self._process.stdin, flush=True)
        for line in self._process.stdout:
            if line.startswith("{"):
                answer: dict[str, Any] = json.loads(line)
                return answer
        return {"left_out": "its process ended early"}


Generate = Callable[[int, int], object]
"""A function of the length of a prompt and the number of tokens to generate."""


def serve(way: str, threads: int) -> None:
    """Serves requests on standard input: "PROMPT COUNT" returns seconds, "peak" returns MB and ends."""
    start = time.perf_counter()
    try:
        generate, weight_bytes = WAYS[way](threads)
    except ImportError as error:
        _say(left_out=str(error))
        return
    generate(PROMPTS[0], 1)
    first = time.perf_counter() - start
    for prompt in PROMPTS:
        for _ in range(2):
            generate(prompt, 4)
    _say(start_s=round(first, 1), weight_mb=round(weight_bytes / 1e6))
    for line in sys.stdin:
        if line.strip() == "peak":
            _say(peak_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)
            return
        prompt, count = map(int, line.split())
        start = time.perf_counter()
        generate(prompt, count)
        _say(seconds=time.perf_counter() - start)


def _say(**answer: Any) -> None:
    print(json.dumps(answer), flush=True)


def by_torch(
    dtype: str = "float32",
    prepare: Callable[[Any], object] = lambda model: None,
    *,
    backend: str = "inductor",
    cached: str = "",
    file: str = "",
    policy: str = "bf16",
) -> Callable[[int], tuple[Generate, int]]:
    """Returns a loader: it loads the model in `dtype`, applies `prepare`, and compiles forward.

    cached: the precision of stored keys and values, "" if they stay in `dtype`. file: name of a checkpoint of
    the prepared weights, which is loaded; without one, a checkpoint in `dtype` is loaded and prepared. Either
    is written if it does not exist. policy: the policy of backend mxfp8: "bf16" casts no activations.
    """

    def load(threads: int) -> tuple[Generate, int]:
        import torch
        from transformers import StaticCache

        import mxcompile

        torch.set_num_threads(threads)
        model = _model(dtype, prepare, file)
        model.generation_config.eos_token_id = None  # like llama.cpp's `ignore_eos`
        text = models.windows(models.gemma_tokenizer(), 1, max(PROMPTS))
        options: Any = {"guard_filter_fn": torch.compiler.skip_guard_on_all_nn_modules_unsafe}
        if backend == "mxfp8":
            options["policy"] = policy
        model.forward = torch.compile(model.forward, backend=backend, options=options)
        config = model.config
        cache: Any = StaticCache(config, ROOM)
        if cached:
            cache = mxcompile.static_cache(model, ROOM, precision=cached)
        heads = config.num_key_value_heads  # unallocated, the cache would recompile after the first prompt
        cache.early_initialization(1, heads, config.head_dim, model.dtype, model.device)

        def generate(prompt: int, count: int) -> object:
            cache.reset()
            with torch.no_grad():
                return model.generate(
                    text[:, :prompt],
                    cache=cache,
                    max_new_tokens=count,
                    do_sample=False,
                    disable_compile=True,
                )

        return generate, _weight_bytes(model)

    return load


def _model(dtype: str, prepare: Callable[[Any], object], file: str) -> Any:
    """Returns the model of `by_torch`, not compiled."""
    import torch
    from transformers import AutoModelForCausalLM

    import mxcompile

    folder = models.CACHE / f"gemma-3-270m-{dtype}-{file or 'plain'}"
    if not folder.exists():
        model, _ = models.gemma()
        model = model.to(getattr(torch, dtype))
        with tempfile.TemporaryDirectory(dir=models.CACHE) as partial:
            if file:
                prepare(model)
                mxcompile.save_quantized(model, Path(partial) / "model")
            else:
                model.save_pretrained(Path(partial) / "model")
            (Path(partial) / "model").rename(folder)
    if file:
        return mxcompile.load_quantized(folder).requires_grad_(False)
    plain: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    prepare(plain)
    return plain.eval().requires_grad_(False)


def by_package(
    threads: int, *, quantize_activations: bool = False, keep: bool = False
) -> tuple[Generate, int]:
    """Loads a model that was compiled ahead of time; the first start compiles it from the checkpoint.

    keep: see `_stored`.
    """
    import torch

    import mxcompile

    torch.set_num_threads(threads)
    form = ("-activations" if quantize_activations else "") + ("-with-kept" if keep else "")
    folder = models.CACHE / f"gemma-3-270m-package-{threads}-threads{form}"
    if not folder.exists():
        model = _model("bfloat16", _stored("mxint8", keep=keep), _file("mxint8", keep=keep))
        mxcompile.save_package(model, folder, max_cache_len=ROOM, quantize_activations=quantize_activations)
    package = mxcompile.load_package(folder)
    text = models.windows(models.gemma_tokenizer(), 1, max(PROMPTS))

    def generate(prompt: int, count: int) -> object:
        return package.generate(text[:, :prompt], count)

    return generate, (folder / "model.safetensors").stat().st_size


def _weight_bytes(model: Any) -> int:
    """Returns the bytes of all parameters as stored."""
    from mxcompile.storage import MXTensor

    parts = []
    for parameter in model.parameters():
        names = parameter.__tensor_flatten__()[0] if isinstance(parameter, MXTensor) else ("data",)
        parts += [getattr(parameter, name) for name in names]
    return sum(part.nbytes for part in parts)


def _file(precision: str, *, keep: bool = False) -> str:
    return f"{precision}-head" + ("-with-kept" if keep else "")


def _stored(precision: str, *, head: bool = True, keep: bool = False) -> Callable[[Any], object]:
    """Returns a function that stores the weights of a model in `precision`, with or without the head.

    keep: whether the weights of `models.KEPT` stay as they are.
    """
    preset = PRESETS[precision]
    policy = models.storing_policy(preset, precision, keep=keep) if head else preset

    def prepare(model: Any) -> object:
        import mxcompile

        return mxcompile.quantize_weights_(model, policy, progress=False)

    return prepare


def by_storing(precision: str) -> dict[str, Callable[[int], tuple[Generate, int]]]:
    """Returns the ways that store weights in `precision`, by name."""
    stored: dict[str, Any] = {"backend": "mxfp8", "file": _file(precision)}
    whole = _stored(precision)
    blocks = _stored(precision, head=False)
    return {
        f"{precision} stored": by_torch(prepare=blocks, backend="mxfp8", file=precision),
        f"{precision} stored, head too": by_torch(prepare=whole, **stored),
        f"{precision} stored, head too, keys and values": by_torch(prepare=whole, cached=precision, **stored),
        f"bf16, {precision} stored, head too": by_torch("bfloat16", whole, **stored),
        f"bf16, {precision} stored, head too, activations": by_torch(
            "bfloat16", whole, policy=PRESETS[precision], **stored
        ),
    }


def _int8(model: Any) -> None:
    from torchao.quantization import Int8WeightOnlyConfig, quantize_

    quantize_(model, Int8WeightOnlyConfig())


def q8_0_file(folder: Path = models.CACHE) -> Path:
    """Returns the model as a GGUF file in Q8_0, written on first use from the file in Q4_K_M.

    Raises ImportError without gguf.
    """
    import gguf

    target = folder / "gemma-3-270m-q8_0.gguf"
    if target.exists():
        return target
    reader: Any = gguf.GGUFReader(models.gemma_file(folder))
    partial = target.with_suffix(".partial")
    writer = gguf.GGUFWriter(partial, "gemma3")
    generated = {"general.architecture", "general.file_type", "general.quantization_version"}
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in generated:
            continue
        kinds = [*field.types, None]
        writer.add_key_value(field.name, field.contents(), kinds[0], sub_type=kinds[1])
    writer.add_file_type(gguf.LlamaFileType.MOSTLY_Q8_0)
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    q8_0 = gguf.GGMLQuantizationType.Q8_0
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        if values.ndim == 2:
            writer.add_tensor(tensor.name, gguf.quants.quantize(values, q8_0), raw_dtype=q8_0)
        else:
            writer.add_tensor(tensor.name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    partial.rename(target)
    return target


def by_llama_cpp(threads: int) -> tuple[Generate, int]:
    """Loads the file in Q8_0 into llama.cpp. Raises ImportError without xllamacpp."""
    if importlib.util.find_spec("xllamacpp") is None:
        raise ImportError("no package xllamacpp here: pip install --no-deps xllamacpp")
    xllamacpp: Any = importlib.import_module("xllamacpp")

    file = q8_0_file()
    settings = xllamacpp.CommonParams()
    settings.model.path = str(file)
    settings.n_ctx, settings.n_parallel, settings.verbosity = ROOM, 1, -1
    settings.n_batch = settings.n_ubatch = max(PROMPTS)
    settings.cpuparams.n_threads = settings.cpuparams_batch.n_threads = threads
    server = xllamacpp.Server(settings)
    tokenizer = models.gemma_tokenizer()
    tokens = models.windows(tokenizer, 1, max(PROMPTS))[0].tolist()

    def generate(prompt: int, count: int) -> object:
        request = {"prompt": tokens[:prompt], "n_predict": count, "temperature": 0}
        answer = server.handle_completions({**request, "cache_prompt": False, "ignore_eos": True})
        usage = answer["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"]) == (prompt, count), usage
        return answer

    return generate, file.stat().st_size


WAYS: dict[str, Callable[[int], tuple[Generate, int]]] = {
    "fp32 inductor": by_torch(),
    "bf16 inductor": by_torch("bfloat16"),
    **by_storing("mxfp8"),
    **by_storing("mxint8"),
    "bf16, mxint8 stored, head too, package": by_package,
    "bf16, mxint8 stored, head too, activations, package": functools.partial(
        by_package, quantize_activations=True
    ),
    "bf16, mxint8 stored, head too, k_proj and v_proj in bf16, package": functools.partial(
        by_package, keep=True
    ),
    "bf16, mxint8 stored, head too, activations, k_proj and v_proj in bf16, package": functools.partial(
        by_package, quantize_activations=True, keep=True
    ),
    "torchao int8": by_torch(prepare=_int8),
    LLAMA_CPP: by_llama_cpp,
}
"""Loaders by name. A loader takes the number of threads and returns (`Generate`, bytes of weights)."""


if __name__ == "__main__":
    main()
