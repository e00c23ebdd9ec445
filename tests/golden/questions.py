"""Questions of `mw plan` whose answers are stored beside this file: every option, mixed clusters, nothing fits, foreign
modules."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ON_8 = "--model llama3-8b --cluster 8xh100"
SMALL = "--model gpt2-124m --cluster 2xh100"
QUESTIONS: dict[str, str] = {
    "8b_on_8": f"{ON_8} --seq 8192 --batch 128",
    "8b_on_8_default": ON_8,
    "8b_top_2": f"{ON_8} --top 2",
    "8b_pinned": f"{ON_8} --pin tensor=2 --ban pipeline --max-memory 70GiB",
    "8b_pin_microbatch": f"{ON_8} --pin microbatch=1 --pin recompute",
    "8b_ban_compile": f"{ON_8} --ban compile --ban shard.stage=3",
    "8b_schedule": f"{ON_8} --pin pipeline=4 --pin pipeline.schedule=interleaved",
    "8b_zero_bubble": f"{ON_8} --pin pipeline=2 --pin pipeline.schedule=zero_bubble_h1",
    "8b_why": f"{ON_8} --why tensor --why microbatch --why shard.stage",
    "8b_what_if": f"{ON_8} --what-if memory=+20GiB --what-if inner=x2",
    "8b_what_if_batch": f"{ON_8} --what-if batch=256",
    "8b_what_if_nodes": f"{ON_8} --what-if nodes=+1",
    "8b_what_if_flops": f"{ON_8} --what-if flops=x2 --what-if outer=100GB/s",
    "8b_front": "--model gpt2-xl --cluster 4xh100 --batch 16 --front",
    "8b_devices": "--model llama3.2-3b --cluster 8xh100 --devices 4..16 --target-tokens 1T",
    "8b_auto": "--model qwen3-4b --cluster 4xh100 --batch auto --critical-batch 100",
    "8b_exact": f"{ON_8} --allow exact",
    "8b_reordered": f"{ON_8} --allow reordered",
    "8b_on_4090": "--model llama3-8b --cluster 8xrtx4090 --batch 8",
    "8b_two_nodes": "--model llama3-8b --cluster 2x8xh100 --batch 64",
    "8b_one_device": "--model llama3-8b --cluster 1xh200 --batch 4",
    "70b_on_64": "--model llama3-70b --cluster 8x8xh100 --seq 8192 --batch 256",
    "405b_on_512": "--model llama3-405b --cluster 64x8xh100 --seq 8192 --batch 512 --top 4",
    "175b_on_512_a100": "--model gpt3-175b --cluster 64x8xa100-80 --seq 2048 --batch 1536 --top 3",
    "124m_on_2": SMALL,
    "124m_laptop": "--model gpt2-124m --cluster laptop --batch 8 --seq 512",
    "124m_auto": f"{SMALL} --batch auto",
    "1b_approximate": "--model byte-3m --cluster 2xh100 --allow approximate --seq 512",
    "8b_async": f"{ON_8} --allow approximate --pin pipeline=4 --pin pipeline.schedule=async",
    "qwen_on_16_devices": "--model qwen3-14b --cluster 8xa100-40 --devices 16 --batch 32",
    "mixtral_on_16": "--model mixtral-8x7b --cluster 2x8xh100 --batch 64",
    "moe_tiny": "--model moe-tiny --cluster 4xl4 --batch 16 --seq 64",
    "deepseek_on_256": "--model deepseek-v3-like --cluster 32x8xh100 --batch 512 --top 2 "
    "--pin expert=8 --pin pipeline=4 --ban context",
    "long_sequence": "--model mistral-7b --cluster 8xh100 --seq 32768 --batch 8",
    "vit_on_8": "--model vit-l16 --cluster 8xa100-80 --batch 512",
    "resnet_on_4": "--model resnet50 --cluster 4xv100 --batch 256",
    "vgg_on_2": "--model vgg16 --cluster 2xt4 --batch 64",
    "dlrm_on_8": "--model dlrm-small --cluster 8xa100-40 --batch 8192",
    "dlrm_large": "--model dlrm-large --cluster 8xh100 --batch 16384",
    "mixed_devices": "--model llama3.2-3b --cluster 4xh100+4xa100-80 --batch 256",
    "mixed_nodes": "--model gpt2-large --cluster 4xh100+2x4xa100-80 --batch 96 --top 3",
    "mixed_pipeline": "--model gpt2-xl --cluster 2xh100+2xa100-80 --batch 32 --pin pipeline=4",
    "mixed_unequal": "--model gpt2-large --cluster 2xa100-40+2xl4 --batch 24",
    "nothing_fits": "--model gpt2-large --cluster 1xt4 --batch 4 --max-memory 6GiB",
    "nothing_fits_memory": "--model gpt2-xl --cluster 4xh100 --max-memory 4GiB --batch 8",
    "nothing_fits_pinned": f"{ON_8} --pin replicate=8 --ban recompute",
    "foreign_mlp": "--model golden_models:mlp --cluster 4xh100 --batch 64",
    "foreign_encoder": "--model golden_models:encoder --cluster 4xa100-40 --batch 64 --seq 64",
    "foreign_mixed": "--model golden_models:encoder --cluster 2xh100+2xa100-80 --batch 32 --seq 64",
    "run_file": "RUN.toml",
    "run_file_wishes": "RUN.toml --ban compile --top 3",
}
RUN = """[model]
name = "gpt2-large"

[data]
train = "absent.txt"
sequence = 512

[train]
batch = 32
steps = 10
optimizer = { name = "muon", lr = 1e-3 }

[plan]
pin = ["shard"]

[run]
folder = "absent"
cluster = "8xa100-80"
ranks = 4
"""
WORDS = frozenset(
    ("evaluated", "search_seconds", "rejected", "bottleneck", "certificate", "words", "way", "what", "notes", "closed")
) | {"reason", "sources", "wished", "differences"}
"""Sentences, counts of what was looked at, and seconds that a search took: they may change."""


def numbers(value: Any) -> Any:
    """An answer without its words, rounded to 12 digits: another order of additions is not another answer."""
    if isinstance(value, dict):
        return {key: numbers(each) for key, each in value.items() if key not in WORDS}
    if isinstance(value, list):
        return [numbers(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.10g}")
    return value


def answer(name: str, folder: Path) -> tuple[int, Any]:
    """Exit code and JSON of a question."""
    import contextlib
    import io

    from meshwright.cli.main import main

    (folder / "RUN.toml").write_text(RUN)
    words = ["plan", *QUESTIONS[name].replace("RUN.toml", str(folder / "RUN.toml")).split(), "--json"]
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        code = main(words)
    return code, numbers(json.loads(out.getvalue()))
