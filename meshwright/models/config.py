"""The dimensions of a decoder transformer, and the presets by name. No torch."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Any, Literal

from meshwright.core.errors import MeshwrightError, Problem, nearest


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """GPT-2 to Qwen3 in one set of switches. The defaults are a Llama."""

    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    ffn_size: int
    vocab_size: int
    max_sequence: int = 8192
    head_size: int = 0
    """0: hidden_size / num_heads."""
    positions: Literal["rope", "learned"] = "rope"
    rope_theta: float = 10_000.0
    norm: Literal["rms", "layer"] = "rms"
    norm_epsilon: float = 1e-5
    mlp: Literal["swiglu", "gelu"] = "swiglu"
    qkv_bias: bool = False
    bias: bool = False
    """Biases on the attention output and the MLP (GPT-2)."""
    qk_norm: bool = False
    tied: bool = False
    init_std: float = 0.02

    def __post_init__(self) -> None:
        problems = [
            Problem(where=f.name, what=f"is {getattr(self, f.name)}.", fix="Use at least 1.")
            for f in fields(self)
            if f.type == "int" and f.name != "head_size" and getattr(self, f.name) < 1
        ]
        if self.head_size < 0:
            fix = "Use at least 1, or 0 for hidden_size / num_heads."
            problems.append(Problem(where="head_size", what=f"is {self.head_size}.", fix=fix))
        if not problems:
            if self.num_heads % self.num_kv_heads:
                what = f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly."
                problems.append(Problem(where="num_kv_heads", what=what))
            if not self.head_size and self.hidden_size % self.num_heads:
                what = f"{self.hidden_size} cannot be cut into {self.num_heads} heads."
                problems.append(Problem(where="hidden_size", what=what, fix="Or give head_size."))
            elif self.positions == "rope" and self.size_of_head % 2:
                problems.append(Problem(where="head_size", what="must be even for rotary positions."))
        if problems:
            raise MeshwrightError(problems)

    @property
    def size_of_head(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads


def _gpt2(layers: int, hidden: int, heads: int, **changes: Any) -> DecoderConfig:
    base = DecoderConfig(
        num_layers=layers,
        hidden_size=hidden,
        num_heads=heads,
        num_kv_heads=heads,
        ffn_size=4 * hidden,
        vocab_size=50257,
        max_sequence=1024,
        positions="learned",
        norm="layer",
        mlp="gelu",
        qkv_bias=True,
        bias=True,
        tied=True,
    )
    return replace(base, **changes)


def _llama(layers: int, hidden: int, heads: int, ffn: int, **changes: Any) -> DecoderConfig:
    base = {
        "num_layers": layers,
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": 8,
        "ffn_size": ffn,
        "vocab_size": 128256,
        "max_sequence": 131072,
        "rope_theta": 500_000.0,
    }
    return DecoderConfig(**(base | changes))


def _qwen3(layers: int, hidden: int, heads: int, ffn: int, tied: bool) -> DecoderConfig:
    changes = {"vocab_size": 151936, "max_sequence": 40960, "rope_theta": 1_000_000.0, "norm_epsilon": 1e-6}
    return _llama(layers, hidden, heads, ffn, head_size=128, qk_norm=True, tied=tied, **changes)


# Dimensions as published by the models' authors (their config files and papers).
PRESETS: dict[str, DecoderConfig] = {
    "gpt2-124m": _gpt2(12, 768, 12),
    "gpt2-medium": _gpt2(24, 1024, 16),
    "gpt2-large": _gpt2(36, 1280, 20),
    "gpt2-xl": _gpt2(48, 1600, 25),
    "gpt3-175b": _gpt2(96, 12288, 96, max_sequence=2048),
    "llama3.2-1b": _llama(16, 2048, 32, 8192, tied=True),
    "llama3.2-3b": _llama(28, 3072, 24, 8192, tied=True),
    "llama3-8b": _llama(32, 4096, 32, 14336, max_sequence=8192),
    "llama3-70b": _llama(80, 8192, 64, 28672, max_sequence=8192),
    "llama3-405b": _llama(126, 16384, 128, 53248),
    "qwen3-0.6b": _qwen3(28, 1024, 16, 3072, tied=True),
    "qwen3-1.7b": _qwen3(28, 2048, 16, 6144, tied=True),
    "qwen3-4b": _qwen3(36, 2560, 32, 9728, tied=True),
    "qwen3-8b": _qwen3(36, 4096, 32, 12288, tied=False),
    "qwen3-14b": _qwen3(40, 5120, 40, 17408, tied=False),
    "qwen3-32b": _qwen3(64, 5120, 64, 25600, tied=False),
    "mistral-7b": _llama(32, 4096, 32, 14336, vocab_size=32768, max_sequence=32768, rope_theta=1_000_000.0),
    # Small ones for a laptop and for tests: byte-level, so the vocabulary is 256.
    "byte-3m": _llama(4, 256, 4, 688, num_kv_heads=2, vocab_size=256, max_sequence=1024, rope_theta=1e4),
    "byte-tiny": _llama(2, 32, 4, 64, num_kv_heads=2, vocab_size=256, max_sequence=64, rope_theta=1e4),
}


def preset(name: str) -> DecoderConfig:
    if name not in PRESETS:
        raise MeshwrightError(
            [Problem(where="model", what=f'no model is called "{name}".', fix=nearest(name, PRESETS))]
        )
    return PRESETS[name]
