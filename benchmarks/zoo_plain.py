"""Architectures in plain torch, written as users write them: for the zoo.

Each function returns (module, loss or None, inputs, targets) as `benchmarks.oracle.Subject` has them.
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Made = tuple[nn.Module, Any, list[tuple[list[int], int]], tuple[list[int], int]]
VOCAB, LENGTH, CLASSES = 37, 8, 7


def text(module: nn.Module) -> Made:
    return module, None, [([LENGTH], VOCAB)], ([LENGTH], VOCAB)


def image(module: nn.Module, size: int = 16) -> Made:
    return module, None, [([3, size, size], 0)], ([], CLASSES)


def vector(module: nn.Module, width: int, out: int) -> Made:
    return module, None, [([width], 0)], ([out], 0)


class Language(nn.Module):
    """Embedding, blocks one after another, a head."""

    def __init__(self, blocks: Any, width: int = 12, tied: bool = False):
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, width), nn.ModuleList(blocks)
        self.head = nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], **settings: Any):
        super().__init__()
        self.embed, self.core = nn.Embedding(VOCAB, 12), kind(12, 10, batch_first=True, **settings)
        self.head = nn.Linear(10 * (1 + bool(settings.get("bidirectional"))), VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.core(self.embed(tokens))[0])


def rnn() -> Made:
    return text(Recurrent(nn.RNN, num_layers=3))


def lstm() -> Made:
    return text(Recurrent(nn.LSTM, num_layers=3))


def gru() -> Made:
    return text(Recurrent(nn.GRU, num_layers=2, bidirectional=True))


class LSTMBlock(nn.Module):
    def __init__(self, kind: type[nn.Module] = nn.LSTM) -> None:
        super().__init__()
        self.norm, self.core = nn.LayerNorm(12), kind(12, 12, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.core(self.norm(x))[0]


def lstm_stack() -> Made:
    return text(Language(LSTMBlock() for _ in range(5)))


def gru_stack() -> Made:
    return text(Language((LSTMBlock(nn.GRU) for _ in range(3)), tied=True))


class Cell(nn.Module):
    """A loop over time by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.cell, self.head = nn.Embedding(VOCAB, 12), nn.LSTMCell(12, 12), nn.Linear(12, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        h, c = x.new_zeros(len(x), 12), x.new_zeros(len(x), 12)
        out = []
        for step in range(x.shape[1]):
            h, c = self.cell(x[:, step], (h, c))
            out.append(h)
        return self.head(torch.stack(out, 1))


def lstm_cell() -> Made:
    return text(Cell())


class Summary(nn.Module):
    """The last hidden state as a summary of the text."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.core, self.head = (
            nn.Embedding(VOCAB, 12),
            nn.GRU(12, 12, 2, batch_first=True),
            nn.Linear(12, 7),
        )

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.core(self.embed(tokens))[1][-1])


def gru_classifier() -> Made:
    return Summary(), None, [([LENGTH], VOCAB)], ([], CLASSES)


class Encoder(nn.Module):
    def __init__(self, norm_first: bool, layers: int = 4) -> None:
        super().__init__()
        self.embed, self.places = nn.Embedding(VOCAB, 12), nn.Parameter(torch.randn(LENGTH, 12) * 0.1)
        layer = nn.TransformerEncoderLayer(12, 2, 20, dropout=0.0, batch_first=True, norm_first=norm_first)
        self.encoder, self.head = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False), nn.Linear(12, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.encoder(self.embed(tokens) + self.places[: tokens.shape[1]]))


def transformer_encoder() -> Made:
    return text(Encoder(True))


def transformer_encoder_post_norm() -> Made:
    return text(Encoder(False, 3))


class Causal(Encoder):
    def forward(self, tokens: Tensor) -> Tensor:
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        x = self.embed(tokens) + self.places[: tokens.shape[1]]
        return self.head(self.encoder(x, mask=mask.to(x.dtype), is_causal=True))


def transformer_causal() -> Made:
    return text(Causal(True))


class Translator(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(VOCAB, 12), nn.Embedding(VOCAB, 12)
        self.core = nn.Transformer(12, 2, 2, 2, 20, dropout=0.0, batch_first=True)
        self.head = nn.Linear(12, VOCAB)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        return self.head(self.core(self.source(source), self.target(target)))


def transformer() -> Made:
    return Translator(), None, [([LENGTH], VOCAB), ([LENGTH], VOCAB)], ([LENGTH], VOCAB)


class Heads(nn.Module):
    """nn.MultiheadAttention inside a block."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm, self.attention = nn.LayerNorm(width), nn.MultiheadAttention(width, 2, batch_first=True)
        self.after, self.mlp = nn.LayerNorm(width), nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: Tensor) -> Tensor:
        normal = self.norm(x)
        x = x + self.attention(normal, normal, normal, need_weights=False)[0]
        return x + self.mlp(self.after(x))


