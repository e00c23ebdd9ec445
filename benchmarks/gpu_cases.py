"""The cases of `gpu_forecast`: models cut in depth, so that each takes seconds, under one-device plans. No torch."""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any, cast

from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.models.presets import Config, DecoderConfig, preset, profile_of

Technique = dict[str, Any]
BF16: Technique = {"name": "precision"}
COMPILE: Technique = {"name": "compile"}
RECOMPUTE: Technique = {"name": "recompute"}
CHUNKED: Technique = {"name": "chunked_loss"}


@dataclass(frozen=True, kw_only=True)
class Case:
    name: str
    config: Config
    batch: int
    sequence: int = 1
    techniques: tuple[Technique, ...] = (BF16,)
    microbatch: int = 0
    """0: the batch at once."""
    part: str = "A"
    """A: as torch runs it; B: compiled, and what does not fit."""
    shows_kernels: bool = False
    must_fail: bool = False
    """There is no memory for it."""

    @property
    def plan(self) -> Plan:
        microbatch = self.microbatch or self.batch
        value = {"version": 1, "batch": self.batch, "microbatch": microbatch, "techniques": list(self.techniques)}
        return Plan.from_json(json.dumps(value))

    @property
    def profile(self) -> Profile:
        return profile_of(self.config, self.name)


def _cut(name: str, layers: int, **changes: Any) -> DecoderConfig:
    return replace(cast(DecoderConfig, preset(name)), num_layers=layers, **changes)


_1B = _cut("llama3.2-1b", 4)
_1B_UNTIED = _cut("llama3.2-1b", 8, tied=False)
_8B = _cut("llama3-8b", 2)
_8B_SMALL_VOCAB = _cut("llama3-8b", 3, vocab_size=32000)
_GPT2 = _cut("gpt2-124m", 12)
_MIXTRAL = _cut("mixtral-8x7b", 3, hidden_size=2048, expert_ffn_size=4096, balance=0.01)
_DEEPSEEK = _cut(
    "deepseek-v3-like",
    4,
    hidden_size=2048,
    num_heads=16,
    num_kv_heads=16,
    ffn_size=10944,
    vocab_size=102400,
    num_experts=64,
    experts_per_token=6,
    expert_ffn_size=1408,
    num_shared_experts=2,
    num_dense_layers=1,
)


def _dense() -> list[Case]:
    sweep = [(1, 1024), (8, 512), (4, 2048), (2, 4096), (1, 8192), (1, 16384)]
    cases = [
        Case(name=f"llama-1b x4, {b} x {s}", config=_1B, batch=b, sequence=s, shows_kernels=s == 4096) for b, s in sweep
    ]
    ways: dict[str, tuple[Technique, ...]] = {
        "recompute": (BF16, RECOMPUTE),
        "recompute 2": (BF16, {**RECOMPUTE, "layers": 2}),
        "chunked loss": (BF16, CHUNKED),
        "recompute, chunked loss": (BF16, RECOMPUTE, CHUNKED),
    }
    cases += [
        Case(name=f"llama-1b x4, 2 x 4096, {name}", config=_1B, batch=2, sequence=4096, techniques=techniques)
        for name, techniques in ways.items()
    ]
    return [
        *cases,
        Case(name="llama-1b x4, 1 x 2048, fp32", config=_1B, batch=1, sequence=2048, techniques=()),
        Case(name="llama-1b x4, 4 x 2048 in 4", config=_1B, batch=4, sequence=2048, microbatch=1),
        Case(name="llama-1b untied x8, 4 x 4096", config=_1B_UNTIED, batch=4, sequence=4096),
        Case(name="llama-8b x2, 1 x 4096", config=_8B, batch=1, sequence=4096, shows_kernels=True),
        Case(
            name="llama-8b x2, 2 x 8192, chunked loss", config=_8B, batch=2, sequence=8192, techniques=(BF16, CHUNKED)
        ),
        Case(
            name="llama-8b x3 of 32000, 4 x 4096, recompute",
            config=_8B_SMALL_VOCAB,
            batch=4,
            sequence=4096,
            techniques=(BF16, RECOMPUTE),
        ),
        Case(name="gpt2-124m, 8 x 1024", config=_GPT2, batch=8, sequence=1024, shows_kernels=True),
        Case(name="gpt2-124m, 32 x 512", config=_GPT2, batch=32, sequence=512),
        Case(name="gpt2-medium x12, 8 x 1024", config=_cut("gpt2-medium", 12), batch=8, sequence=1024),
        Case(name="gpt2-xl x8, 4 x 1024", config=_cut("gpt2-xl", 8), batch=4, sequence=1024),
        Case(name="qwen3-0.6b x8, 4 x 2048", config=_cut("qwen3-0.6b", 8), batch=4, sequence=2048),
    ]


