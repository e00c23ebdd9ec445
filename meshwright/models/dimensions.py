"""The dimensions of our models. No torch."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from typing import Any, Literal

from meshwright.core.errors import Problem, nearest, raise_problems
from meshwright.core.profile import BLOCK_OF_WEIGHTS


def _too_small(config: Any) -> list[Problem]:
    """Sizes below 1, alone or in lists."""
    problems = []
    for field in fields(config):
        value, zero = getattr(config, field.name), _MAY_BE_0.get(field.name, "")
        if field.type == "int" and value < (0 if zero else 1):
            fix = f"Use at least 1, or 0 for {zero}." if zero else "Use at least 1."
            problems.append(Problem(where=field.name, what=f"is {value}.", fix=fix))
        if field.type == "tuple[int, ...]" and (not value or min(value) < 1):
            what = f"is {list(value)}."
            problems.append(Problem(where=field.name, what=what, fix="Use one number or more, each at least 1."))
    return problems


_MAY_BE_0 = {
    "head_size": "hidden_size / num_heads",
    "sliding_window": "no window",
    "num_experts": "a plain MLP",
    "experts_per_token": "a plain MLP",
    "expert_ffn_size": "a plain MLP",
    "num_shared_experts": "none",
    "num_dense_layers": "none",
    "local_heads": "none",
}
_OF_EXPERTS = (
    *("experts_per_token", "expert_ffn_size", "num_shared_experts", "num_dense_layers"),
    *("capacity_factor", "balance", "router", "routed_scale"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Low-rank adapters (Hu et al. 2022): y = x W' + alpha / rank x A' B' for linear layers of blocks, of which only A
    (rank x in) and B (out x rank) are trained. Everything else is frozen (Dettmers et al. 2023 store it in 4 bits)."""

    rank: int
    alpha: float = 0.0
    """0: twice the rank."""
    targets: tuple[str, ...] = ("*",)
    """Linear layers that have one, by patterns of their names in a block: "attention.*", "mlp.down"."""
    base: Literal["bf16", "int8", "nf4"] = "bf16"
    """How weights of blocks' linear layers are stored. bf16: as `precision` stores what is frozen (float32 without
    it); int8, nf4: 8 or 4 bits an element and a float32 scale for each 64 of a row."""

    def __post_init__(self) -> None:
        problems = _too_small(self)
        if not 0.0 <= self.alpha < math.inf:
            problems.append(Problem(where="alpha", what=f"is {self.alpha}.", fix="Use a positive number."))
        raise_problems(problems)

    @property
    def scale(self) -> float:
        return (self.alpha or 2.0 * self.rank) / self.rank

    def adapts(self, name: str) -> bool:
        """Whether a linear layer, by its name in a block, has an adapter."""
        return any(fnmatchcase(name, pattern) for pattern in self.targets)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderConfig:
    """Dimensions of a decoder, from GPT-2 to Qwen3. The defaults are those of a Llama."""

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
    rope_scaling: Literal["none", "llama3"] = "none"
    rope_factor: float = 8.0
    rope_low_frequency: float = 1.0
    rope_high_frequency: float = 4.0
    rope_original_sequence: int = 8192
    sliding_window: int = 0
    """Tokens a token attends to, itself included; 0: all before it."""
    num_experts: int = 0
    """0: a plain MLP in every block."""
    experts_per_token: int = 0
    expert_ffn_size: int = 0
    num_shared_experts: int = 0
    """Experts every token goes to, as one MLP of their sizes together."""
    num_dense_layers: int = 0
    """First blocks that have a plain MLP all the same."""
    capacity_factor: float = 0.0
    """Room of an expert for a sequence, in even shares of it; 0: for all that come."""
    balance: float = 0.0
    """Weight of the balancing loss."""
    router: Literal["softmax", "sigmoid"] = "softmax"
    routed_scale: float = 1.0
    adapter: Adapter | None = None
    """Train low-rank adapters on frozen weights; None: the weights themselves."""
    local_heads: int = 0
    """Heads between the blocks, each with a norm, an output matrix and a loss of its own that is added to the last one:
    they divide the blocks into one more group than there are heads, the first groups taking one block more."""

    def __post_init__(self) -> None:
        problems = _too_small(self)
        if self.rope_scaling != "none" and self.positions != "rope":
            what = f'is "{self.rope_scaling}", but positions are {self.positions}.'
            problems.append(Problem(where="rope_scaling", what=what, fix='Use "none".'))
        if self.rope_scaling != "none" and not self.rope_factor >= 1.0:
            problems.append(Problem(where="rope_factor", what=f"is {self.rope_factor}.", fix="Use at least 1."))
        if self.rope_scaling != "none" and not 0.0 < self.rope_low_frequency < self.rope_high_frequency:
            what = f"is {self.rope_low_frequency}, and rope_high_frequency is {self.rope_high_frequency}."
            fix = "Use a positive one below rope_high_frequency."
            problems.append(Problem(where="rope_low_frequency", what=what, fix=fix))
        problems += _expert_problems(self)
        if self.local_heads >= self.num_layers >= 1:
            what = f"is {self.local_heads}: {self.local_heads + 1} groups of {self.num_layers} blocks."
            problems.append(Problem(where="local_heads", what=what, fix=f"Use at most {self.num_layers - 1}."))
        if self.local_heads and self.adapter is not None:
            what = "are frozen with everything else beside adapters."
            problems.append(Problem(where="local_heads", what=what, fix="Leave out local_heads, or adapter."))
        if not problems:
            if self.num_heads % self.num_kv_heads:
                what = f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly."
                problems.append(Problem(where="num_kv_heads", what=what))
            if not self.head_size and self.hidden_size % self.num_heads:
                what = f"{self.hidden_size} cannot be cut into {self.num_heads} heads."
                problems.append(Problem(where="hidden_size", what=what, fix="Or give head_size."))
            elif self.positions == "rope" and self.size_of_head % 2:
                problems.append(Problem(where="head_size", what="must be even for rotary positions."))
        if not problems and self.adapter is not None:
            problems += _adapter_problems(self, self.adapter)
        raise_problems(problems)

    @property
    def size_of_head(self) -> int:
        return self.head_size or self.hidden_size // self.num_heads

    @property
    def group_borders(self) -> tuple[int, ...]:
        """Blocks with which a group begins, but for the first: a local head stands before each."""
        each, more = divmod(self.num_layers, self.local_heads + 1)
        return tuple(group * each + min(group, more) for group in range(1, self.local_heads + 1))

    @property
    def linears(self) -> dict[str, tuple[int, int]]:
        """Linear layers of a block with a plain MLP: outputs and inputs of each."""
        d, q, kv = self.hidden_size, self.num_heads * self.size_of_head, self.num_kv_heads * self.size_of_head
        sizes = dict.fromkeys(("attention.key", "attention.value"), (kv, d))
        sizes |= {"attention.query": (q, d), "attention.output": (d, q), "mlp.down": (d, self.ffn_size)}
        into = ("mlp.gate", "mlp.up") if self.mlp == "swiglu" else ("mlp.up",)
        return sizes | dict.fromkeys(into, (self.ffn_size, d))

    @classmethod
    def like_gpt2(cls, layers: int, hidden: int, heads: int, ffn: int, vocab: int, **more: Any) -> DecoderConfig:
        base: dict[str, Any] = {"num_layers": layers, "hidden_size": hidden, "num_heads": heads, "num_kv_heads": heads}
        base |= {"positions": "learned", "norm": "layer", "mlp": "gelu", "qkv_bias": True, "bias": True}
        return cls(ffn_size=ffn, vocab_size=vocab, **base, **more)


