"""What ranks of the pool run through the Python API, beside a plain torch loop over the whole batch."""

from __future__ import annotations

import copy
import json
from typing import Any

import foreign
import torch
from torch import Tensor, nn

import meshwright as mw
from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.models.presets import DecoderConfig, DLRMConfig
from meshwright.verify import parity
from meshwright.zoo import module_of

VOCAB, SEQUENCE = 36, 16


class Routed(nn.Module):
    """Each sample's first token chooses one of the experts, which differ in size; the last one is never chosen."""

    def __init__(self, sizes: tuple[int, ...]):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(16, n), nn.GELU(), nn.Linear(n, 16)) for n in (*sizes, sizes[0])
        )
        self.norm = nn.LayerNorm(16)

    def forward(self, x: Tensor, chosen: Tensor) -> Tensor:
        out = x.clone()
        for number, expert in enumerate(self.experts):
            rows = (chosen % (len(self.experts) - 1) == number).nonzero().flatten()
            if len(rows):
                out = out.index_add(0, rows, expert(self.norm(x[rows])))
        return out


class Stack(nn.Module):
    """Embedding, blocks and scores. `drops`: a block runs only for samples that ask for it, and not if none does."""

    def __init__(self, sizes: tuple[int, ...], drops: bool):
        super().__init__()
        self.words, self.out = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
        self.blocks = nn.ModuleList(Routed(sizes) for _ in range(3))
        self.drops = drops

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for number, block in enumerate(self.blocks):
            if not self.drops:
                x = block(x, tokens[:, 0])
            elif len(rows := (tokens[:, 1] % 3 != number).nonzero().flatten()):
                x = x.index_copy(0, rows, block(x[rows], tokens[rows, 0]))
        return self.out(x)


def _tokens(rows: int, draw: torch.Generator) -> tuple[Any, Tensor]:
    tokens = torch.randint(VOCAB, (rows, SEQUENCE + 1), generator=draw)
    return tokens[:, :-1], tokens[:, 1:]


def _table(rows: int, draw: torch.Generator) -> tuple[Any, Tensor]:
    ids = torch.stack([torch.randint(size, (rows,), generator=draw) for size in (8, 12)], 1)
    return (torch.randn(rows, 3, generator=draw), ids), torch.randint(2, (rows,), generator=draw).float()


def _images(rows: int, draw: torch.Generator) -> tuple[Any, Tensor]:
    images = torch.randn(rows, 1, 8, 8, generator=draw) * 0.1 + 30
    return images, torch.randint(10, (rows,), generator=draw)


def _ours(config: Any) -> nn.Module:
    module = module_of(config)
    with torch.no_grad():
        for value in module.parameters():
            value.copy_(torch.randn(value.shape) * 0.2 + (value.ndim == 1))
    return module


def made(model: Any) -> tuple[nn.Module, Any]:
    """A module with weights, and what draws a batch for it."""
    torch.manual_seed(7)
    if isinstance(model, dict):
        return _ours(DecoderConfig(**model)), _tokens
    if model == "tables":
        config = DLRMConfig(tables=(8, 12), num_dense=3, embedding_size=4, bottom=(8,), top=(8,))
        return _ours(config), _table
    if model == "convolutions":
        return foreign.convolutions()[0], _images
    kinds = {
        "by_hand": foreign.by_hand,
        "routed": lambda: Stack((8, 8), False),
        "ragged": lambda: Stack((8, 12), False),
        "dropping": lambda: Stack((8, 12), True),
    }
    return kinds[model](), _tokens


