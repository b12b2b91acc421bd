"""Figures in README and docs equal the newest committed rows of benchmarks/results, to the digits shown.

`make lint` runs this file by pytest. It compares prose with rows, so it is not part of the test suite.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
NUMBER = re.compile(r"[+-]?\d[\d,]*(?:\.\d+)?")


BF16_CPU = "AVX-512 BF16"
"""The class of CPU of rows that name none."""


def newest(name: str, *keys: str, cpu: str = BF16_CPU) -> dict[tuple[Any, ...], dict[str, Any]]:
    """The last row of benchmarks/results/`name`.jsonl on a class of CPU with each combination of `keys`."""
    lines = (ROOT / f"benchmarks/results/{name}.jsonl").read_text(encoding="utf-8").splitlines()
    rows = [row for row in map(json.loads, lines) if row.get("cpu", BF16_CPU) == cpu]
    return {tuple(row.get(key) for key in keys): row for row in rows}


def table(page: str, head: str) -> dict[str, list[str]]:
    """First cell → numbers of the others, of the table of `page` whose first line has `head`."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    (start,) = (number for number, line in enumerate(lines) if line.startswith("|") and head in line)
    rows = {}
    for line in lines[start + 2 :]:
        if not line.startswith("|"):
            break
        first, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        rows[first] = [text for cell in cells for text in NUMBER.findall(cell)]
    return rows


def measured(workload: str, cpu: str = BF16_CPU) -> list[str]:
    """Returns the first number of each result in README's row of `workload`."""
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = re.findall(rf"^\| 2 cores, {cpu} \| {re.escape(workload)} \|(.*)\|$", readme, re.MULTILINE)
    return [numbers[0] for cell in row.split("|") if (numbers := NUMBER.findall(cell))]


def same(shown: Sequence[str], measured: Sequence[float]) -> None:
    """Every number of a page is what was measured, rounded to its digits."""
    assert len(shown) == len(measured), shown
    for text, value in zip(shown, measured, strict=True):
        digits = len(text.partition(".")[2])
        assert abs(float(text.replace(",", "")) - value) <= 0.5001 * 10**-digits, (text, value)


def test_figures_of_training_steps_equal_results():
    rows = newest("training_step", "model", "run")
    runs = ("bf16 inductor", "mxcompile mxfp8", "saved: mxfp8", "torchao mxfp8 (emulated)")
    for name, model in (("2 layers × 512", "llama 2×512"), ("4 layers × 1024", "llama 4×1024")):
        shown = measured(f"training step, Llama {name}, time")
        same(shown, [rows[model, run]["ratio_to_bf16"] for run in (runs[1], runs[3])])
    mxint8 = [rows[model, "mxcompile mxint8"]["ratio_to_bf16"] for model in ("llama 2×512", "llama 4×1024")]
    same(measured("training step under `mxint8`, Llama 4 layers × 1024, time"), mxint8[1:])
    same(table("docs/cpu.md", "| preset | Llama 2×512 |")["`mxint8`"], mxint8)
    policies = list(table("docs/training.md", "Llama 2×512: step, kept").values())
    for numbers, run in zip(policies, (*runs[1:3], "saved: mxfp8, with attention"), strict=True):
        steps = [rows[model, run] for model in ("llama 2×512", "llama 4×1024")]
        same(numbers, [row[key] for row in steps for key in ("ratio_to_bf16", "saved_to_bf16")])
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8").replace("\n", " ")
    sentence = (
        r"takes (\S+) times the time of BF16's and keeps (\S+) times its bytes .*? has (\S+) and (\S+) \("
    )
    dequantized = re.search(sentence, page)
    assert dequantized is not None
    steps = [rows[model, "backward: dequantized"] for model in ("llama 2×512", "llama 4×1024")]
    same(dequantized.groups(), [row[key] for row in steps for key in ("ratio_to_bf16", "saved_to_bf16")])


def test_figures_of_training_steps_without_bf16_equal_results():
    masked = "AVX2, masked"
    rows = newest("training_step", "model", "run", cpu=masked)
    workload = "training step of an FP32 model under `mxint8` ÷ Inductor's in FP32, Llama 2 layers × 512"
    mxfp8, mxint8 = (
        rows["llama 2×512", f"mxcompile {way}, fp32 model"]["ratio_to_fp32"] for way in ("mxfp8", "mxint8")
    )
    same(measured(workload, masked)[:1], [mxint8])
    page = (ROOT / "docs/cpu.md").read_text(encoding="utf-8").replace("\n", " ")
    sentence = re.search(
        r"the last of them takes (\S+) times as long as FP32, under `mxint8` (\S+) times", page
    )
    assert sentence is not None
    same(sentence.groups(), [mxfp8, mxint8])