def _others() -> list[Case]:
    return [
        Case(name="mixtral-like x3, 2 x 4096", config=_MIXTRAL, batch=2, sequence=4096, shows_kernels=True),
        Case(name="mixtral-like x3, 1 x 2048", config=_MIXTRAL, batch=1, sequence=2048),
        Case(name="deepseek-like x4, 2 x 2048", config=_DEEPSEEK, batch=2, sequence=2048, shows_kernels=True),
        Case(
            name="deepseek-like x4, 1 x 4096, recompute",
            config=_DEEPSEEK,
            batch=1,
            sequence=4096,
            techniques=(BF16, RECOMPUTE),
        ),
        Case(name="vit-b16, 128", config=preset("vit-b16"), batch=128, shows_kernels=True),
        Case(name="vit-b16, 16", config=preset("vit-b16"), batch=16),
        Case(name="vit-l16, 64", config=preset("vit-l16"), batch=64),
        Case(name="vgg16, 64", config=preset("vgg16"), batch=64, shows_kernels=True),
        Case(name="resnet50, 128", config=preset("resnet50"), batch=128, shows_kernels=True),
        Case(name="resnet50, 32", config=preset("resnet50"), batch=32),
        Case(name="dlrm-small, 8192", config=preset("dlrm-small"), batch=8192, shows_kernels=True),
        Case(name="dlrm-small, 2048", config=preset("dlrm-small"), batch=2048),
    ]


def _compiled() -> list[Case]:
    fused = (BF16, COMPILE)
    made: list[tuple[str, Config, int, int, tuple[Technique, ...]]] = [
        ("llama-1b x4, 2 x 4096, compiled", _1B, 2, 4096, fused),
        ("llama-1b x4, 1 x 1024, compiled", _1B, 1, 1024, fused),
        ("llama-1b x4, 4 x 4096, compiled, recompute", _1B, 4, 4096, (*fused, RECOMPUTE)),
        ("llama-8b x2, 1 x 4096, compiled", _8B, 1, 4096, fused),
        ("gpt2-124m, 8 x 1024, compiled", _GPT2, 8, 1024, fused),
        ("mixtral-like x3, 2 x 4096, compiled", _MIXTRAL, 2, 4096, fused),
        ("vit-b16, 128, compiled", preset("vit-b16"), 128, 1, fused),
    ]
    return [
        Case(name=name, config=config, batch=b, sequence=s, techniques=ways, part="B", shows_kernels=place in (0, 5))
        for place, (name, config, b, s, ways) in enumerate(made)
    ]


def _too_large() -> list[Case]:
    made: list[tuple[str, Config, int, int]] = [
        ("llama-1b x4, 4 x 65536", _cut("llama3.2-1b", 4), 4, 65536),
        ("llama-8b x16, 8 x 8192", _cut("llama3-8b", 16), 8, 8192),
        ("vit-l16, 2048", preset("vit-l16"), 2048, 1),
        ("llama-8b x32, 1 x 8192", _cut("llama3-8b", 32), 1, 8192),
    ]
    return [
        Case(name=name, config=config, batch=b, sequence=s, part="B", must_fail=True) for name, config, b, s in made
    ]


CASES: tuple[Case, ...] = (*_dense(), *_others(), *_compiled(), *_too_large())

TINY: tuple[Case, ...] = (
    Case(name="byte-tiny, 2 x 32", config=preset("byte-tiny"), batch=2, sequence=32, shows_kernels=True, techniques=()),
    Case(name="byte-tiny, 4 x 64 in 2", config=preset("byte-tiny"), batch=4, sequence=64, microbatch=2, techniques=()),
    Case(name="moe-tiny, 2 x 32", config=preset("moe-tiny"), batch=2, sequence=32, techniques=()),
    Case(name="vit-digits, 4", config=preset("vit-digits"), batch=4, techniques=()),
    Case(name="resnet-tiny, 4", config=preset("resnet-tiny"), batch=4, techniques=()),
    Case(name="dlrm-tiny, 8", config=preset("dlrm-tiny"), batch=8, part="B", techniques=()),
)
"""Prove the script itself, where there is no GPU."""
