"""What a vision transformer costs, from its dimensions alone. No torch."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.profile import Layer, Op, Param, Poly, Profile
from meshwright.models.config import ViTConfig
from meshwright.models.cost import block_layer, plain_mlp
from meshwright.models.cost_ops import NO_PIECES, class_loss, conv, ends_here, matmul, memory, per_sample


def _stem(config: ViTConfig) -> Layer:
    d, patch, size = config.hidden_size, config.patch_size, config.image_size
    image = config.channels * size * size
    passed = config.num_tokens * d
    return Layer(
        name="stem",
        params=(
            Param(name="token", shape=(d,)),
            Param(name="positions", shape=(config.num_tokens, d)),
            Param(name="patches.weight", shape=(d, config.channels, patch, patch)),
            Param(name="patches.bias", shape=(d,)),
        ),
        ops=(
            Op(name="images", kind="memory", saved=Poly(bs=image)),
            ends_here(conv("patches", config.channels, d, patch, size, size // patch)),
            memory("positions", 4.0 * passed, 0.0, "none", working=passed),
        ),
        boundary=Poly(bs=passed),
    )


def _head(config: ViTConfig) -> Layer:
    d, classes = config.hidden_size, config.num_classes
    norm = (Param(name="norm.weight", shape=(d,)), Param(name="norm.bias", shape=(d,)))
    output = (Param(name="output.weight", shape=(classes, d)), Param(name="output.bias", shape=(classes,)))
    return Layer(
        name="head",
        params=(*norm, *output),
        ops=(
            replace(memory("norm", 2.0 * d, d, "none"), dtype="float32"),
            Op(name="output.input", kind="memory", saved=Poly(bs=d)),
            replace(matmul("output", classes, d), cut="none"),
            class_loss(classes),
        ),
    )


def _block(config: ViTConfig) -> Layer:
    encoder = config.encoder
    layer = block_layer(encoder, "blocks", config.num_layers, plain_mlp(encoder), is_causal=False)
    # The stream between regions is of the parameters' dtype, under autocast too.
    ops = tuple(replace(op, dtype="float32") if op.cut == "sequence" else op for op in layer.ops)
    return replace(layer, ops=ops)


def vit_profile(config: ViTConfig, name: str) -> Profile:
    tokens = config.num_tokens
    odd = f"its {tokens} tokens, the class token among them, are not divided."
    return Profile(
        name=name,
        layers=(per_sample(_stem(config)), per_sample(_block(config), tokens), per_sample(_head(config))),
        hidden_size=config.hidden_size,
        max_sequence=1,
        counts="samples",
        stream="parameters",
        uncut={"sequence": odd, "loss": NO_PIECES},
    )
