"""What a vision transformer costs, from its dimensions alone. No torch."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.profile import Layer, Op, Param, Poly, Profile
from meshwright.models.cost_decoder import block_layer, plain_mlp
from meshwright.models.cost_ops import (
    NO_PIECES,
    bias,
    cast,
    conv,
    cross_entropy,
    ends_here,
    matmul,
    memory,
    once,
    per_sample,
)
from meshwright.models.presets import ViTConfig


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
            *cast("images", image, "none", back=False, saved=image),
            ends_here(conv("patches", config.channels, d, patch, size, size // patch)),
            # The class token joins in, the stream becomes float32, positions are added.
            memory(
                "joined",
                3.0 * passed,
                0.0,
                "none",
                role="embedding",
                back=float(passed),
                backward_kernels=1.0,
                working=passed,
            ),
            once(
                memory(
                    "positions",
                    3.0 * passed,
                    0.0,
                    "none",
                    role="embedding",
                    back=2.0 * passed,
                    kernels=2,
                    backward_kernels=2,
                    wide=True,
                ),
                passed,
                passed,
            ),
        ),
        boundary=Poly(bs=passed),
    )


def _head(config: ViTConfig) -> Layer:
    d, classes, tokens = config.hidden_size, config.num_classes, config.num_tokens
    norm = (Param(name="norm.weight", shape=(d,)), Param(name="norm.bias", shape=(d,)))
    output = (Param(name="output.weight", shape=(classes, d)), Param(name="output.bias", shape=(classes,)))
    return Layer(
        name="head",
        params=(*norm, *output),
        ops=(
            # A copy of the class token; going back, a gradient of zeros for all others.
            memory(
                "class", 2.0 * d, 0.0, "none", role="layout", back=(tokens + 1.0) * d, backward_kernels=1.0, wide=True
            ),
            once(
                memory(
                    "norm",
                    2.0 * d,
                    d + 2.0,
                    "none",
                    role="norm",
                    back=5.0 * d,
                    backward_kernels=1.0,
                    working=tokens * d,
                    wide=True,
                ),
                2.0 * d,
                4.0 * d,
            ),
            *cast("output.input", d, "none", back=True, saved=d),
            replace(matmul("output", classes, d), cut="none"),
            bias("output.bias", classes, "none"),
            *cross_entropy(classes),
        ),
    )


def _block(config: ViTConfig) -> Layer:
    encoder = config.encoder
    layer = block_layer(encoder, "blocks", config.num_layers, plain_mlp(encoder), is_causal=False)
    # The stream between regions is of the parameters' dtype, under autocast too; each linear casts what it reads.
    ops: list[Op] = []
    d = config.hidden_size
    for op in layer.ops:
        if op.role == "residual":
            ops += _wide_add(d)
        elif op.name == "attention.input":
            read, written = cast("attention.input", 3 * d, "none", back=True, saved=3.0 * d)
            ops += [replace(read, kernels=3.0, backward_kernels=3.0), written]
            ops.append(replace(op, name="attention.input.sum", dtype="float32", saved=Poly()))
        elif op.role == "input":
            ops += cast("mlp.input", d, "none", back=True, saved=d)
            ops.append(replace(op, name="mlp.input.moment", dtype="float32", saved=Poly()))
        else:
            ops.append(_wide_norm(op) if op.role == "norm" else op)
    return replace(layer, ops=tuple(replace(op, fused=None) for op in ops))


def _wide_norm(op: Op) -> Op:
    """With its mean and deviation of every row."""
    return replace(op, dtype="float32", saved=Poly(bs=op.saved.bs + 2.0))


def _wide_add(d: int) -> tuple[Op, Op]:
    """A 16-bit tensor added to the float32 stream, its gradient cast."""
    wide = memory("residual", 2.0 * d, 0.0, "sequence", role="residual", back=float(d), backward_kernels=1.0, wide=True)
    return wide, memory("residual.narrow", float(d), 0.0, "sequence", role="residual", back=float(d), kernels=0.0)


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
