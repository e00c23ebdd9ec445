"""Modules that know nothing of this package, of any size: what the fuzzer trains beside our own models.

Each function returns (module, loss or None, inputs, targets) as `benchmarks.oracle.Subject` has them.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

Made = tuple[nn.Module, Any, list[tuple[list[int], int]], tuple[list[int], int]]


def larger(module: nn.Module) -> nn.Module:
    """Weights large enough that every part moves the loss; nothing is dropped."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(4.0)
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    return module.float()


def _text(module: nn.Module, sequence: int, vocab: int) -> Made:
    return larger(module), None, [([sequence], vocab)], ([sequence], vocab)


def _sizes(layers: int, heads: int, hidden: int, vocab: int, ffn: int) -> dict[str, Any]:
    return {
        "vocab_size": vocab, "hidden_size": hidden, "intermediate_size": ffn, "num_hidden_layers": layers,
        "num_attention_heads": heads, "max_position_embeddings": 64, "pad_token_id": 0,
    }  # fmt: skip


def llama(layers: int, heads: int, hidden: int, sequence: int, vocab: int, ffn: int) -> Made:
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes = _sizes(layers, heads, hidden, vocab, ffn) | {"bos_token_id": 1, "eos_token_id": 1}
    return _text(LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=heads)), sequence, vocab)


def qwen3(layers: int, heads: int, hidden: int, sequence: int, vocab: int, ffn: int) -> Made:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    sizes = _sizes(layers, 2 * heads, hidden, vocab, ffn) | {"bos_token_id": 1, "eos_token_id": 1}
    config = Qwen3Config(**sizes, num_key_value_heads=heads, head_dim=4, tie_word_embeddings=True)
    return _text(Qwen3ForCausalLM(config), sequence, vocab)


def gpt2(layers: int, heads: int, hidden: int, sequence: int, vocab: int, ffn: int) -> Made:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=vocab, n_embd=hidden, n_layer=layers, n_head=heads, n_positions=64, n_inner=ffn, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=1, eos_token_id=1,
    )  # fmt: skip
    return _text(GPT2LMHeadModel(config), sequence, vocab)


def bert(layers: int, heads: int, hidden: int, sequence: int, vocab: int, ffn: int) -> Made:
    from transformers import BertConfig, BertForMaskedLM

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _text(BertForMaskedLM(BertConfig(**_sizes(layers, heads, hidden, vocab, ffn), **off)), sequence, vocab)


class Mix(nn.Module):
    """Attention by hand, with a scale for each head and a gated MLP."""

    def __init__(self, hidden: int, heads: int, ffn: int) -> None:
        super().__init__()
        self.num_heads = heads
        self.before, self.between = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.q, self.k, self.v, self.back = (nn.Linear(hidden, hidden) for _ in range(4))
        self.up, self.gate, self.down = nn.Linear(hidden, ffn), nn.Linear(hidden, ffn), nn.Linear(ffn, hidden)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normal = self.before(x)
        q, k, v = (f(normal).view(batch, length, self.num_heads, -1).transpose(1, 2) for f in (self.q, self.k, self.v))
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = (q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5).masked_fill(future, -1e9).softmax(-1) @ v
        x = x + self.back(mixed.transpose(1, 2).reshape(batch, length, -1))
        normal = self.between(x)
        return x + self.down(self.up(normal) * torch.sigmoid(self.gate(normal)))


class Mixed(nn.Module):
    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, ffn: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocab, hidden), nn.Embedding(64, hidden)
        self.mixers = nn.ModuleList(Mix(hidden, heads, ffn) for _ in range(layers))
        self.norm, self.out = nn.LayerNorm(hidden), nn.Linear(hidden, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for mixer in self.mixers:
            x = mixer(x)
        return self.out(self.norm(x))


def mixer(layers: int, heads: int, hidden: int, sequence: int, vocab: int, ffn: int) -> Made:
    return _text(Mixed(layers, hidden, heads, vocab, ffn), sequence, vocab)


class Encoded(nn.Module):
    """torch's own encoder layers."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, ffn: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocab, hidden)
        layer = nn.TransformerEncoderLayer(hidden, heads, ffn, dropout=0.0, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.out = nn.Linear(hidden, vocab)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.encoder(self.words(tokens)))


def encoder(layers: int, heads: int, hidden: int, sequence: int, vocab: int, ffn: int) -> Made:
    return _text(Encoded(layers, hidden, heads, vocab, ffn), sequence, vocab)


def perceptron(layers: int, width: int) -> Made:
    blocks = [nn.Sequential(nn.Linear(width, 2 * width), nn.Tanh(), nn.Linear(2 * width, width)) for _ in range(layers)]
    module = nn.Sequential(nn.Linear(5, width), nn.Sequential(*blocks), nn.Linear(width, 3))
    return module, None, [([5], 0)], ([3], 0)


def convolutions(layers: int, width: int) -> Made:
    """Images through a Sequential with torch's own batch norms."""

    def block(channels: int) -> nn.Module:
        return nn.Sequential(nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU())

    blocks = [block(3), *(block(width) for _ in range(layers))]
    return nn.Sequential(*blocks, nn.Flatten(), nn.Linear(36 * width, 7)), None, [([3, 6, 6], 0)], ([], 7)