def _weights(kind: str, targets: Tensor, draw: torch.Generator) -> Tensor | None:
    """`small`: their sum is below 1; `gaps`: the first half of the batch has none."""
    drawn = torch.rand(targets.shape, generator=draw)
    half = (torch.arange(len(targets)) >= len(targets) // 2).float().view(-1, *(1,) * (targets.ndim - 1))
    return {
        "": None, "random": drawn, "zeros": 0 * drawn, "small": drawn / drawn.sum() / 4, "gaps": drawn * half,
    }[kind]  # fmt: skip


def _plain_loss(module: Any, inputs: Any, targets: Tensor, weights: Tensor) -> Tensor:
    divisor = float(weights.sum()) or 1.0
    if hasattr(module, "public_name"):  # ours: the sum is what its forward makes
        module.loss_scale = 1 / divisor
        return module(inputs, targets, weights) / divisor
    losses = nn.functional.cross_entropy(module(inputs).movedim(-1, 1), targets, reduction="none")
    return (losses * weights).sum() / divisor


def _plain_optimizer(module: nn.Module, config: Any) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in module.parameters() if (p.ndim >= 2) == is_matrix], "weight_decay": decay}
        for is_matrix, decay in ((True, config.weight_decay), (False, 0.0))
    ]
    if config.name == "sgd":
        return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    return torch.optim.AdamW(groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.epsilon)


def build_job(
    *, plan: dict[str, Any], model: Any, optimizer: dict[str, Any], weights: str = "", steps: int = 3, rank: int,
    num_ranks: int, rendezvous: str,
) -> dict[str, float]:  # fmt: skip
    """Largest distances from the plain loop: losses, and parameters after all steps (over the norm of all)."""
    chosen, config = Plan.from_json(json.dumps(plan)), decode(mw.OptimizerConfig, optimizer, "optimizer")
    if chosen.mesh:
        parity.enter(rank, num_ranks, rendezvous)
    module, batch = made(model)
    plain = copy.deepcopy(module).train()
    stepper = _plain_optimizer(plain, config)
    draw = torch.Generator().manual_seed(3)
    built = mw.build(chosen, module, inputs=batch(1, draw)[0], optimizer=config, device="cpu")
    rows, worst = built.rows(chosen.batch), {"loss": 0.0, "evaluated": 0.0, "parameters": 0.0}
    for _ in range(steps):
        inputs, targets = batch(chosen.batch, draw)
        weigh = _weights(weights, targets, draw)
        given = tuple(each[rows] for each in inputs) if isinstance(inputs, tuple) else inputs[rows]
        own = given, targets[rows], None if weigh is None else weigh[rows]
        weigh = torch.ones(targets.shape) if weigh is None else weigh
        with torch.no_grad():
            plain.eval()
            expected = float(_plain_loss(plain, inputs, targets, weigh))
            plain.train()
        worst["evaluated"] = max(worst["evaluated"], abs(built.evaluate(*own) - expected))
        stepper.zero_grad()
        loss = _plain_loss(plain, inputs, targets, weigh)
        loss.backward()
        stepper.step()
        worst["loss"] = max(worst["loss"], abs(built.step(*own).loss - float(loss)))
    references = dict(plain.named_parameters())
    norm = torch.stack([value.detach().norm() for value in references.values()]).norm()
    for name, value in built.build.local_parameters():
        expected_piece = references[name].detach()[built.build.boxes[name].slices]
        worst["parameters"] = max(worst["parameters"], float((value - expected_piece).norm() / norm))
    if chosen.mesh:
        parity.leave()
    return worst


def export_job(*, plan: dict[str, Any], folder: str, rank: int, num_ranks: int, rendezvous: str) -> str:
    """Two steps of a decoder, saved and exported by all ranks together; where the checkpoint is."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen = Plan.from_json(json.dumps(plan))
    built = mw.build(chosen, mw.model("byte-tiny"), device="cpu")
    tokens = torch.randint(256, (chosen.batch, 17), generator=torch.Generator().manual_seed(0))
    rows = built.rows(chosen.batch)
    for _ in range(2):
        built.step(tokens[rows, :-1], tokens[rows, 1:])
    built.export(f"{folder}/exported")
    return str(built.save(folder))