def multihead() -> Made:
    return text(Language(Heads() for _ in range(3)))


class FusedAttention(nn.Module):
    """q, k and v of one linear, as in nanoGPT."""

    def __init__(self, width: int = 12, heads: int = 4) -> None:
        super().__init__()
        self.heads, self.norm, self.qkv = heads, nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.out, self.after = nn.Linear(width, width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = self.qkv(self.norm(x)).split(c, dim=2)
        q, k, v = (each.view(b, t, self.heads, c // self.heads).transpose(1, 2) for each in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, c)
        x = x + self.out(mixed)
        return x + self.down(F.gelu(self.up(self.after(x))))


def nano_gpt() -> Made:
    return text(Language((FusedAttention() for _ in range(3)), tied=True))


class Universal(nn.Module):
    """One block used again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.block, self.head = nn.Embedding(VOCAB, 12), FusedAttention(), nn.Linear(12, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for _ in range(3):
            x = self.block(x)
        return self.head(x)


def universal_transformer() -> Made:
    return text(Universal())


class MixerBlock(nn.Module):
    def __init__(self, tokens: int = 16, width: int = 12) -> None:
        super().__init__()
        self.one, self.two = nn.LayerNorm(width), nn.LayerNorm(width)
        self.across = nn.Sequential(nn.Linear(tokens, 20), nn.GELU(), nn.Linear(20, tokens))
        self.along = nn.Sequential(nn.Linear(width, 24), nn.GELU(), nn.Linear(24, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.across(self.one(x).transpose(1, 2)).transpose(1, 2)
        return x + self.along(self.two(x))


class Patches(nn.Module):
    """Patches of an image, blocks, mean, classes."""

    def __init__(self, blocks: Any, width: int = 12) -> None:
        super().__init__()
        self.patch, self.blocks = nn.Conv2d(3, width, 4, 4), nn.ModuleList(blocks)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, CLASSES)

    def forward(self, images: Tensor) -> Tensor:
        x = self.patch(images).flatten(2).transpose(1, 2)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def mlp_mixer() -> Made:
    return image(Patches(MixerBlock() for _ in range(4)))


def patch_transformer() -> Made:
    return image(Patches(Heads() for _ in range(3)))


class TorchvisionViT(nn.Module):
    """As torchvision writes it: an encoder object that holds the positions and an nn.Sequential of blocks."""

    class Encoder(nn.Module):
        def __init__(self, layers: int, width: int) -> None:
            super().__init__()
            self.pos_embedding = nn.Parameter(torch.randn(1, 17, width) * 0.02)
            self.dropout = nn.Dropout(0.0)
            self.layers, self.ln = nn.Sequential(*(Heads(width) for _ in range(layers))), nn.LayerNorm(width)

        def forward(self, x: Tensor) -> Tensor:
            return self.ln(self.layers(self.dropout(x + self.pos_embedding)))

    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(3, 12, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 12))
        self.encoder, self.heads = TorchvisionViT.Encoder(3, 12), nn.Sequential(nn.Linear(12, CLASSES))

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv_proj(images).flatten(2).transpose(1, 2)
        x = torch.cat([self.class_token.expand(len(x), -1, -1), x], dim=1)
        return self.heads(self.encoder(x)[:, 0])


def torchvision_vit() -> Made:
    return image(TorchvisionViT())


class Basic(nn.Module):
    """ResNet's basic block, with any norm."""

    def __init__(self, channels: int, width: int, stride: int, norm: Any) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False), norm(width)
        self.conv2, self.bn2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), norm(width)
        self.relu, self.downsample = nn.ReLU(inplace=True), None
        if stride != 1 or channels != width:
            self.downsample = nn.Sequential(nn.Conv2d(channels, width, 1, stride, bias=False), norm(width))

    def forward(self, x: Tensor) -> Tensor:
        identity = x if self.downsample is None else self.downsample(x)
        return self.relu(self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x))))) + identity)


