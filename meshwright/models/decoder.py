"""One decoder transformer for GPT-2, Llama, Mistral and Qwen.

It knows nothing of parallelism. Three facts let techniques cut it: it is a list of layers (`embed`, `blocks`, `head`)
any of which may be absent, so a stage is the same class with fewer layers and the same parameter names; a block has two
regions (`attention`, `mlp`) whose weights may be split; and the head turns hidden states into a loss through two
replaceable steps (`score`, `token_loss`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.models.config import DecoderConfig
from meshwright.ops.loss import token_loss


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Weights follow the activations' dtype, so lower precision is decided in one place: the embedding."""
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


class Linear(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return linear(x, self.weight, self.bias)


class Norm(nn.Module):
    def __init__(self, size: int, kind: str, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        shape, weight = self.weight.shape, self.weight.to(x.dtype)
        if self.bias is None:
            return F.rms_norm(x, shape, weight, self.epsilon)
        return F.layer_norm(x, shape, weight, self.bias.to(x.dtype), self.epsilon)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions, halves convention (as in Hugging Face checkpoints). x: (batch, heads, sequence, head)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        d, h = config.hidden_size, config.size_of_head
        self.head_size, self.theta = h, config.rope_theta if config.positions == "rope" else 0.0
        self.query = Linear(d, config.num_heads * h, bias=config.qkv_bias)
        self.key = Linear(d, config.num_kv_heads * h, bias=config.qkv_bias)
        self.value = Linear(d, config.num_kv_heads * h, bias=config.qkv_bias)
        self.query_norm = Norm(h, "rms", config.norm_epsilon) if config.qk_norm else None
        self.key_norm = Norm(h, "rms", config.norm_epsilon) if config.qk_norm else None
        self.output = Linear(config.num_heads * h, d, bias=config.bias)

    def heads(self, x: Tensor, projection: Linear, norm: Norm | None) -> Tensor:
        """(batch, sequence, hidden) -> (batch, heads, sequence, head); however many heads this rank has."""
        x = projection(x).unflatten(-1, (-1, self.head_size))
        return (x if norm is None else norm(x)).transpose(1, 2)

    def forward(self, x: Tensor) -> Tensor:
        query = self.heads(x, self.query, self.query_norm)
        key = self.heads(x, self.key, self.key_norm)
        value = self.heads(x, self.value, None)
        if self.theta:
            cosine, sine = rope_table(x.shape[1], self.head_size, self.theta, x)
            query, key = rotate(query, cosine, sine), rotate(key, cosine, sine)
        grouped = query.shape[1] != key.shape[1]
        if grouped and query.is_cuda and query.dtype == torch.float32:
            # The one fused kernel for float32 knows no groups; without it scores are sequence x sequence in memory.
            times = query.shape[1] // key.shape[1]
            key, value, grouped = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), False
        mixed = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=grouped)
        return self.output(mixed.transpose(1, 2).flatten(2))


def rope_table(sequence: int, head_size: int, theta: float, like: Tensor) -> tuple[Tensor, Tensor]:
    # Angles in float32 at least: bf16 cannot tell position 1000 from 1001.
    precise = torch.float64 if like.dtype == torch.float64 else torch.float32
    pairs = torch.arange(0, head_size, 2, device=like.device, dtype=precise)
    position = torch.arange(sequence, device=like.device, dtype=precise)
    angle = torch.outer(position, theta ** (-pairs / head_size))
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


class SwiGLU(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.gate = Linear(config.hidden_size, config.ffn_size, bias=False)
        self.up = Linear(config.hidden_size, config.ffn_size, bias=False)
        self.down = Linear(config.ffn_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.silu(self.gate(x)) * self.up(x))


class GELU(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.up = Linear(config.hidden_size, config.ffn_size, bias=config.bias)
        self.down = Linear(config.ffn_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate="tanh"))


class Block(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.attention_norm = Norm(config.hidden_size, config.norm, config.norm_epsilon)
        self.attention = Attention(config)
        self.mlp_norm = Norm(config.hidden_size, config.norm, config.norm_epsilon)
        self.mlp = SwiGLU(config) if config.mlp == "swiglu" else GELU(config)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embed(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_sequence, config.hidden_size) if learned else None
        self.dtype: torch.dtype | None = None
        """Activations' dtype; None: the weights'."""

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.offsets(x, tokens.shape[1])
        return x if self.dtype is None else x.to(self.dtype)

    def offsets(self, x: Tensor, sequence: int) -> Tensor:
        """Positions of the samples' tokens, in the shape of x (which may hold only a part of the sequence)."""
        assert self.positions is not None
        return self.positions(torch.arange(sequence, device=x.device))


def score(head: Head, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Sum over tokens of weight x loss."""
    return (head.token_loss(linear(x, head.output.weight), targets) * weights).sum()


class Head(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.norm = Norm(config.hidden_size, config.norm, config.norm_epsilon)
        self.output = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.score: Callable[[Head, Tensor, Tensor, Tensor], Tensor] = score
        self.token_loss: Callable[[Tensor, Tensor], Tensor] = token_loss

    def forward(self, x: Tensor, targets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        x = self.norm(x)
        if targets is None or weights is None:
            return self.output(x)
        return self.score(self, x, targets, weights)


class Decoder(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.embed: Embed | None = Embed(config)
        self.blocks = nn.ModuleDict({str(i): Block(config) for i in range(config.num_layers)})
        self.head: Head | None = Head(config)
        if config.tied:
            self.head.output.weight = self.embed.tokens.weight

    def forward(self, x: Tensor, targets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        """Tokens (or hidden states, without an embedding) to hidden states, logits, or the sum of the losses."""
        if self.embed is not None:
            x = self.embed(x)
        for block in self.blocks.values():
            x = block(x)
        return x if self.head is None else self.head(x, targets, weights)

    def keep(self, first: int, last: int) -> None:
        """Become the stage of blocks first..last-1, with the embedding and the head at the ends."""
        for name in list(self.blocks):
            if not first <= int(name) < last:
                del self.blocks[name]
        if first > 0:
            self.embed = None
        if last < self.config.num_layers:
            self.head = None

    def layers(self) -> Iterable[tuple[str, nn.Module]]:
        """Name and module of every layer here, in order."""
        if self.embed is not None:
            yield "embed", self.embed
        for name, block in self.blocks.items():
            yield f"blocks.{name}", block
        if self.head is not None:
            yield "head", self.head

    def init_value(self, name: str) -> float | tuple[float, float]:
        """How a parameter starts: a constant, or (mean, standard deviation) of a normal."""
        if name.endswith("norm.weight"):
            return 1.0
        if name.endswith(".bias"):
            return 0.0
        residual = name.endswith(("attention.output.weight", "mlp.down.weight"))
        depth = (2 * self.config.num_layers) ** 0.5 if residual else 1.0
        return 0.0, self.config.init_std / depth