def test_figures_of_cpus_without_bf16_equal_results():
    shown = {name.partition(", 4×")[0]: numbers for name, numbers in table("docs/cpu.md", "workload").items()}
    steps = newest("training_step", "model", "run", cpu="AVX2")
    for width in (256, 512):
        mxfp8, in_fp32, bf16, fp32 = (
            steps[f"llama 2×{width}", run]["median_ms"]
            for run in ("mxcompile mxfp8", "mxcompile mxfp8, fp32 model", "bf16 inductor", "fp32 inductor")
        )
        same(shown[f"training step of a BF16 Llama, 2 layers × {width}"], [mxfp8, bf16, fp32])
        same(shown[f"training step of an FP32 Llama, 2 layers × {width}"], [in_fp32, fp32])
    products = newest("decode_cpu", "weight", "rows", "run", cpu="AVX2")
    runs = ("mxcompile mxfp8", "bf16 inductor", "fp32 inductor", "torchao int8", "llama.cpp q8_0")
    for workload, weight, rows, others in (
        ("1 row × a stored weight of 8192×8192", "8192x8192", 1, runs),
        ("512 rows × a stored weight of 4096×4096", "4096x4096", 512, runs[:4]),
    ):
        figures = [number for number in shown[workload] if number not in ("8", "8,", "0")]  # int8, Q8_0
        same(figures, [products[weight, rows, run]["median_ms"] for run in others])
    attentions = newest("decode_attention", "context", "run", cpu="AVX2")
    runs = (
        "mxfp8",
        *(f"sdpa {dtype}, {heads}" for heads in ("repeated", "packed") for dtype in ("bf16", "fp32")),
    )
    numbers = shown["attention of one token over 4,096 tokens in a stored cache"]
    figures = [number for number in numbers if number not in ("16", "16,", "32")]  # BF16, FP32
    same(figures, [attentions[4096, run]["median_us"] / 1000 for run in runs])


def test_figures_of_losses_equal_results():
    rows = newest("parity", "steps", "policy", "seed")
    saved = "benchmarks/saved_mxfp8.yaml"
    of = {
        "MXFP8, over BF16": ("nvidia", "gap"),
        "`saved: mxfp8`, over BF16": (saved, "gap"),
        "`saved: mxfp8`, over MXFP8": (saved, "gap_to_first"),
    }
    shown = table("docs/training.md", "loss after 2,000 steps")
    assert shown.keys() == of.keys()
    for name, (policy, key) in of.items():
        first, second = (100 * rows[2000, policy, seed][key] for seed in (0, 1))
        same(shown[name], [first, second, (first + second) / 2, abs(first - second) / 2])
    page = (ROOT / "docs/training.md").read_text(encoding="utf-8").replace("\n", " ")
    sentence = re.search(
        r"After 500 steps, MXFP8's loss was (.*? %).*?After 2,000 steps it was (.*? %)", page
    )
    assert sentence is not None
    numbers = NUMBER.findall(f"{sentence[1]} {sentence[2]}")
    same(numbers, [100 * rows[steps, "nvidia", seed]["gap"] for steps in (500, 2000) for seed in (0, 1)])


def test_figures_of_training_with_less_equal_results():
    rows = [row for row in newest("training_less", "run").values() if row["median_ms"] is not None]
    shown = list(table("docs/training.md", "weights' shard").values())
    assert len(shown) == len(rows)
    for numbers, row in zip(shown, rows, strict=True):
        megabytes = [row[key] / 1e6 for key in ("saved_bytes", "weight_bytes", "sent_bytes")]
        same(numbers[-5:], [*megabytes, row["casts"], row["ratio_to_bf16"]])