class ResNet(nn.Module):
    """As torchvision writes it: layer1 to layer4 are attributes."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.conv1, self.bn1, self.relu = nn.Conv2d(3, 4, 3, 1, 1, bias=False), norm(4), nn.ReLU(inplace=True)
        self.maxpool = nn.MaxPool2d(2)
        for index, (channels, width) in enumerate(((4, 4), (4, 6), (6, 8), (8, 8)), 1):
            blocks = [Basic(channels, width, 1 if index == 1 else 2, norm), Basic(width, width, 1, norm)]
            setattr(self, f"layer{index}", nn.Sequential(*blocks))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d(1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def torchvision_resnet() -> Made:
    return image(ResNet(nn.BatchNorm2d))


def group_norm_resnet() -> Made:
    return image(ResNet(lambda width: nn.GroupNorm(2, width)))


class VGG(nn.Module):
    """As torchvision writes it: features, pooling and a classifier."""

    def __init__(self, batch_norm: bool) -> None:
        super().__init__()
        layers: list[nn.Module] = []
        channels = 3
        for width in (6, "M", 8, 8, "M", 10):
            if width == "M":
                layers.append(nn.MaxPool2d(2))
                continue
            layers += [nn.Conv2d(channels, int(width), 3, padding=1)]
            layers += [nn.BatchNorm2d(int(width))] if batch_norm else []
            layers += [nn.ReLU(inplace=True)]
            channels = int(width)
        self.features, self.avgpool = nn.Sequential(*layers), nn.AdaptiveAvgPool2d(2)
        self.classifier = nn.Sequential(nn.Linear(40, 16), nn.ReLU(), nn.Linear(16, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.classifier(torch.flatten(self.avgpool(self.features(x)), 1))


def torchvision_vgg() -> Made:
    return image(VGG(False))


def torchvision_vgg_bn() -> Made:
    return image(VGG(True))


class Dense(nn.Module):
    """DenseNet: every layer is given all before it."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 4, 3, padding=1)
        self.layers = nn.ModuleList(nn.Conv2d(4 + 3 * i, 3, 3, padding=1) for i in range(4))
        self.head = nn.Linear(16, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        found = [self.stem(x)]
        for layer in self.layers:
            found.append(F.relu(layer(torch.cat(found, 1))))
        return self.head(torch.cat(found, 1).mean((2, 3)))


def densenet() -> Made:
    return image(Dense(), 8)


class Inception(nn.Module):
    def __init__(self, channels: int = 6) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(channels, 2, 1), nn.Conv2d(channels, 2, 3, padding=1)
        self.c = nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.Conv2d(channels, 2, 1))

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(torch.cat([self.a(x), self.b(x), self.c(x)], 1)) + x


class Convolved(nn.Module):
    def __init__(self, blocks: Any, width: int = 6) -> None:
        super().__init__()
        self.stem, self.stages = nn.Conv2d(3, width, 3, padding=1), nn.Sequential(*blocks)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.stages(self.stem(x)).mean((2, 3)))


def inception() -> Made:
    return image(Convolved(Inception() for _ in range(3)), 8)


class ConvNeXtBlock(nn.Module):
    """As timm writes it, with a scale for each channel."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.conv_dw, self.norm = nn.Conv2d(width, width, 5, padding=2, groups=width), nn.LayerNorm(width)
        self.fc1, self.act, self.fc2 = nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)
        self.gamma = nn.Parameter(torch.full((width,), 0.5))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(self.conv_dw(x).permute(0, 2, 3, 1))
        return x + (self.gamma * self.fc2(self.act(self.fc1(y)))).permute(0, 3, 1, 2)


def timm_convnext() -> Made:
    return image(Convolved(ConvNeXtBlock() for _ in range(4)), 8)


class SqueezeBlock(nn.Module):
    """MBConv with squeeze and excitation and batch norms (EfficientNet)."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        wide = 2 * width
        self.expand = nn.Sequential(nn.Conv2d(width, wide, 1, bias=False), nn.BatchNorm2d(wide), nn.SiLU())
        self.depth = nn.Sequential(
            nn.Conv2d(wide, wide, 3, padding=1, groups=wide, bias=False), nn.BatchNorm2d(wide), nn.SiLU()
        )
        self.squeeze, self.excite = nn.Conv2d(wide, 3, 1), nn.Conv2d(3, wide, 1)
        self.project = nn.Sequential(nn.Conv2d(wide, width, 1, bias=False), nn.BatchNorm2d(width))

    def forward(self, x: Tensor) -> Tensor:
        y = self.depth(self.expand(x))
        y = y * self.excite(F.silu(self.squeeze(y.mean((2, 3), keepdim=True)))).sigmoid()
        return x + self.project(y)


