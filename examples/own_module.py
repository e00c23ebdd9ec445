"""A language model that knows nothing of Meshwright: plain PyTorch, from a file of its own."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    """Attention and an MLP; a gate decides how much of the MLP each token takes."""

    def __init__(self, size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.norm1, self.norm2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.q, self.k, self.v, self.out = (nn.Linear(size, size) for _ in range(4))
        self.wide, self.narrow = nn.Linear(size, 4 * size), nn.Linear(4 * size, size)
        self.gate = nn.Linear(size, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normal = self.norm1(x)
        q, k, v = (
            each(normal).view(batch, length, self.num_heads, -1).transpose(1, 2) for each in (self.q, self.k, self.v)
        )
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, -1))
        return x + torch.sigmoid(self.gate(x)) * self.narrow(F.gelu(self.wide(self.norm2(x))))


class Writer(nn.Module):
    def __init__(self, num_blocks: int, size: int):
        super().__init__()
        self.letters, self.places = nn.Embedding(256, size), nn.Embedding(128, size)
        self.blocks = nn.ModuleList(Block(size, num_heads=4) for _ in range(num_blocks))
        self.norm, self.next = nn.LayerNorm(size), nn.Linear(size, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.letters(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.next(self.norm(x))


def smoothed(scores: Tensor, targets: Tensor) -> Tensor:
    """One value for each target: Meshwright weighs and sums them over all ranks."""
    return F.cross_entropy(scores.movedim(-1, 1), targets, label_smoothing=0.1, reduction="none")


def make(num_blocks: int = 4, size: int = 64):
    return Writer(num_blocks, size), smoothed