def test_figures_of_serving_equal_results():
    rows = newest("serving", "what", "run")
    names = {
        "torchao int8 weight-only": "torchao int8",
        "values of llama.cpp's Q8_0": "llama.cpp q8_0 (values)",
    }
    names |= {"BF16": "bf16", "BF16, keys and values in MXFP8": "mxfp8 keys and values"}
    for name, numbers in table("docs/serving.md", "perplexity a byte").items():
        row = rows["quality", names.get(name, name.replace("MXFP8", "mxfp8"))]
        gaps = [] if name == "BF16" else [100 * row["over_bf16"], 100 * row["logits_gap"]]
        same(numbers, [row["perplexity"], *gaps, row["weight_bytes"] / 1e3])
    names |= {"stored MXFP8": "stored weights", "stored MXINT8": "mxint8 weights"}
    names["stored MXFP8, MXFP8 activations"] = "stored weights, mxfp8 activations"
    names["stored MXINT8, MXINT8 activations"] = "mxint8 weights and activations"
    for name, numbers in table("docs/serving.md", "prefill speed ÷ BF16's").items():
        row = rows["speed", names[name]]
        same(numbers, [row["bf16_prefill_over_this"], row["tokens_per_s"], row["tokens_over_bf16"]])
    shown = measured("decoding, two blocks of Llama 3 8B, tokens a second")
    same(shown, [rows["speed", run]["tokens_over_bf16"] for run in ("stored weights", "torchao int8")])


def test_figures_of_decoding_layers_equal_results():
    rows = newest("decode_cpu", "weight", "rows", "run")
    page = (ROOT / "docs/serving.md").read_text(encoding="utf-8")
    shown = re.findall(
        r"^\| (\d+)×(\d+) \| (\d+) \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$", page, re.MULTILINE
    )
    assert len(shown) == 6
    for n, k, count, *ratios in shown:
        runs = ("mxcompile mxfp8", "torchao int8", "llama.cpp q8_0")
        same(ratios, [rows[f"{n}x{k}", int(count), run]["bf16_over_this"] for run in runs])
    shown = measured("decoding, one weight of 8192×8192 in MXFP4, tokens a second")
    runs = ("mxcompile mxfp4", "torchao int8")
    same(shown, [rows["8192x8192", 1, run]["bf16_over_this"] for run in runs])


def test_decoding_by_one_and_by_two_threads():
    single = newest("decode_cpu_one_thread", "weight", "run")
    rows = newest("decode_cpu", "weight", "rows", "run")
    two = {(weight, run): row for (weight, count, run), row in rows.items() if count == 1}
    runs = ("mxcompile mxfp8", "mxcompile mxfp4", "mxcompile nvfp4", "torchao int8")
    types = ("q8_0", "q4_0", "q4_0 repack", "mxfp4", "mxfp4 repack")
    runs += tuple(f"llama.cpp {elem}" for elem in types)
    for head, timed in {"weight, one thread": single, "weight, two threads": two}.items():
        for weight, numbers in table("docs/cpu.md", head).items():
            same(numbers, [timed[weight.replace("×", "x"), run]["median_ms"] for run in runs])


def test_figures_of_integers_beside_llama_cpp_equal_results():
    runs = ("mxcompile mxfp8", "mxcompile mxint8", "mxcompile mxint8, activations too", "llama.cpp q8_0")
    shown = table("docs/cpu.md", "| instructions | BF16 or FP32 |")
    for name, cpu, baseline in (("AMX", "AMX BF16", "bf16"), ("AVX2", "AVX2, masked", "fp32")):
        rows = newest("decode_cpu", "weight", "rows", "run", cpu=cpu)
        timed = [rows["8192x8192", 1, run] for run in (f"{baseline} inductor", *runs)]
        same(shown[name], [*(row["median_ms"] for row in timed), timed[2]["llama_over_this"]])


def test_figures_of_products_by_amx_equal_results():
    stored = ("mxfp8", "mxint8", "mxint8, activations too", "mxfp4")
    runs = ("bf16 inductor", *(f"mxcompile {name}" for name in stored), "llama.cpp q8_0")
    rows = newest("decode_cpu", "weight", "rows", "run", cpu="AMX BF16")
    for count, shown in table(
        "docs/cpu.md", "| rows | BF16 Inductor | MXFP8 | MXINT8 weight | both in MXINT8 | MXFP4"
    ).items():
        same(shown, [rows["8192x8192", int(count), run]["median_ms"] for run in runs])


