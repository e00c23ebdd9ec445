"""One decoder transformer for GPT-2, Llama, Mistral, Qwen, Mixtral and the like.

It knows nothing of parallelism. Three facts let techniques cut it: it is a list of layers (`embed`, `blocks`, `head`)
any of which may be absent, so a stage is the same class with fewer layers and the same parameter names; a block has two
regions (`attention`, `mlp`) whose weights may be split; and the head turns hidden states into a loss through a
replaceable step (`score`). All but attention looks at one token at a time, so a rank may have only some
tokens of each sequence (`own_tokens`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

from meshwright.models.presets import DecoderConfig
from meshwright.ops.attention import Mask, attention_mask, places_in_documents
from meshwright.ops.cross_entropy import HeadLoss, SplitVocabulary
from meshwright.ops.model_interface import BlockModel, Inputs, Inside, ModelPart, Spans, is_within
from meshwright.ops.routing import attach_loss
from meshwright.zoo.layers import (
    GELU,
    AdaptedLinear,
    Linear,
    LossScale,
    MoE,
    Norm,
    SwiGLU,
    TransformerBlock,
    rope_table,
)


class Embed(nn.Module):
    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        learned = config.positions == "learned"
        self.positions = nn.Embedding(config.max_sequence, config.hidden_size) if learned else None
        self.dtype: torch.dtype | None = None
        """Activations' dtype; None: the weights'."""

    def forward(self, tokens: Tensor, places: Tensor) -> Tensor:
        x = self.tokens(tokens)
        if self.positions is not None:
            x = x + self.offsets(x, places)
        return x if self.dtype is None else x.to(self.dtype)

    def offsets(self, x: Tensor, places: Tensor) -> Tensor:
        """Positions of the samples' tokens, in the shape of x (which may hold only a part of the sequence)."""
        assert self.positions is not None
        return self.positions(places)


