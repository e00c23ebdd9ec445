"""What is found in modules of others: blocks, stages, and why there are none.

Tests of `foreign/adapt.py`, `models/frozen_parameters.py`.
"""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from meshwright.core.profile import Profile
from meshwright.foreign.adapt import Adapted, adapt, scores
from meshwright.models.frozen_parameters import names_of

TOKENS = torch.zeros(1, 48, dtype=torch.int64)
SIZE = 20


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(SIZE, SIZE)
        self.heads = 2

    def forward(self, x: Tensor) -> Any:
        return x + torch.tanh(self.linear(x))


class Whole(nn.Module):
    """Embedding, blocks, head; what is done with the blocks differs."""

    def __init__(self, blocks: nn.Module | None = None) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(10, SIZE), nn.Linear(SIZE, 10)
        self.blocks = blocks if blocks is not None else nn.ModuleList(Block() for _ in range(3))

    def forward(self, tokens: Tensor) -> Any:
        return self.head(self.through(self.words(tokens)))

    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def looked_at(module: nn.Module) -> tuple[Adapted, Profile]:
    return adapt(module, TOKENS, name="module")


class AsksForAttributes(Whole):
    def through(self, x: Tensor) -> Tensor:
        first = self.blocks[0]
        assert isinstance(first, Block)
        assert first.heads + len(self.blocks) == 5
        assert first.linear.weight.shape == (SIZE, SIZE)
        assert [name for name, _ in first.named_children()] == ["linear"]
        return super().through(x)


class DoesSomethingBetween(Whole):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = 2.0 * block(x).transpose(0, 1).transpose(0, 1)
        return x


@pytest.mark.parametrize("kind", [Whole, AsksForAttributes, DoesSomethingBetween])
def test_stages_one_after_the_other_are_the_whole(kind: type[Whole]) -> None:
    torch.manual_seed(0)
    tokens = torch.randint(10, (2, 12))
    whole = kind().double()
    wanted = whole(tokens)
    received = None
    made, profile = looked_at(whole)
    assert "stages" not in profile.uncut
    for at in range(3):
        stage = Adapted(whole, made.anatomy, {}, made.template, made.loss)
        values = {name: value.detach().clone() for name, value in whole.named_parameters()}
        buffers = {name: id(each) for name, each in whole.named_modules()}
        stage.keep(((at, at + 1),))
        stage.set_place(torch.device("cpu"), torch.float64)
        with torch.no_grad():
            received = stage(tokens, received=received)
        assert {name: id(each) for name, each in whole.named_modules()} == buffers
        whole = kind().double()
        whole.load_state_dict(values)
    assert torch.equal(received, wanted)


def test_looking_leaves_the_module_as_it_was() -> None:
    module = Whole()
    before = [(name, id(each), dict(vars(each))) for name, each in module.named_modules()]
    values = [(name, id(value)) for name, value in module.named_parameters()]
    looked_at(module)
    assert [(name, id(each), dict(vars(each))) for name, each in module.named_modules()] == before
    assert [(name, id(value)) for name, value in module.named_parameters()] == values


class Second(Block):
    def forward(self, x: Tensor) -> Any:
        return super().forward(x), (x.detach() > 0, 3)


class UsesTheSecond(Whole):
    """What the first block says of its input, the others see, and no gradient tells of it."""

    def through(self, x: Tensor) -> Tensor:
        masks = []
        for block in self.blocks:
            x, (mask, three) = block(x)
            assert three == 3
            masks.append(mask)
        return x * masks[0]


class Dropped(Whole):
    def through(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            if torch.rand([]) > 0.1:
                x = block(x)
        return x


class Norms(Whole):
    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(SIZE) for _ in range(3))

    def through(self, x: Tensor) -> Tensor:
        for block, norm in zip(self.blocks, self.norms, strict=True):
            x = norm(block(x))
        return x


class TwiceFirst(Whole):
    def through(self, x: Tensor) -> Tensor:
        return super().through(x) + self.blocks[0].linear.weight.sum()


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (UsesTheSecond(nn.ModuleList(Second() for _ in range(3))), "where only block 2 is there, its forward fails"),
        (Dropped(), "of its 3 blocks run every time"),
        (Norms(), "block 1 also depends on norms.0.weight"),
        (TwiceFirst(), "also depends on blocks.0.linear.weight"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, nn.Module) else "",
)
def test_stages_that_cannot_be_cut_are_refused_with_the_reason(module: nn.Module, why: str) -> None:
    assert why in looked_at(module)[1].uncut["stages"]


def test_a_second_output_that_nobody_uses_is_no_obstacle() -> None:
    class Ignores(Whole):
        def through(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x, (_, three) = block(x)
                assert three == 3
            return x

    assert "stages" not in looked_at(Ignores(nn.ModuleList(Second() for _ in range(3))))[1].uncut


def test_blocks_are_called_by_their_names() -> None:
    named = nn.Sequential(OrderedDict((f"layer_{i}", Block()) for i in range(3)))
    module = Whole(named)
    made, profile = looked_at(module)
    assert made.anatomy.names == ("blocks.layer_0", "blocks.layer_1", "blocks.layer_2")
    assert sorted(names_of(profile)) == sorted(name for name, _ in module.named_parameters())


def test_lists_side_by_side_are_one_chain_if_they_run_so() -> None:
    class Beside(Whole):
        def __init__(self, order: tuple[int, ...]) -> None:
            super().__init__(nn.Identity())
            self.order = order
            self.layer1, self.layer2 = nn.Sequential(Block(), Block()), nn.Sequential(Block())

        def through(self, x: Tensor) -> Tensor:
            for at in self.order:
                x = (self.layer1, self.layer2)[at](x)
            return x

    made, profile = looked_at(Beside((0, 1)))
    assert made.anatomy.names == ("layer1.0", "layer1.1", "layer2.0")
    assert "stages" not in profile.uncut
    assert sorted(names_of(profile)) == sorted(name for name, _ in made.module.named_parameters())
    assert "stages" in looked_at(Beside((1, 0)))[1].uncut or looked_at(Beside((1, 0)))[0].anatomy.num_blocks == 2


def test_scores_in_a_dict() -> None:
    class Dict(Whole):
        def forward(self, tokens: Tensor) -> Any:
            return {"hidden": tokens, "logits": super().forward(tokens)}

    made, profile = looked_at(Dict())
    assert made.num_scores == 10
    assert scores(made.module(TOKENS)).shape == (1, 48, 10)
    assert not profile.unpriced


@pytest.mark.parametrize(("kind", "gates", "kept"), [(nn.LSTM, 4, 7), (nn.GRU, 3, 8), (nn.RNN, 1, 3)])
def test_recurrent_layers_are_counted(kind: Any, gates: int, kept: int) -> None:
    class Recurrent(Whole):
        def through(self, x: Tensor) -> Tensor:
            for block in self.blocks:
                x, _ = block(x)
            return x

    profile = looked_at(Recurrent(nn.ModuleList(kind(SIZE, SIZE, batch_first=True) for _ in range(3))))[1]
    assert not profile.unpriced
    assert "stages" not in profile.uncut
    (block,) = profile.block_layers
    samples, sequence = 2, 100
    steps = samples * sequence
    assert sum(op.flops(samples, sequence) for op in block.ops) == 2 * steps * gates * SIZE * 2 * SIZE
    assert sum(op.backward_flops(samples, sequence) for op in block.ops) == 4 * steps * gates * SIZE * 2 * SIZE
    # Input and output in the dtype computed in, and what cuDNN keeps.
    assert sum(op.saved(samples, sequence) for op in block.ops) == kept * steps * SIZE