def test_figures_of_generation_beside_llama_cpp_equal_results():
    workload = "Gemma 3 270M, a package in MXINT8 ÷ llama.cpp's Q8_0, decoding, tokens a second"
    both = "Gemma 3 270M, a package with weights and activations in MXINT8 ÷ llama.cpp's Q8_0, decoding"
    prompt, stored = "the same, a prompt of 512 tokens", "bf16, mxint8 stored, head too"
    for name, cpu, way, key in (
        (workload, "AMX BF16", "package", "decode_per_s"),
        (workload, "AVX2", "package", "decode_per_s"),
        (prompt, "AVX2", "package", "prefill_512_per_s"),
        (both, BF16_CPU, "activations, package", "decode_per_s"),
        (prompt, BF16_CPU, "activations, package", "prefill_512_per_s"),
    ):
        rows = newest("pretrained_speed", "run", cpu=cpu)
        package, llama = rows[f"{stored}, {way}",], rows["llama.cpp q8_0",]
        same(measured(name, cpu.replace("AMX BF16", "AMX")), [package[key] / llama[key]])


def test_figures_of_attention_over_a_cache_equal_results():
    rows = newest("decode_attention", "context", "run")
    for tokens, numbers in table("docs/serving.md", "tokens in the cache").items():
        packed, ours = (rows[int(tokens.replace(",", "")), run] for run in ("sdpa bf16, packed", "mxfp8"))
        same(numbers, [packed["median_us"], ours["median_us"], ours["packed_over_this"]])


def test_figures_of_compile_times_equal_results():
    rows = newest("large_models", "measure", "way", cpu="AMX BF16")
    page = (ROOT / "docs/large.md").read_text(encoding="utf-8").replace("\n", " ")
    sentence = r"took ([\d.]+) times the processor time .*? Compiled block by block, it took ([\d.]+) times\."
    figures = re.search(sentence, page)
    assert figures is not None
    ways = ("mxfp8 whole", "mxcompile.compile")
    same(figures.groups(), [float(rows["cold compile", way]["to_inductor"]) for way in ways])
    rows = newest("compile_time", "measure", "model", "nodes", cpu="AVX2")
    shares = sorted(float(row["share"].rstrip("%")) for row in rows.values() if "share" in row)
    readme = (ROOT / "README.md").read_text(encoding="utf-8").replace("\n", " ")
    figures = re.search(
        r"On AVX2 the passes take ([\d.]+) to ([\d.]+) % of a cold compile: ([\d.]+) ms a node", readme
    )
    assert figures is not None
    same(figures.groups()[:2], [shares[0], shares[-1]])
    growth = [row["us_per_node"] / 1e3 for row in rows.values() if row.get("nodes", 1e9) <= 21112]
    assert max(growth) <= 1.1 * float(figures[3])


def test_pages_have_the_tables_of_predicted_figures(benchmark):
    predicted = benchmark("predicted")
    for page, markdown in predicted.PAGES.items():
        _, begin, rest = page.read_text(encoding="utf-8").partition(predicted.BEGIN)
        assert begin, page
        assert rest.partition(predicted.END)[0].strip() == markdown(), f"{page}: predicted.py --table --write"


def test_the_page_has_the_presets_that_were_measured(benchmark):
    presets = benchmark("preset_table")
    _, begin, rest = presets.PAGE.read_text(encoding="utf-8").partition(presets.BEGIN)
    assert begin
    assert rest.partition(presets.END)[0].strip() == presets.table(presets.results())


def test_the_page_has_the_points_that_are_kept(benchmark):
    calibration = benchmark("calibration")
    text = calibration.PAGE.read_text(encoding="utf-8")
    assert text == calibration.replaced(text, lambda: calibration.page(calibration.points())), (
        "calibration.py --write"
    )
    points = calibration.points()
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    match = re.search(r"Of (\d+) kernels that others\s+timed, (\d+) took", readme)
    assert match is not None
    same(match.groups(), [len(points), sum(point.is_near for point in points)])


def test_the_page_has_the_whole_steps(benchmark):
    whole_steps = benchmark("whole_steps")
    text = (ROOT / "docs/calibration.md").read_text(encoding="utf-8")
    shown = text.partition(whole_steps.BEGIN)[2].partition(whole_steps.END)[0]
    assert shown.strip() == whole_steps.table(), "whole_steps.py --write"


