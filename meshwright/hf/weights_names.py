"""Which Hugging Face tensors a parameter of ours is made of, as small values that read both ways.

    ours  blocks.3.attention.key.weight  (out, in)        theirs  transformer.h.3.attn.c_attn.weight  (in, 3 out)

          +-----+   at: all of it                          start: row `out`, transposed
          | key |  <-------------------------------------  +-------+-------+-------+
          +-----+                                          | query |  key  | value |
                                                           +-------+-------+-------+
Import asks for a box of ours and reads the slices of theirs; export asks for a tensor of theirs and gathers ours.
"""

from __future__ import annotations

import re
from collections.abc import Container, Mapping
from dataclasses import dataclass, replace

import torch

from meshwright.core.box import Box
from meshwright.hf.config_json import family_of
from meshwright.models.presets import DecoderConfig
from meshwright.zoo.decoder import Decoder

Shape = tuple[int, ...]
_LLAMA = {
    "embed.tokens.weight": "model.embed_tokens.weight",
    "head.norm.weight": "model.norm.weight",
    "head.output.weight": "lm_head.weight",
    "attention_norm": "input_layernorm",
    "mlp_norm": "post_attention_layernorm",
    "attention.query": "self_attn.q_proj",
    "attention.key": "self_attn.k_proj",
    "attention.value": "self_attn.v_proj",
    "attention.output": "self_attn.o_proj",
    "attention.query_norm": "self_attn.q_norm",
    "attention.key_norm": "self_attn.k_norm",
    "mlp.gate": "mlp.gate_proj",
    "mlp.up": "mlp.up_proj",
    "mlp.down": "mlp.down_proj",
    "mlp.router": "block_sparse_moe.gate",
}
_GPT2 = {
    "embed.tokens.weight": "transformer.wte.weight",
    "embed.positions.weight": "transformer.wpe.weight",
    "head.norm.weight": "transformer.ln_f.weight",
    "head.norm.bias": "transformer.ln_f.bias",
    "head.output.weight": "lm_head.weight",
    "attention_norm": "ln_1",
    "mlp_norm": "ln_2",
    "attention.query": "attn.c_attn",
    "attention.key": "attn.c_attn",
    "attention.value": "attn.c_attn",
    "attention.output": "attn.c_proj",
    "mlp.up": "mlp.c_fc",
    "mlp.down": "mlp.c_proj",
}
_EXPERTS = {"gate": "w1", "up": "w3", "down": "w2"}
_OURS = re.compile(r"blocks\.(\d+)\.(.+?)(?:\.(weight|bias))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class TensorPart:
    """The box `at` of a parameter of ours, as it lies in the tensor `name`."""

    name: str
    shape: Shape
    """The whole tensor's, as it is stored."""
    at: Box
    start: Shape
    """Where the box begins there, in our dims."""
    is_transposed: bool = False

    @classmethod
    def whole(cls, name: str, shape: Shape) -> TensorPart:
        return cls(name=name, shape=shape, at=Box.whole(shape), start=(0,) * len(shape))

    def stored_box(self, both: Box) -> Box:
        """Where a box of ours that lies within `at` is stored."""
        offset = [o - a + s for o, a, s in zip(both.offset, self.at.offset, self.start, strict=True)]
        size = list(both.size)
        if len(self.shape) < len(size):  # one expert of ours is one tensor of theirs
            del offset[0], size[0]
        if self.is_transposed:
            offset[-2:], size[-2:] = offset[:-3:-1], size[:-3:-1]
        return Box(self.shape, tuple(offset), tuple(size))

    def as_stored(self, piece: torch.Tensor) -> torch.Tensor:
        """A piece of ours with their dims; a view, so that reading into it fills ours."""
        piece = piece[0] if len(self.shape) < piece.dim() else piece
        return piece.transpose(-1, -2) if self.is_transposed else piece


def parameter_shapes(config: DecoderConfig) -> dict[str, Shape]:
    """Of our decoder, by name; a tied head is its embedding and is not there."""
    with torch.device("meta"):
        return {name: tuple(each.shape) for name, each in Decoder(config).named_parameters()}


def parts_of_decoder(config: DecoderConfig, stored: Container[str] | None = None) -> dict[str, tuple[TensorPart, ...]]:
    """Parameter of ours -> its parts, named as in `stored`, or as transformers writes them."""
    made = parts_gpt2 if family_of(config) == "GPT2LMHeadModel" else parts_llama
    found = {name: made(name, shape) for name, shape in parameter_shapes(config).items()}
    if stored is None:
        return found
    if config.num_experts and _are_experts_stacked(stored):
        found |= {name: _stacked(name, parts) for name, parts in found.items() if ".mlp." in name}
    embedding = found["embed.tokens.weight"][0].name
    prefix, _, bare = embedding.partition(".")
    if embedding in stored or bare not in stored:
        return found
    return {
        name: tuple(replace(part, name=part.name.removeprefix(f"{prefix}.")) for part in parts)
        for name, parts in found.items()
    }


def _hf_name(name: str, names: Mapping[str, str], layers: str) -> str:
    if name in names:
        return names[name]
    layer, middle, last = _split(name)
    return f"{layers}.{layer}.{names[middle]}.{last}"


def _split(name: str) -> tuple[str, str, str]:
    match = _OURS.fullmatch(name)
    assert match, f"{name} is of no block"
    return match[1], match[2], match[3] or ""


def parts_llama(name: str, shape: Shape) -> tuple[TensorPart, ...]:
    """Also Mistral, Qwen and Mixtral: they differ in which of the names exist."""
    if ".mlp.experts." not in name:
        return (TensorPart.whole(_hf_name(name, _LLAMA, "model.layers"), shape),)
    layer, middle, _ = _split(name)
    stem = f"model.layers.{layer}.block_sparse_moe.experts"
    weight = f"{_EXPERTS[middle.rpartition('.')[2]]}.weight"
    return tuple(
        TensorPart(
            name=f"{stem}.{expert}.{weight}",
            shape=shape[1:],
            at=Box(shape, (expert, 0, 0), (1, *shape[1:])),
            start=(0, 0, 0),
        )
        for expert in range(shape[0])
    )


def _are_experts_stacked(stored: Container[str]) -> bool:
    return any(f"{prefix}layers.0.mlp.experts.gate_up_proj" in stored for prefix in ("model.", ""))


def _stacked(name: str, parts: tuple[TensorPart, ...]) -> tuple[TensorPart, ...]:
    """As transformers 5 holds experts in memory: one tensor for all, gate above up."""
    first = parts[0]
    moved = first.name.replace("block_sparse_moe", "mlp")
    if ".mlp.experts." not in name:
        return (replace(first, name=moved),)
    shape, stem = first.at.shape, moved.partition(".experts.")[0]
    if name.endswith(".down"):
        return (TensorPart.whole(f"{stem}.experts.down_proj", shape),)
    num_experts, ffn, hidden = shape
    row = 0 if name.endswith(".gate") else ffn
    stacked = (num_experts, 2 * ffn, hidden)
    return (TensorPart(name=f"{stem}.experts.gate_up_proj", shape=stacked, at=Box.whole(shape), start=(0, row, 0)),)


def parts_gpt2(name: str, shape: Shape) -> tuple[TensorPart, ...]:
    """Its linears are stored transposed; query, key and value are one tensor."""
    stored = _hf_name(name, _GPT2, "transformer.h")
    is_linear = name.startswith("blocks.") and "_norm." not in name
    third = ("query", "key", "value").index(name.split(".")[3]) if ".c_attn." in stored else 0
    whole = (3 * shape[0], *shape[1:]) if ".c_attn." in stored else shape
    is_transposed = is_linear and len(shape) == 2
    return (
        TensorPart(
            name=stored,
            shape=whole[::-1] if is_transposed else whole,
            at=Box.whole(shape),
            start=(third * shape[0], *(0 for _ in shape[1:])),
            is_transposed=is_transposed,
        ),
    )


def parts_by_name(name: str, shape: Shape, stored: Container[str]) -> tuple[TensorPart, ...]:
    """For a module of transformers' own: its name, or what that was called before; empty when nothing is found."""
    old = name.replace("LayerNorm.weight", "LayerNorm.gamma").replace("LayerNorm.bias", "LayerNorm.beta")
    for each in (name, name.partition(".")[2], f"model.{name}", f"transformer.{name}", old):
        if each in stored:
            return (TensorPart.whole(each, shape),)
    return ()
