"""Which program made a published row: what the row says of it (`framework`), else the program that its family names,
else the repository or paper that its provenance and address name. Never the name of a table or of its source.

A row of which none is known is taken to be torch's own, run eagerly, as we are.
"""

from __future__ import annotations

import re
from typing import Literal

from benchmarks.published_rows import Row

Framework = Literal[
    "megatron-deepspeed",
    "deepspeed",
    "megatron-core",
    "nemo",
    "megatron-lm",
    "scaling",
    "llm-foundry",
    "nanotron",
    "torchtitan",
    "torchtune",
    "litgpt",
    "internevo",
    "jax",
    "nvidia-examples",
    "fairscale",
    "hai-llm",
    "",
]

_NAMES: tuple[tuple[str, Framework], ...] = (
    # First match wins: a name that contains another's stands before it.
    (r"megatron.?deepspeed|bigscience|vtrain|2201\.11990", "megatron-deepspeed"),
    (r"megatron.?bridge|megatron.?core|\bmcore\b", "megatron-core"),
    (r"nvidia-nemo|nemo.?framework|nvidia/nemo|\bnemo\b", "nemo"),
    (r"sail-sg|zero.?bubble|vocabulary ?parallelism|2401\.10241|2411\.05288", "megatron-lm"),
    (r"megatron.?lm|2104\.04473|2205\.05198|1909\.08053|2402\.15627|2406\.11704|\bmegatron\b", "megatron-lm"),
    (r"deepspeed|1910\.02054|2306\.10209", "deepspeed"),
    (r"aleph.?alpha|2311\.05610", "scaling"),
    (r"llm.?foundry|mosaicml|composer", "llm-foundry"),
    (r"nanotron|picotron|ultrascale", "nanotron"),
    (r"torchtitan|2410\.06511", "torchtitan"),
    (r"torchtune", "torchtune"),
    (r"litgpt|lit-gpt|lit-llama", "litgpt"),
    (r"internevo|internlm", "internevo"),
    (r"jax.?toolbox|maxtext|\bpaxml\b|\bjax\b|t5x|levanter", "jax"),
    (r"fairscale|metaseq|2205\.01068|2302\.13971", "fairscale"),
    (r"hai-?llm|2412\.19437", "hai-llm"),
    (r"deeplearningexamples|deeplearning-benchmark", "nvidia-examples"),
)
_CORE = re.compile(r"h100|h200|h800|h20\b|gh200|b200|b300|mcore|transformer engine", re.IGNORECASE)
"""What Megatron-LM's own tables run Megatron-Core on; what came before it never met these cards."""


def named_framework(text: str) -> Framework | None:
    return next((name for pattern, name in _NAMES if re.search(pattern, text.lower())), None)


def framework_of(row: Row) -> Framework:
    columns = ("framework", "family", "provenance", "url")
    found = next((name for column in columns if (name := named_framework(row.text(column)))), "")
    stage = row.text("zero_stage").lower()
    if found == "megatron-lm" and _CORE.search(f"{row.text('hardware')} {row.text('url')} {row.text('provenance')}"):
        return "megatron-core"
    if found == "megatron-lm" and re.match(r"(zero-?)?3\b", stage) and "fsdp" not in stage:
        return "deepspeed"  # Megatron-LM had no sharded parameters: its papers compare with DeepSpeed's
    return found