def _expert_problems(config: DecoderConfig) -> list[Problem]:
    if config.num_experts <= 0:
        plain = {f.name: f.default for f in fields(config)}
        return [
            Problem(where=name, what=f"is {getattr(config, name)}, but num_experts is 0.", fix="Leave it out.")
            for name in _OF_EXPERTS
            if getattr(config, name) != plain[name]
        ]
    problems = []
    if not 1 <= config.experts_per_token <= config.num_experts:
        what = f"is {config.experts_per_token} of {config.num_experts} experts."
        problems.append(Problem(where="experts_per_token", what=what, fix=f"Use 1 to {config.num_experts}."))
    if config.expert_ffn_size == 0:
        problems.append(Problem(where="expert_ffn_size", what="is 0, but there are experts.", fix="Use at least 1."))
    if config.num_dense_layers >= config.num_layers >= 1:
        what = f"is {config.num_dense_layers} of {config.num_layers} layers: none is left for experts."
        problems.append(Problem(where="num_dense_layers", what=what, fix=f"Use at most {config.num_layers - 1}."))
    if config.mlp != "swiglu" or config.bias:
        what = "experts have gates and no biases."
        problems.append(Problem(where="num_experts", what=what, fix='Use mlp = "swiglu" and bias = false.'))
    for name in ("capacity_factor", "balance"):
        if not 0.0 <= getattr(config, name) < math.inf:
            problems.append(Problem(where=name, what=f"is {getattr(config, name)}.", fix="Use 0 or more."))
    if not 0.0 < config.routed_scale < math.inf:
        problems.append(Problem(where="routed_scale", what=f"is {config.routed_scale}.", fix="Use a positive number."))
    return problems


