"""The layers our transformers are made of, mixtures of experts among them. They know nothing of parallelism."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.profile import packed_shape
from meshwright.models.dimensions import Adapter
from meshwright.models.presets import DecoderConfig
from meshwright.ops import routing
from meshwright.ops.attention import Mask, VisibleTokens, attend_visible, is_fused
from meshwright.ops.model_interface import Inside, every_token
from meshwright.ops.packed_weights import AdaptedProduct


class Linear(nn.Linear):
    """Weights follow the activations' dtype, so lower precision is decided in one place: the embedding."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(F.linear)
    """Of what comes, the weight and the bias, all of one dtype: what a technique may replace."""

    def forward(self, x: Tensor) -> Tensor:
        return self.product(x, self.weight.to(x.dtype), None if self.bias is None else self.bias.to(x.dtype))


class AdaptedLinear(nn.Module):
    """In place of a linear layer of a block: its weight, frozen and maybe packed, and its adapter, if it has one."""

    def __init__(self, linear: Linear, name: str, adapter: Adapter):
        super().__init__()
        shape, packed = tuple(linear.weight.shape), adapter.base
        stored = torch.empty(packed_shape(shape, packed), dtype=torch.uint8) if packed != "bf16" else linear.weight
        self.weight = nn.Parameter(stored, requires_grad=False)
        self.bias, self.scale = linear.bias, adapter.scale
        has_adapter = adapter.adapts(name)
        self.lora_A = nn.Parameter(torch.empty(adapter.rank, shape[1])) if has_adapter else None
        self.lora_B = nn.Parameter(torch.empty(shape[0], adapter.rank)) if has_adapter else None

    def forward(self, x: Tensor) -> Tensor:
        return self.without_bias(x, self.bias)

    def without_bias(self, x: Tensor, bias: Tensor | None = None) -> Tensor:
        bias, first, second = (None if each is None else each.to(x.dtype) for each in (bias, self.lora_A, self.lora_B))
        return AdaptedProduct.apply(x, self.weight, bias, first, second, self.scale)


class RMSNormFunction(torch.autograd.Function):
    """x / its root mean square x weight, keeping x. (Off CUDA, torch's is many steps that keep x twice.)"""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
        wide = x.to(routing.precise(x))
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        inverse = square.div_(x.shape[-1]).add_(epsilon).rsqrt_()
        ctx.save_for_backward(x, weight, inverse)
        return routing.fresh((wide * inverse).mul_(weight).to(x.dtype))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, inverse = ctx.saved_tensors
        normal = x.to(inverse.dtype) * inverse
        grad, wide = grad.to(inverse.dtype), weight.to(inverse.dtype)
        along = grad * normal
        into_weight = along.flatten(0, -2).sum(0)
        mean = (along @ wide).div_(-x.shape[-1]).unsqueeze(-1)
        into_x = (grad * wide).addcmul_(normal, mean).mul_(inverse)
        return into_x.to(x.dtype), into_weight.to(weight.dtype), None


class Norm(nn.Module):
    def __init__(self, size: int, kind: str, epsilon: float):
        super().__init__()
        self.epsilon = epsilon
        self.weight = nn.Parameter(torch.empty(size))
        self.bias = nn.Parameter(torch.empty(size)) if kind == "layer" else None

    def forward(self, x: Tensor) -> Tensor:
        shape, weight = self.weight.shape, self.weight.to(x.dtype)
        if self.bias is None:
            if x.is_cuda:
                return F.rms_norm(x, shape, weight, self.epsilon)
            return RMSNormFunction.apply(x, weight, self.epsilon)
        return F.layer_norm(x, shape, weight, self.bias.to(x.dtype), self.epsilon)