def score(head: DecoderHead, x: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Sum over tokens of weight x loss."""
    matrix = head.output.weight
    is_trained = torch.is_grad_enabled() and (x.requires_grad or matrix.requires_grad)
    return HeadLoss.apply(
        x, matrix, targets, weights, head.scale.value, head.num_chunks, head.split_vocabulary, is_trained
    )


class DecoderHead(nn.Module):
    def __init__(self, config: DecoderConfig, scale: LossScale):
        super().__init__()
        self.norm = Norm(config.hidden_size, config.norm, config.norm_epsilon)
        self.output = Linear(config.hidden_size, config.vocab_size, bias=False)
        self.score: Callable[[DecoderHead, Tensor, Tensor, Tensor], Tensor] = score
        self.scale = scale
        self.num_chunks = 1
        self.is_normed = False
        """What comes has been through the norm."""
        self.split_vocabulary: SplitVocabulary | None = None

    def forward(self, x: Tensor, targets: Tensor | None = None, weights: Tensor | None = None) -> Tensor:
        x = x if self.is_normed else self.norm(x)
        if targets is None or weights is None:
            return self.output(x)
        return self.score(self, x, targets, weights)


class Decoder(BlockModel):
    kind = "decoder"
    first = "embed"

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        self.num_blocks = config.num_layers
        self.scale = LossScale()
        self.mask: Callable[[int, int, Tensor | None, torch.device, int], Mask | None] = attention_mask
        self.embed: Embed | None = Embed(config)
        self.blocks = nn.ModuleDict({str(i): TransformerBlock(config, self._mlp(i)) for i in range(config.num_layers)})
        self.local_heads = nn.ModuleDict({str(at - 1): DecoderHead(config, self.scale) for at in config.group_borders})
        """By the number of the block before each."""
        self.has_local_heads = bool(config.local_heads)
        self.head: DecoderHead | None = DecoderHead(config, self.scale)
        if config.tied:
            self.head.output.weight = self.embed.tokens.weight
        if config.adapter is not None:
            self.requires_grad_(False)
            for block, name in itertools.product(self.blocks.values(), config.linears):
                region, _, own = name.partition(".")
                holder = block.get_submodule(region)
                setattr(holder, own, AdaptedLinear(getattr(holder, own), name, config.adapter))

    def _mlp(self, block: int) -> nn.Module:
        config = self.config
        if config.num_experts and block >= config.num_dense_layers:
            return MoE(config, self.scale)
        if config.mlp == "swiglu":
            return SwiGLU(config.hidden_size, config.ffn_size, config.bias)
        return GELU(config)

    def forward(
        self,
        inputs: Inputs,
        targets: Tensor | None = None,
        weights: Tensor | None = None,
        received: Tensor | None = None,
    ) -> Tensor:
        """Tokens, or (tokens, documents): a token then sees its own document only, whose positions start at 0."""
        tokens, documents = inputs if isinstance(inputs, tuple) else (inputs, None)
        if documents is None:
            places = torch.arange(tokens.shape[1], device=tokens.device)
        else:
            places = places_in_documents(documents)
        config = self.config
        mask = self.mask(tokens.shape[1], config.sliding_window, documents, tokens.device, config.size_of_head)
        asked = () if targets is None or weights is None else (self.own_tokens(targets, 1), self.own_tokens(weights, 1))
        local = (asked,) if self.has_local_heads and torch.is_grad_enabled() else ()
        x = self.trunk(self.own_tokens(tokens, 1), self.own_tokens(places, -1), mask, received, *local)
        if self.head is None or not self.runs(self.config.num_layers - 1):
            return x
        return self.head(x, *asked)

    def trunk(
        self, tokens: Tensor, places: Tensor, mask: Mask | None, received: Tensor | None, asked: tuple[Tensor, ...] = ()
    ) -> Tensor:
        """Embedding and blocks. `asked`: targets and weights for the losses between them."""
        x = received
        if x is None:
            assert self.embed is not None, "a later stage is given what the stage before it made"
            x = self.embed(tokens, places)
        cosine, sine = rope_table(self.config, places, x) if self.config.positions == "rope" else (None, None)
        for name, block in self.blocks.items():
            if self.runs(int(name)):
                x = block(x, cosine, sine, mask)
                if asked and name in self.local_heads:
                    loss = self.local_heads[name](x, *asked)
                    x = x.detach() if int(name) + 1 in self.cut_before else x
                    x = attach_loss(x, loss, LossScale(self.scale.value))
        return x

    def compile_trunk(self, compiled: Callable[[Callable[..., Tensor]], Callable[..., Tensor]]) -> None:
        assert self.head is not None, "the whole model"
        plain, norm = self.trunk, self.head.norm
        self.head.is_normed = True
        self.trunk = compiled(lambda *given: norm(plain(*given)))  # type: ignore[method-assign]

    def keep(self, spans: Spans) -> None:
        super().keep(spans)
        for name in list(self.local_heads):
            if not is_within(spans, int(name)):
                del self.local_heads[name]

    def parts(self) -> Iterable[ModelPart]:
        for part in super().parts():
            yield part
            number = part.name.rpartition(".")[2]
            if part.is_block and number in self.local_heads:
                head = self.local_heads[number]
                yield ModelPart(name=f"local_heads.{number}", kind="local_heads", module=head)

    def heads(self) -> Iterable[tuple[str, Any]]:
        yield from ((f"local_heads.{number}", head) for number, head in self.local_heads.items())
        yield from super().heads()

    def kind_of(self, block: int) -> str:
        return "dense_blocks" if block < self.config.num_dense_layers else "blocks"

    def regions(self) -> Iterable[Inside]:
        for block in self.blocks.values():
            assert isinstance(block, TransformerBlock)
            yield from block.regions()

    def ends(self) -> tuple[Any, Any]:
        return self.embed, self.head

    def boundary(self, inputs: Inputs, block: int) -> tuple[int, ...]:
        tokens = inputs[0] if isinstance(inputs, tuple) else inputs
        return tokens.shape[0], tokens.shape[1], self.config.hidden_size

    def set_compute_dtype(self, dtype: torch.dtype) -> None:
        super().set_compute_dtype(dtype)
        if self.embed is not None:
            self.embed.dtype = dtype

    def set_split(self, index: int, ways: int) -> None:
        self.scale.ways = ways

    @property
    def loss_scale(self) -> float:
        return self.scale.value

    @loss_scale.setter
    def loss_scale(self, value: float) -> None:
        self.scale.value = value

    def init_value(self, name: str) -> float | tuple[float, float]:
        if name.endswith("norm.weight"):
            return 1.0
        if name.endswith((".bias", ".lora_B")):
            return 0.0
        if name.endswith(".lora_A"):  # as spread as PEFT's uniform numbers
            return 0.0, (3 * self.config.linears[".".join(name.split(".")[2:-1])][1]) ** -0.5
        residual = name.endswith(("attention.output.weight", "down.weight", "experts.down"))
        depth = (2 * self.config.num_layers) ** 0.5 if residual else 1.0
        return 0.0, self.config.init_std / depth