def timm_efficientnet() -> Made:
    return image(Convolved(SqueezeBlock() for _ in range(3)), 8)


class UNet(nn.Module):
    """Skips from the way down to the way up."""

    def __init__(self) -> None:
        super().__init__()
        self.down = nn.ModuleList([nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 6, 3, padding=1)])
        self.middle = nn.Conv2d(6, 6, 3, padding=1)
        self.up = nn.ModuleList([nn.ConvTranspose2d(6, 6, 2, 2), nn.ConvTranspose2d(12, 4, 2, 2)])
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for layer in self.down:
            x = F.relu(layer(x))
            skips.append(x)
            x = F.max_pool2d(x, 2)
        x = F.relu(self.middle(x))
        for layer in self.up:
            x = torch.cat([F.relu(layer(x)), skips.pop()], 1)
        return self.out(x)


def u_net() -> Made:
    return UNet(), None, [([3, 8, 8], 0)], ([3, 8, 8], 0)


def autoencoder() -> Made:
    sizes = (20, 14, 6, 14, 20)
    layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in itertools.pairwise(sizes)]
    return vector(nn.Sequential(*layers), 20, 20)


class TiedAutoencoder(nn.Module):
    """The decoder is the encoder's transpose."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList([nn.Parameter(torch.randn(b, a) * 0.3) for a, b in ((20, 12), (12, 5))])
        self.biases = nn.ParameterList([nn.Parameter(torch.zeros(size)) for size in (12, 20)])

    def forward(self, x: Tensor) -> Tensor:
        for weight in self.weights:
            x = torch.tanh(F.linear(x, weight))
        for weight, bias in zip(reversed(list(self.weights)), self.biases, strict=True):
            x = F.linear(x, weight.t(), bias)
        return x


def tied_autoencoder() -> Made:
    return vector(TiedAutoencoder(), 20, 20)


class GraphLayer(nn.Module):
    def __init__(self, width: int = 10) -> None:
        super().__init__()
        self.own, self.others, self.norm = nn.Linear(width, width), nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, edges: Tensor) -> Tensor:
        return x + F.relu(self.norm(self.own(x) + edges @ self.others(x)))


class Graph(nn.Module):
    """Messages along a dense adjacency matrix, the same for every layer."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.layers = nn.Linear(5, 10), nn.ModuleList(GraphLayer() for _ in range(4))
        self.head = nn.Linear(10, CLASSES)

    def forward(self, nodes: Tensor, edges: Tensor) -> Tensor:
        x, edges = self.enter(nodes), torch.softmax(edges, -1)
        for layer in self.layers:
            x = layer(x, edges)
        return self.head(x.mean(1))


def graph_network() -> Made:
    return Graph(), None, [([6, 5], 0), ([6, 6], 0)], ([], CLASSES)


class WaveBlock(nn.Module):
    """Gated dilated convolutions over time, with a skip to the end."""

    def __init__(self, dilation: int, width: int = 8) -> None:
        super().__init__()
        self.filter = nn.Conv1d(width, width, 2, dilation=dilation)
        self.gate = nn.Conv1d(width, width, 2, dilation=dilation)
        self.residual, self.skip, self.pad = nn.Conv1d(width, width, 1), nn.Conv1d(width, width, 1), dilation

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = F.pad(x, (self.pad, 0))
        y = torch.tanh(self.filter(y)) * torch.sigmoid(self.gate(y))
        return x + self.residual(y), self.skip(y)