def _adapter_problems(config: DecoderConfig, adapter: Adapter) -> list[Problem]:
    if config.num_experts:
        what = "experts are stacked weights, which adapters do not reach."
        return [Problem(where="adapter", what=what, fix="Use a model without experts.")]
    problems, linears = [], config.linears
    for pattern in adapter.targets:
        if not any(fnmatchcase(name, pattern) for name in linears):
            what, fix = f'"{pattern}" matches no linear layer of a block.', nearest(pattern, linears)
            problems.append(Problem(where="adapter.targets", what=what, fix=fix))
    smallest, name = min((min(sizes), name) for name, sizes in linears.items() if adapter.adapts(name) or problems)
    if adapter.rank > smallest:
        what = f"is {adapter.rank}, and {name} has no more than {smallest}."
        problems.append(Problem(where="adapter.rank", what=what, fix=f"Use 1 to {smallest}."))
    odd = [f"{name} has {k}" for name, (_, k) in linears.items() if k % BLOCK_OF_WEIGHTS]
    if adapter.base != "bf16" and odd:
        what = f"is {adapter.base}, which stores rows in blocks of {BLOCK_OF_WEIGHTS}, and {odd[0]} inputs."
        problems.append(Problem(where="adapter.base", what=what, fix='Use "bf16".'))
    return problems


