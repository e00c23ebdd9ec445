"""The cases of `benchmarks.gpu`: models and plans for one GPU, as plain data. No torch.

    SEEN      forecasts against runs: models cut in depth, so that each takes seconds; looked at while building
    SMOKE     every technique's path on a GPU; axes of size one run the code of larger ones, NCCL included
    REGRET    eight plans each of three models: is the fastest among the first we name?
    ROWS      the table of speed and memory beside other systems
    TINY_*    the same on a CPU in seconds, to prove the scripts

`gpu_frozen` has the list that is not looked at.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import meshwright as mw
from benchmarks.gpu_frozen import BF16, CHUNKED, COMPILE, RECOMPUTE, selective
from benchmarks.gpu_frozen import CASES as _FROZEN
from benchmarks.gpu_frozen_next import CASES as _NEXT
from meshwright.core.plan import Plan
from meshwright.run.model import ModelDescription

Technique = dict[str, Any]
FUSED: tuple[Technique, ...] = (BF16, COMPILE)
ONE_GRAPH: Technique = {"name": "compile", "scope": "model", "graphs": True}
MASTER: Technique = {**BF16, "weights": "master"}
FAST: tuple[Technique, ...] = (MASTER, COMPILE)
FP8: Technique = {**BF16, "matmul": "fp8_tensorwise", "edge_blocks": 0}
LOW_BIT: Technique = {"name": "lowbit_optimizer"}
LEAN: Technique = {**COMPILE, "keep": "products"}
SMALL: tuple[Technique, ...] = (MASTER, LEAN, CHUNKED)
"""Little memory for little time, at the same numerics."""


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model, a batch and a plan on one device."""

    name: str
    model: str
    """A preset, or "package.module:function"."""
    change: Mapping[str, Any] = field(default_factory=dict)
    arguments: Mapping[str, Any] = field(default_factory=dict)
    batch: int
    microbatch: int = 0
    """0: the batch at once."""
    sequence: int = 1
    documents: tuple[int, ...] = ()
    """Lengths of the documents packed into every row; empty: a row is one."""
    techniques: tuple[Technique, ...] = FUSED
    must_fail: bool = False
    """There is no memory for it."""

    @property
    def plan(self) -> Plan:
        microbatch = self.microbatch or self.batch
        value = {"version": 1, "batch": self.batch, "microbatch": microbatch, "techniques": list(self.techniques)}
        return Plan.from_json(json.dumps(value))

    def describe(self) -> ModelDescription:
        return mw.model(self.model, sequence=self.sequence, change=self.change, arguments=self.arguments)


@dataclass(frozen=True, kw_only=True)
class TableRow:
    """Ours and the systems it is compared with: a row of the table of speed."""

    ours: Case
    peers: tuple[tuple[str, Mapping[str, Any]], ...] = ()
    """Functions of `gpu_peers` with their arguments; the fastest one that runs is compared with."""
    beside: Case | None = None
    """Another plan of ours to compare with."""
    goal: float = 0.0
    """Least ratio of our tokens per second to theirs; 0: none."""
    most_gib: float = 0.0
    """Most that torch may have allocated; 0: no limit."""
    fits_together: bool = True
    """Whether all sides fit into the GPU at once, so that each is built once and they take turns."""


def _case(name: str, model: str, batch: int, sequence: int = 1, techniques: Any = (BF16,), **more: Any) -> Case:
    return Case(name=name, model=model, batch=batch, sequence=sequence, techniques=tuple(techniques), **more)


FROZEN = tuple(Case(**case) for case in _FROZEN)
NEXT = tuple(Case(**case) for case in _NEXT)

_1B: Mapping[str, Any] = {"num_layers": 4}
_8B: Mapping[str, Any] = {"num_layers": 2}
_MIXTRAL = {"num_layers": 3, "hidden_size": 2048, "expert_ffn_size": 4096, "balance": 0.01}
_DEEPSEEK = {
    "num_layers": 4,
    "hidden_size": 2048,
    "num_heads": 16,
    "num_kv_heads": 16,
    "ffn_size": 10944,
    "vocab_size": 102400,
    "num_experts": 64,
    "experts_per_token": 6,
    "expert_ffn_size": 1408,
    "num_shared_experts": 2,
    "num_dense_layers": 1,
}
_TOO_LARGE: Mapping[str, Any] = {"must_fail": True}