def test_the_page_has_the_pretrained_models_that_were_measured(benchmark):
    pretrained = benchmark("pretrained_table")
    page = pretrained.PAGE.read_text(encoding="utf-8")
    assert pretrained.updated(page) == page, "python benchmarks/pretrained_table.py"


def test_perplexity_of_a_pretrained_model():
    presets = {
        "mxfp8 (preset nvidia)": "AVX2",
        "mxint8 (preset mxint8)": "AMX BF16",
        "mxfp8 floor (preset ocp)": "AVX2",
    }
    rows = [newest("pretrained", "model", "way", cpu=cpu)["gemma", way] for way, cpu in presets.items()]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    shown = [number for pair in re.findall(r"([\d.]+) ± ([\d.]+) % more", readme) for number in pair]
    same(shown, [figure for row in rows for figure in row["over_fp32_percent"]])


def test_the_order_of_an_audit():
    rows = newest("audit_ranks", "model", cpu="AVX2")
    page = (ROOT / "docs" / "audit.md").read_text(encoding="utf-8").replace("\n", " ")
    output = re.search(r"effects is ([\d.]+) on MiniLM .*? and ([\d.]+) on Gemma", page)
    harm = re.search(r"For FLOPs × error² it is ([\d.]+) and ([\d.]+)\.", page)
    assert output is not None
    assert harm is not None
    for match, figure in ((output, "ranks_output"), (harm, "ranks_harm")):
        same(match.groups(), [rows[model,][figure] for model in ("minilm", "gemma")])


def test_figures_of_shares_of_layers_equal_results():
    row = newest("audit_ranks", "model", cpu="AVX2")["gemma",]
    page = (ROOT / "docs" / "real-models.md").read_text(encoding="utf-8").replace("\n", " ")
    shares = re.search(r"Gemma's (\d+) layers has ([\d.]+) of the whole .*? add up to ([\d.]+) of it", page)
    assert shares is not None
    same(shares.groups(), [row[key] for key in ("layers", "largest_of_whole", "sum_of_whole")])


def test_fine_tuning_of_a_pretrained_model():
    rows = newest("pretrained_training", "model", "tune", "way", cpu="AVX2")
    fp32, mxfp8, saved = (
        rows["gemma 3 270m", "full", way] for way in ("fp32", "mxfp8 (preset nvidia)", "saved: mxfp8")
    )
    page = (ROOT / "docs/real-models.md").read_text(encoding="utf-8").replace("\n", " ")
    sentence = r"loss that is ([\d.]+) higher\. After (\d+) steps the difference is ([\d.]+) ± ([\d.]+)\."
    figures = re.search(sentence, page)
    assert figures is not None
    same(figures.groups(), [mxfp8["before"] - fp32["before"], mxfp8["steps"], *mxfp8["over_fp32"]])
    assert "keeps two thirds of FP32's bytes" in page
    assert round(saved["saved_mb"] / fp32["saved_mb"], 2) == 0.67


def test_quantization_aware_training_of_a_pretrained_model():
    rows = newest("qat", "trained", "served", cpu="AMX BF16")
    shown = table("docs/qat.md", "| served by, in |")
    assert ("bf16", "mxcompile mxfp4") in rows
    for (trained, served), row in rows.items():
        if trained == served or "left_out" in row:
            continue
        library, _, precision = served.partition(" ")
        aware = rows.get((served, served), {}).get("over_bf16", ())
        same(shown[f"{library}, {precision.upper()}"], [row["before"], *row["over_bf16"], *aware])
    page = (ROOT / "docs/qat.md").read_text(encoding="utf-8").replace("\n", " ")
    sentence = r"took (\S+) s of processor time with mxcompile, (\S+) s with torchao, and (\S+) s in BF16"
    steps = re.search(sentence, page)
    assert steps is not None
    trained = ("mxcompile mxfp4", "torchao mxfp4", "bf16")
    same(steps.groups(), [rows[served, served]["processor_s"] for served in trained])


def test_a_sampled_step_on_a_gpu():
    row = json.loads((ROOT / "benchmarks/results/predicted_watch.jsonl").read_text().splitlines()[-1])
    page = (ROOT / "docs/watch.md").read_text(encoding="utf-8")
    (shown,) = re.findall(r"estimated\s+at (\S+) \((\S+)–(\S+)\) times a plain one", page)
    same(shown, [row["ratio"], row["ratio_low"], row["ratio_high"]])