@dataclass(frozen=True, kw_only=True, slots=True)
class ViTConfig:
    """Vision transformer (Dosovitskiy et al. 2021): patches and a class token through an encoder."""

    num_layers: int
    hidden_size: int
    num_heads: int
    ffn_size: int
    patch_size: int
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000
    norm_epsilon: float = 1e-6
    init_std: float = 0.02

    def __post_init__(self) -> None:
        problems = _too_small(self)
        if not problems and self.hidden_size % self.num_heads:
            what = f"{self.hidden_size} cannot be cut into {self.num_heads} heads."
            problems.append(Problem(where="hidden_size", what=what))
        if not problems and self.image_size % self.patch_size:
            what = f"images of {self.image_size} pixels cannot be cut into patches of {self.patch_size}."
            problems.append(Problem(where="patch_size", what=what, fix="Use a divisor of image_size."))
        raise_problems(problems)

    @property
    def num_tokens(self) -> int:
        """Tokens of an image: its patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1

    @property
    def encoder(self) -> DecoderConfig:
        """Its blocks, as those of a decoder (that looks both ways)."""
        sizes = self.num_layers, self.hidden_size, self.num_heads, self.ffn_size
        more: dict[str, Any] = {"max_sequence": self.num_tokens, "norm_epsilon": self.norm_epsilon}
        return DecoderConfig.like_gpt2(*sizes, self.num_classes, **more)


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvShape:
    """A 3x3 convolution of VGG as it stands in the network."""

    channels: int
    width: int
    size: int
    """Pixels along a side, going in and (before pooling) out."""
    pools: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class VGGConfig:
    """VGG (Simonyan and Zisserman 2015) without batch norm. Dropout is left out: every plan trains the same model."""

    stages: tuple[int, ...] = (2, 2, 3, 3, 3)
    """Convolutions of each stage; a stage ends by halving the image."""
    widths: tuple[int, ...] = (64, 128, 256, 512, 512)
    fc_size: int = 4096
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000

    def __post_init__(self) -> None:
        problems = _too_small(self) + _stage_problems(self.stages, self.widths)
        if not problems and sum(self.stages) < 2:
            problems.append(Problem(where="stages", what="is one convolution.", fix="Use two or more."))
        if not problems and self.image_size % 2 ** len(self.stages):
            what = f"images of {self.image_size} pixels cannot be halved {len(self.stages)} times."
            problems.append(Problem(where="image_size", what=what, fix=f"Use a multiple of {2 ** len(self.stages)}."))
        raise_problems(problems)

    @property
    def convs(self) -> tuple[ConvShape, ...]:
        shapes, channels, size = [], self.channels, self.image_size
        for count, width in zip(self.stages, self.widths, strict=True):
            for place in range(count):
                shapes.append(ConvShape(channels=channels, width=width, size=size, pools=place == count - 1))
                channels = width
            size //= 2
        return tuple(shapes)

    @property
    def flat_size(self) -> int:
        """Numbers of an image after the last convolution."""
        last = self.convs[-1]
        return last.width * (last.size // 2) ** 2


@dataclass(frozen=True, kw_only=True, slots=True)
class BottleneckShape:
    """1x1, 3x3 (with the stride: v1.5), 1x1 to four times the width, beside a shortcut."""

    channels: int
    width: int
    stride: int
    size: int
    """Pixels along a side, going in."""
    stage: int
    enters: bool
    """The first of its stage: its shortcut is a convolution."""

    @property
    def out(self) -> int:
        return 4 * self.width

    @property
    def size_out(self) -> int:
        return -(-self.size // self.stride)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResNetConfig:
    """ResNet of bottlenecks (He et al. 2016), v1.5."""

    stages: tuple[int, ...] = (3, 4, 6, 3)
    widths: tuple[int, ...] = (64, 128, 256, 512)
    stem_width: int = 64
    image_size: int = 224
    channels: int = 3
    num_classes: int = 1000

    def __post_init__(self) -> None:
        raise_problems(_too_small(self) + _stage_problems(self.stages, self.widths))

    @property
    def stem_size(self) -> int:
        """Pixels along a side after the stem's convolution, before its pooling."""
        return -(-self.image_size // 2)

    @property
    def bottlenecks(self) -> tuple[BottleneckShape, ...]:
        shapes, channels, size = [], self.stem_width, -(-self.stem_size // 2)
        for stage, (count, width) in enumerate(zip(self.stages, self.widths, strict=True)):
            for place in range(count):
                stride = 2 if stage and not place else 1
                shapes.append(
                    BottleneckShape(
                        channels=channels, width=width, stride=stride, size=size, stage=stage, enters=not place
                    )
                )
                channels, size = shapes[-1].out, shapes[-1].size_out
        return tuple(shapes)


def _stage_problems(stages: tuple[int, ...], widths: tuple[int, ...]) -> list[Problem]:
    if len(stages) == len(widths):
        return []
    return [Problem(where="widths", what=f"has {len(widths)} entries for {len(stages)} stages.")]


@dataclass(frozen=True, kw_only=True, slots=True)
class DLRMConfig:
    """Deep learning recommendation model (Naumov et al. 2019): dense features and one id of each table."""

    tables: tuple[int, ...]
    """Rows of each."""
    embedding_size: int = 128
    num_dense: int = 13
    bottom: tuple[int, ...] = (512, 256)
    """Inner sizes of the MLP over dense features; it ends with embedding_size."""
    top: tuple[int, ...] = (1024, 1024, 512, 256)

    def __post_init__(self) -> None:
        raise_problems(_too_small(self))

    @property
    def num_vectors(self) -> int:
        return len(self.tables) + 1

    @property
    def num_features(self) -> int:
        """Inputs of the top MLP: the dense vector and every pair's product."""
        return self.embedding_size + self.num_vectors * (self.num_vectors - 1) // 2


Config = DecoderConfig | ViTConfig | VGGConfig | ResNetConfig | DLRMConfig