SEEN: tuple[Case, ...] = (
    *(
        _case(f"llama-1b x4, {batch} x {sequence}", "llama3.2-1b", batch, sequence, change=_1B)
        for batch, sequence in ((1, 1024), (8, 512), (4, 2048), (2, 4096), (1, 8192), (1, 16384))
    ),
    *(
        _case(f"llama-1b x4, 2 x 4096, {name}", "llama3.2-1b", 2, 4096, (BF16, *ways), change=_1B)
        for name, ways in {
            "recompute": (RECOMPUTE,),
            "recompute 2": ({**RECOMPUTE, "layers": 2},),
            "chunked loss": (CHUNKED,),
            "recompute, chunked loss": (RECOMPUTE, CHUNKED),
        }.items()
    ),
    _case("llama-1b x4, 1 x 2048, fp32", "llama3.2-1b", 1, 2048, (), change=_1B),
    _case("llama-1b x4, 4 x 2048 in 4", "llama3.2-1b", 4, 2048, change=_1B, microbatch=1),
    _case("llama-1b untied x8, 4 x 4096", "llama3.2-1b", 4, 4096, change={"num_layers": 8, "tied": False}),
    _case("llama-8b x2, 1 x 4096", "llama3-8b", 1, 4096, change=_8B),
    _case("llama-8b x2, 2 x 8192, chunked loss", "llama3-8b", 2, 8192, (BF16, CHUNKED), change=_8B),
    _case(
        "llama-8b x3 of 32000, 4 x 4096, recompute",
        "llama3-8b",
        4,
        4096,
        (BF16, RECOMPUTE),
        change={"num_layers": 3, "vocab_size": 32000},
    ),
    _case("gpt2-124m, 8 x 1024", "gpt2-124m", 8, 1024),
    _case("gpt2-124m, 32 x 512", "gpt2-124m", 32, 512),
    _case("gpt2-medium x12, 8 x 1024", "gpt2-medium", 8, 1024, change={"num_layers": 12}),
    _case("gpt2-xl x8, 4 x 1024", "gpt2-xl", 4, 1024, change={"num_layers": 8}),
    _case("qwen3-0.6b x8, 4 x 2048", "qwen3-0.6b", 4, 2048, change={"num_layers": 8}),
    _case("mixtral-like x3, 2 x 4096", "mixtral-8x7b", 2, 4096, change=_MIXTRAL),
    _case("mixtral-like x3, 1 x 2048", "mixtral-8x7b", 1, 2048, change=_MIXTRAL),
    _case("deepseek-like x4, 2 x 2048", "deepseek-v3-like", 2, 2048, change=_DEEPSEEK),
    _case("deepseek-like x4, 1 x 4096, recompute", "deepseek-v3-like", 1, 4096, (BF16, RECOMPUTE), change=_DEEPSEEK),
    _case("vit-b16, 128", "vit-b16", 128),
    _case("vit-b16, 16", "vit-b16", 16),
    _case("vit-l16, 64", "vit-l16", 64),
    _case("vgg16, 64", "vgg16", 64),
    _case("resnet50, 128", "resnet50", 128),
    _case("resnet50, 32", "resnet50", 32),
    _case("dlrm-small, 8192", "dlrm-small", 8192),
    _case("dlrm-small, 2048", "dlrm-small", 2048),
    _case("llama-1b x4, 2 x 4096, compiled", "llama3.2-1b", 2, 4096, FUSED, change=_1B),
    _case("llama-1b x4, 1 x 1024, compiled", "llama3.2-1b", 1, 1024, FUSED, change=_1B),
    _case("llama-1b x4, 4 x 4096, compiled, recompute", "llama3.2-1b", 4, 4096, (*FUSED, RECOMPUTE), change=_1B),
    _case("llama-8b x2, 1 x 4096, compiled", "llama3-8b", 1, 4096, FUSED, change=_8B),
    _case("gpt2-124m, 8 x 1024, compiled", "gpt2-124m", 8, 1024, FUSED),
    _case("mixtral-like x3, 2 x 4096, compiled", "mixtral-8x7b", 2, 4096, FUSED, change=_MIXTRAL),
    _case("vit-b16, 128, compiled", "vit-b16", 128, 1, FUSED),
    _case("llama-1b x4, 4 x 65536", "llama3.2-1b", 4, 65536, change=_1B, **_TOO_LARGE),
    _case("llama-8b x16, 8 x 8192", "llama3-8b", 8, 8192, change={"num_layers": 16}, **_TOO_LARGE),
    _case("vit-l16, 2048", "vit-l16", 2048, **_TOO_LARGE),
    _case("llama-8b x32, 1 x 8192", "llama3-8b", 1, 8192, **_TOO_LARGE),
)