class Wave(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.blocks = nn.Embedding(VOCAB, 8), nn.ModuleList(WaveBlock(2**i) for i in range(3))
        self.head = nn.Linear(8, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x, total = self.embed(tokens).transpose(1, 2), 0.0
        for block in self.blocks:
            x, skip = block(x)
            total = total + skip
        return self.head(F.relu(total).transpose(1, 2))


def wavenet() -> Made:
    return text(Wave())


class Temporal(nn.Module):
    def __init__(self, dilation: int, width: int = 12) -> None:
        super().__init__()
        self.conv, self.norm, self.pad = (
            nn.Conv1d(width, width, 3, dilation=dilation),
            nn.LayerNorm(width),
            2 * dilation,
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + F.gelu(self.conv(F.pad(self.norm(x).transpose(1, 2), (self.pad, 0)))).transpose(1, 2)


def temporal_convolutions() -> Made:
    return text(Language(Temporal(2**i) for i in range(4)))


class Sampled(nn.Module):
    """A ModuleList of experts, each of which sees only the samples that chose it."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.router = nn.Linear(9, 12), nn.Linear(12, 4)
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12)) for _ in range(4))
        self.head = nn.Linear(12, CLASSES)

    def forward(self, x: Tensor) -> Tensor:
        x = self.enter(x)
        chance, choice = self.router(x).softmax(-1).max(-1)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = (choice == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * chance[rows, None])
        return self.head(x + out)


def experts_by_hand() -> Made:
    return Sampled(), None, [([9], 0)], ([], CLASSES)


class Recommender(nn.Module):
    """Users and items, factors and an MLP (NeuMF)."""

    def __init__(self) -> None:
        super().__init__()
        self.users, self.items = nn.Embedding(23, 8), nn.Embedding(29, 8)
        self.mlp = nn.Sequential(nn.Linear(16, 12), nn.ReLU(), nn.Linear(12, 6), nn.ReLU())
        self.head = nn.Linear(14, 1)

    def forward(self, user: Tensor, item: Tensor) -> Tensor:
        u, i = self.users(user[:, 0]), self.items(item[:, 0])
        return self.head(torch.cat([u * i, self.mlp(torch.cat([u, i], -1))], -1)).squeeze(-1)


def recommender() -> Made:
    return Recommender(), None, [([1], 23), ([1], 29)], ([], 0)


class Sets(nn.Module):
    """Deep sets: every element, their sum, a head."""

    def __init__(self) -> None:
        super().__init__()
        self.each = nn.Sequential(nn.Linear(4, 10), nn.ReLU(), nn.Linear(10, 10), nn.ReLU())
        self.all = nn.Sequential(nn.Linear(10, 10), nn.ReLU(), nn.Linear(10, CLASSES))

    def forward(self, x: Tensor) -> Tensor:
        return self.all(self.each(x).sum(1))


def deep_sets() -> Made:
    return Sets(), None, [([5, 4], 0)], ([], CLASSES)


class Twins(nn.Module):
    """One encoder for two inputs; a loss of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(9, 12), nn.ReLU(), nn.Linear(12, 6))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return F.cosine_similarity(self.encoder(a), self.encoder(b), dim=-1)


def _margin(output: Tensor, targets: Tensor) -> Tensor:
    return torch.where(targets > 0.5, 1 - output, F.relu(output - 0.2))


def siamese() -> Made:
    return Twins(), _margin, [([9], 0), ([9], 0)], ([], -1)


class Named(nn.Module):
    """Returns a dict, as many do."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Language([FusedAttention() for _ in range(3)])

    def forward(self, tokens: Tensor) -> dict[str, Tensor]:
        return {"logits": self.body(tokens)}


def dict_of_logits() -> Made:
    return text(Named())


class Highway(nn.Module):
    def __init__(self, width: int = 14) -> None:
        super().__init__()
        self.change, self.gate = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        gate = torch.sigmoid(self.gate(x))
        return gate * torch.relu(self.change(x)) + (1 - gate) * x


def highway() -> Made:
    return vector(nn.Sequential(nn.Linear(9, 14), *(Highway() for _ in range(5)), nn.Linear(14, 3)), 9, 3)


def perceptron_batch_norm() -> Made:
    blocks = [nn.Sequential(nn.Linear(12, 12), nn.BatchNorm1d(12), nn.ReLU()) for _ in range(4)]
    return vector(nn.Sequential(nn.Linear(9, 12), *blocks, nn.Linear(12, 3)), 9, 3)


class Hyena(nn.Module):
    """A long convolution by FFT, as in state-space models."""

    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.norm, self.enter, self.out = nn.LayerNorm(width), nn.Linear(width, 2 * width), nn.Linear(width, width)
        self.kernel = nn.Parameter(torch.randn(width, LENGTH) * 0.2)

    def forward(self, x: Tensor) -> Tensor:
        value, gate = self.enter(self.norm(x)).chunk(2, -1)
        size = 2 * x.shape[1]
        spectrum = torch.fft.rfft(value.transpose(1, 2), n=size) * torch.fft.rfft(self.kernel[:, : x.shape[1]], n=size)
        mixed = torch.fft.irfft(spectrum, n=size)[..., : x.shape[1]].transpose(1, 2)
        return x + self.out(mixed * torch.sigmoid(gate))


def long_convolutions() -> Made:
    return text(Language(Hyena() for _ in range(3)))