def rotate(x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotary positions, halves convention (as in Hugging Face checkpoints). x: (batch, heads, sequence, head)."""
    first, second = x.chunk(2, dim=-1)
    return torch.cat((first * cosine - second * sine, second * cosine + first * sine), dim=-1)


class Rotate(torch.autograd.Function):
    """Turned back going backward, in as many steps; autograd would fill and add halves of zeros."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
        ctx.save_for_backward(cosine, sine)
        return rotate(x, cosine, sine)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cosine, sine = ctx.saved_tensors
        return rotate(grad, cosine, -sine), None, None


def rope_frequencies(config: DecoderConfig, device: torch.device, dtype: torch.dtype) -> Tensor:
    pairs = torch.arange(0, config.size_of_head, 2, device=device, dtype=dtype)
    plain = config.rope_theta ** (-pairs / config.size_of_head)
    if config.rope_scaling == "none":
        return plain
    # Llama 3.1: long waves are stretched, short ones left alone, those between blended.
    turns = config.rope_original_sequence * plain / (2 * math.pi)
    low, high = config.rope_low_frequency, config.rope_high_frequency
    blend = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return plain * (blend + (1.0 - blend) / config.rope_factor)


def rope_table(config: DecoderConfig, places: Tensor, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosine and sine for tokens at `places` ((sequence,), or (batch, sequence)), to be multiplied with heads."""
    # Angles in float32 at least: bf16 cannot tell position 1000 from 1001.
    dtype = routing.precise(like)
    angle = places.to(dtype).unsqueeze(-1) * rope_frequencies(config, places.device, dtype)
    if places.dim() == 2:
        angle = angle.unsqueeze(1)  # the heads
    return angle.cos().to(like.dtype), angle.sin().to(like.dtype)


class Attention(nn.Module):
    def __init__(self, config: DecoderConfig, is_causal: bool = True):
        super().__init__()
        d, h = config.hidden_size, config.size_of_head
        self.head_size, self.is_causal = h, is_causal
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

    def forward(
        self, x: Tensor, cosine: Tensor | None = None, sine: Tensor | None = None, mask: Mask | None = None
    ) -> Tensor:
        query = self.heads(x, self.query, self.query_norm)
        key = self.heads(x, self.key, self.key_norm)
        value = self.heads(x, self.value, None)
        if cosine is not None and sine is not None:
            query, key = Rotate.apply(query, cosine, sine), Rotate.apply(key, cosine, sine)
        return self.output(self.attend(query, key, value, mask).transpose(1, 2).flatten(2))

    def attend(self, query: Tensor, key: Tensor, value: Tensor, mask: Mask | None) -> Tensor:
        """What each token makes of the values it may see; all (batch, heads, sequence, head)."""
        if isinstance(mask, VisibleTokens):
            if is_fused(query):
                return attend_visible(query, key, value, mask)
            mask = mask.dense()
        grouped = query.shape[1] != key.shape[1]
        if grouped and query.is_cuda and (query.dtype == torch.float32 or mask is not None):
            # The one fused kernel left knows no groups; without it scores are sequence x sequence in memory.
            times = query.shape[1] // key.shape[1]
            key, value, grouped = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1), False
        is_causal = self.is_causal and mask is None
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped
        )


class SwiGLU(nn.Module):
    def __init__(self, hidden_size: int, ffn_size: int, bias: bool = False):
        super().__init__()
        self.gate = Linear(hidden_size, ffn_size, bias=False)
        self.up = Linear(hidden_size, ffn_size, bias=False)
        self.down = Linear(ffn_size, hidden_size, bias=bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(routing.Gated.apply(self.gate(x), self.up(x)))


class GELU(nn.Module):
    def __init__(self, config: DecoderConfig, approximate: str = "tanh"):
        super().__init__()
        self.approximate = approximate
        self.up = Linear(config.hidden_size, config.ffn_size, bias=config.bias)
        self.down = Linear(config.ffn_size, config.hidden_size, bias=config.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.approximate))


class TransformerBlock(nn.Module):
    """`attention` and `mlp` are the two regions whose weights may be split."""

    def __init__(self, config: DecoderConfig, mlp: nn.Module, is_causal: bool = True):
        super().__init__()
        self.attention_norm = Norm(config.hidden_size, config.norm, config.norm_epsilon)
        self.attention = Attention(config, is_causal)
        self.mlp_norm = Norm(config.hidden_size, config.norm, config.norm_epsilon)
        self.mlp = mlp

    def regions(self) -> tuple[Inside, ...]:
        first = Inside(entries=(self.attention,), row=self.attention.output)
        row = self.mlp.exit if isinstance(self.mlp, MoE) else self.mlp.down  # where the pieces of a split add up
        return first, Inside(entries=(self.mlp,), row=row)

    def forward(
        self, x: Tensor, cosine: Tensor | None = None, sine: Tensor | None = None, mask: Mask | None = None
    ) -> Tensor:
        """Rotary tables and mask are the same for all blocks, so they come from outside."""
        x = x + self.attention(self.attention_norm(x), cosine, sine, mask)
        return x + self.mlp(self.mlp_norm(x))


@dataclass
class LossScale:
    """What the loss at the end is multiplied by, for losses that arise inside of layers."""

    value: float = 1.0
    ways: int = 1
    """Ranks that hold a piece of the layer each, and whose gradients will be added."""


class Router(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.kind, self.k, self.routed_scale = config.router, config.experts_per_token, config.routed_scale
        self.weight = nn.Parameter(torch.empty(config.num_experts, config.hidden_size))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """The experts of each token, what share each has, and every expert's score."""
        scores = routing.PreciseLinear.apply(x, self.weight)
        if self.kind == "sigmoid":
            scores = scores.sigmoid()
        best, chosen = scores.topk(self.k, dim=-1)
        share = best.softmax(-1) if self.kind == "softmax" else best / best.sum(-1, keepdim=True)
        return chosen, share * self.routed_scale, scores

    def chances(self, scores: Tensor) -> Tensor:
        return scores.softmax(-1) if self.kind == "softmax" else scores / scores.sum(-1, keepdim=True)


class Experts(routing.ExpertHolder):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.num_experts = config.num_experts
        experts, d, f = config.num_experts, config.hidden_size, config.expert_ffn_size
        self.gate = nn.Parameter(torch.empty(experts, f, d))
        self.up = nn.Parameter(torch.empty(experts, f, d))
        self.down = nn.Parameter(torch.empty(experts, d, f))

    def forward(self, x: Tensor, chosen: Tensor, share: Tensor, kept: Tensor | None) -> Tensor:
        flat = [None if each is None else each.flatten(0, 1) for each in (x, chosen, share, kept)]
        return routing.through_experts(*flat, (self.gate, self.up, self.down), self.num_experts, self.send).view_as(x)


class MoE(nn.Module):
    """In place of a block's MLP: a router sends each token to a few of many experts."""

    def __init__(self, config: DecoderConfig, scale: LossScale):
        super().__init__()
        self.capacity_factor, self.balance, self.scale = config.capacity_factor, config.balance, scale
        self.router = Router(config)
        self.experts = Experts(config)
        size = config.num_shared_experts * config.expert_ffn_size
        self.shared = SwiGLU(config.hidden_size, size) if size else None
        self.exit = nn.Identity()  # of experts and shared experts together
        self.own_tokens: Callable[[Tensor, int], Tensor] = every_token
        self.all_choices: Callable[[Tensor], Tensor] = lambda chosen: chosen
        """Of the whole sequences: capacity and balance are a sequence's, of which this rank may have a part only."""

    def forward(self, x: Tensor) -> Tensor:
        chosen, share, scores = self.router(x)
        adds_loss = bool(self.balance) and torch.is_grad_enabled()
        all_chosen = self.all_choices(chosen) if self.capacity_factor or adds_loss else chosen
        kept = None
        if self.capacity_factor:
            kept = self.own_tokens(routing.within_capacity(all_chosen, scores.shape[-1], self.capacity_factor), 1)
        out = self.experts(x, chosen, share, kept)
        if self.shared is not None:
            out = out + self.shared(x)
        if adds_loss:
            loss = self.balance * routing.balancing_loss(all_chosen, self.router.chances(scores))
            out = routing.attach_loss(out, loss, self.scale)
        return self.exit(out)