SMOKE: tuple[Case, ...] = tuple(
    _case(f"smoke: {name}", "llama3.2-1b", 2, 2048, ways, change=_1B)
    for name, ways in {
        "fp32": (),
        "bf16": (BF16,),
        "compile": FUSED,
        "compile, recompute": (*FUSED, RECOMPUTE),
        "compile, recompute half": (*FUSED, {**RECOMPUTE, "layers": 2}),
        "compile, selective": (*FUSED, selective("0-3")),
        "compile, chunked loss": (*FUSED, CHUNKED),
        "compile, replicate": (*FUSED, {"name": "replicate", "size": 1}),
        "compile, shard": (*FUSED, {"name": "shard", "size": 1}),
        "compile, tensor": (*FUSED, {"name": "tensor", "size": 1}),
        "tensor (sequence)": (BF16, {"name": "tensor", "size": 1, "sequence": True}),
        "pipeline": (BF16, {"name": "pipeline", "size": 1}),
    }.items()
)


def _regret(model: str, preset: str, layers: int, batch: int, sequence: int) -> tuple[Case, ...]:
    """Eight plans of one batch."""
    plans: dict[str, tuple[int, tuple[Technique, ...]]] = {
        "bf16": (batch, (BF16,)),
        "bf16, in 4": (batch // 4, (BF16,)),
        "bf16, in 8, chunked loss": (batch // 8, (BF16, CHUNKED)),
        "bf16, recompute": (batch, (BF16, RECOMPUTE)),
        "bf16, selective, in 2": (batch // 2, (BF16, selective(f"0-{layers - 1}"))),
        "compiled": (batch, FUSED),
        "compiled, the first block recomputed, in 2": (batch // 2, (*FUSED, {**RECOMPUTE, "layers": "0"})),
        "fp32, in 4": (batch // 4, ()),
    }
    change = {"num_layers": layers}
    return tuple(
        _case(f"{model}: {name}", preset, batch, sequence, ways, change=change, microbatch=microbatch)
        for name, (microbatch, ways) in plans.items()
    )


REGRET: tuple[Case, ...] = (
    *_regret("llama-8b x3", "llama3-8b", 3, 8, 2048),
    *_regret("gpt2-xl x8", "gpt2-xl", 8, 16, 1024),
    *_regret("mixtral-8x7b x2", "mixtral-8x7b", 2, 8, 2048),
)

# Shapes of the peers' tables: untied heads and plain rotary positions; GPT-2 without biases, as nanoGPT trains it.
_UNTIED: Mapping[str, Any] = {"tied": False, "rope_scaling": "none"}
_NANO: Mapping[str, Any] = {"vocab_size": 50304, "qkv_bias": False, "bias": False}
_EXPERTS = {"num_layers": 8, "hidden_size": 2048, "num_heads": 16, "num_kv_heads": 8, "expert_ffn_size": 4096}
_FEW: Technique = {"name": "recompute", "layers": "none", "attention": "0-3"}
_TITAN_1B, _TITAN_3B = ({"shape": shape, "batch": 4} for shape in ("llama-1b", "llama-3b"))


def _llama(size: str, name: str, techniques: tuple[Technique, ...] = FAST) -> Case:
    return _case(name, f"llama3.2-{size}", 4, 4096, techniques, change=_UNTIED)


_LLAMA_1B = _llama("1b", "llama-1b")

ROWS: tuple[TableRow, ...] = (
    TableRow(ours=_LLAMA_1B, peers=(("titan", _TITAN_1B),), goal=1.22),
    TableRow(ours=_llama("1b", "llama-1b, small", SMALL), peers=(("titan", _TITAN_1B),), goal=1.22, most_gib=33.0),
    TableRow(ours=_llama("1b", "llama-1b, chunked loss", (*FAST, CHUNKED)), beside=_LLAMA_1B, goal=0.98),
    TableRow(
        ours=_llama("1b", "llama-1b, fp8", (FP8, LEAN, CHUNKED)),
        peers=(("titan", {**_TITAN_1B, "fp8": True}),),
        goal=1.18,
        most_gib=33.0,
    ),
    TableRow(
        ours=_llama("1b", "llama-1b, fewer bits", (FP8, LEAN, LOW_BIT)),
        peers=(("titan", _TITAN_1B),),
        goal=1.28,
        most_gib=29.0,
    ),
    *(
        TableRow(ours=_llama("3b", name, ways), peers=(("titan", peer),), goal=goal, most_gib=most, fits_together=False)
        for name, ways, peer, goal, most in (
            ("llama-3b", SMALL, _TITAN_3B, 1.26, 74.0),
            ("llama-3b, fewer bits", (FP8, LEAN, LOW_BIT), _TITAN_3B, 1.30, 65.0),
            ("llama-3b, selective", (*SMALL, _FEW), {**_TITAN_3B, "checkpoints": "selective"}, 1.12, 68.0),
        )
    ),
    *(
        TableRow(
            ours=_case(name, "gpt2-124m", 32, 1024, ways, change=_NANO),
            peers=(("nanogpt", {"layers": 12, "hidden": 768, "heads": 12, "batch": 32}),),
            goal=1.15,
        )
        for name, ways in {"gpt2-124m": FAST, "gpt2-124m, one graph": (MASTER, ONE_GRAPH)}.items()
    ),
    TableRow(
        ours=_case("gpt2-xl", "gpt2-xl", 8, 1024, FAST, change=_NANO),
        peers=(("nanogpt", {"layers": 48, "hidden": 1600, "heads": 25, "batch": 8}),),
        goal=1.10,
    ),
    TableRow(
        ours=_case("mixtral-like", "mixtral-8x7b", 4, 4096, FAST, change=_EXPERTS),
        peers=(("hf_mixtral", {**_EXPERTS, "batch": 4, "sequence": 4096}),),
        goal=1.05,
    ),
    # Of the public loops that ran, these two are the fastest (torchvision's ViT takes 1.04 times timm's, timm's ResNet
    # is torchvision's).
    TableRow(
        ours=_case("vit-l16", "vit-l16", 64, 1, (MASTER, ONE_GRAPH)),
        peers=(("vision", {"name": "timm vit_large_patch16_224", "batch": 64}),),
        goal=1.05,
    ),
    TableRow(
        ours=_case("resnet50", "resnet50", 256, 1, (MASTER, ONE_GRAPH)),
        peers=(("vision", {"name": "torchvision resnet50", "batch": 256}),),
        goal=1.05,
    ),
)

TINY_SEEN: tuple[Case, ...] = (
    _case("byte-tiny, 2 x 32", "byte-tiny", 2, 32, ()),
    _case("byte-tiny, 4 x 64 in 2", "byte-tiny", 4, 64, (), microbatch=2),
    _case("byte-tiny, 2 x 32 of documents", "byte-tiny", 2, 32, (), documents=(20, 12)),
    _case("moe-tiny, 2 x 32", "moe-tiny", 2, 32, ()),
    _case("vit-digits, 4", "vit-digits", 4, 1, ()),
    _case("resnet-tiny, 4", "resnet-tiny", 4, 1, ()),
    _case("dlrm-tiny, 8", "dlrm-tiny", 8, 1, ()),
)
TINY_REGRET = _regret("moe-tiny", "moe-tiny", 2, 8, 32)
_TINY_NANO = {"layers": 2, "hidden": 32, "heads": 4, "batch": 2, "sequence": 32, "vocab": 256}
TINY_ROWS: tuple[TableRow, ...] = (
    TableRow(ours=_case("byte-tiny", "byte-tiny", 2, 32, ()), peers=(("nanogpt", _TINY_NANO),), goal=0.01),
    TableRow(
        ours=_case("byte-tiny, chunked loss", "byte-tiny", 2, 32, (CHUNKED,)),
        beside=_case("byte-tiny", "byte-tiny", 2, 32, ()),
        fits_together=False,
    ),
    TableRow(
        ours=_case("byte-tiny without memory or package", "byte-tiny", 2, 32, ()),
        peers=(("absent", {}), ("nanogpt", {**_TINY_NANO, "heads": 5})),
    ),
)
