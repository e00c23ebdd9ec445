"""What ViT, VGG and ResNet cost, from their dimensions alone. No torch.

A relu works in place: it keeps its output, which the next convolution reads. A batch norm keeps its input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from meshwright.core.profile import Layer, Op, Param, Poly, Profile, Site
from meshwright.models.cost_decoder import block_layer, plain_mlp
from meshwright.models.cost_ops import (
    NO_PIECES,
    NO_SEQUENCE,
    bias,
    cast,
    classifier,
    conv,
    kept,
    kept_once,
    linear_params,
    matmul,
    memory,
    norm_params,
    per_sample,
    relu,
    sample_profile,
    without_input_gradient,
)
from meshwright.models.dimensions import BottleneckShape, ConvShape, ResNetConfig, VGGConfig, ViTConfig


def vgg_kinds(config: VGGConfig) -> tuple[str, ...]:
    """The profile's layer of each block: equal neighbours are one."""
    kinds: list[str] = []
    for _, run in groupby(config.convs[1:]):
        kinds += [f"conv{len(kinds) + 1}"] * len(list(run))
    return (*kinds, "dense")


def resnet_kinds(config: ResNetConfig) -> tuple[str, ...]:
    return tuple(f"stage{size.stage + 1}{'_entry' * size.enters}" for size in config.bottlenecks)


def _runs(kinds: Iterable[str]) -> Iterable[tuple[str, int, int]]:
    """(kind, place of the first, how often) for every run of equals, in order."""
    place = 0
    for kind, run in groupby(kinds):
        count = len(list(run))
        yield kind, place, count
        place += count


def _pool(given: float, passed: float) -> tuple[Op, Op]:
    """Keeps the pooled image, and where each of its pixels came from (int64)."""
    moved, back = given + 5.0 * passed, 2.0 * given + 5.0 * passed
    pool = memory("pool", "pool", moved, back=back, saved=passed, kernels=(1, 1))
    return pool, kept("pool.places", "pool", 2.0 * passed, wide=True)


def _vgg_conv(size: ConvShape, name: str, repeat: int = 1, is_stem: bool = False) -> Layer:
    out = size.width * size.size * size.size
    passed = out // 4 if size.pools else out
    multiply = conv("conv", size.channels, size.width, 3, size.size, size.size)
    ops = [without_input_gradient(multiply) if is_stem else multiply, relu("relu", out, working=2.0 * out)]
    if is_stem:
        image = size.channels * size.size**2
        ops = [*cast("images", image, back=False, saved=image), *ops]
    if size.pools:
        ops += _pool(out, passed)
    weight = Param(name="weight", shape=(size.width, size.channels, 3, 3))
    return Layer(
        name=name,
        repeat=repeat,
        params=(weight, Param(name="bias", shape=(size.width,))),
        ops=tuple(ops),
        boundary=Poly(bs=passed),
        is_block=not is_stem,
    )


def vgg_profile(config: VGGConfig, name: str) -> Profile:
    flat, f = config.flat_size, config.fc_size
    up = linear_params("pair.up", f, flat, bias=True, split="columns", units=f)
    dense = Layer(
        name="dense",
        params=(*up, *linear_params("pair.down", f, f, bias=True, split="rows", units=f)),
        ops=(
            matmul("pair.up", f, flat),
            bias("pair.up.bias", f, "tensor"),
            relu("pair.relu", f, "tensor"),
            matmul("pair.down", f, f, cut_dim="k"),
            bias("pair.down.bias", f),
            relu("relu", f),
        ),
        sites=(Site(kind="enter", elements=Poly(bs=flat), after=0), Site(kind="exit", elements=Poly(bs=f))),
        boundary=Poly(bs=f),
        is_block=True,
    )
    stem, *rest = config.convs
    layers = [_vgg_conv(stem, "stem", is_stem=True)]
    for kind, place, repeat in _runs(vgg_kinds(config)):
        layers.append(dense if kind == "dense" else _vgg_conv(rest[place], kind, repeat))
    params = linear_params("", config.num_classes, f, bias=True)
    layers.append(Layer(name="head", params=params, ops=classifier(f, config.num_classes)))
    return sample_profile(name, map(per_sample, layers), f, {"sequence": NO_SEQUENCE, "loss": NO_PIECES})


def _batch_norm(name: str, width: int, size: int) -> tuple[tuple[Param, ...], tuple[Op, Op], Site]:
    n = width * size * size
    # Read for its statistics, then to be normed, which are remembered in a few steps of small vectors; going back it is
    # read with its gradient for sums, then for the input's gradient.
    once = (30.0 * width, 8.0 * width)
    op = memory(name, "norm", 3.0 * n, back=5.0 * n, saved=n, once=once, kernels=(8, 1))
    statistics = kept_once(f"{name}.statistics", "norm", 2.0 * width)
    return norm_params(name, width), (op, statistics), Site(kind="statistics", elements=Poly(one=2.0 * width))


def _normed_conv(
    name: str, channels: int, width: int, kernel: int, size_in: int, size_out: int
) -> tuple[tuple[Param, ...], tuple[Op, ...], Site]:
    """A convolution without bias, and its batch norm."""
    params, norm, site = _batch_norm(f"{name}_norm", width, size_out)
    weight = Param(name=f"{name}.weight", shape=(width, channels, kernel, kernel))
    return (weight, *params), (conv(name, channels, width, kernel, size_in, size_out), *norm), site


def _bottleneck(size: BottleneckShape, name: str, repeat: int) -> Layer:
    w, inner, outer = size.width, size.size**2, size.size_out**2
    pieces = [
        _normed_conv("narrow", size.channels, w, 1, size.size, size.size),
        _normed_conv("middle", w, w, 3, size.size, size.size_out),
        _normed_conv("wide", w, size.out, 1, size.size_out, size.size_out),
    ]
    relus = [w * inner, w * outer, size.out * outer]
    if size.enters:
        pieces.append(_normed_conv("shortcut", size.channels, size.out, 1, size.size, size.size_out))
        relus.append(0)
    ops: list[Op] = []
    for (_, some, _), size_kept in zip(pieces, relus, strict=True):
        ops += [*some, relu("relu", size_kept)] if size_kept else some
    added = 3.0 * size.out * outer
    ops.append(memory("residual", "residual", added, working=added))
    # Two read the block's input: their gradients are added.
    ops.append(memory("input", "input", back=3.0 * size.channels * inner, kernels=(0, 1)))
    return Layer(
        name=name,
        repeat=repeat,
        params=tuple(param for params, _, _ in pieces for param in params),
        ops=tuple(ops),
        sites=tuple(site for _, _, site in pieces),
        boundary=Poly(bs=size.out * outer),
        is_block=True,
    )


def resnet_profile(config: ResNetConfig, name: str) -> Profile:
    sizes, width, size = config.bottlenecks, config.stem_width, config.stem_size
    params, norm, site = _batch_norm("norm", width, size)
    out, passed = width * size * size, width * sizes[0].size ** 2
    image = config.channels * config.image_size**2
    stem = Layer(
        name="stem",
        params=(Param(name="conv.weight", shape=(width, config.channels, 7, 7)), *params),
        ops=(
            *cast("images", image, back=False, saved=image),
            without_input_gradient(conv("conv", config.channels, width, 7, config.image_size, size)),
            *norm,
            relu("relu", out, working=2.0 * out),
            *_pool(out, passed),
        ),
        sites=(site,),
        boundary=Poly(bs=passed),
    )
    blocks = [_bottleneck(sizes[place], kind, repeat) for kind, place, repeat in _runs(resnet_kinds(config))]
    last = sizes[-1]
    # Back: a gradient for every pixel, divided by their number.
    pixels = last.out * (last.size_out**2 + 1)
    pool = memory("pool", "pool", pixels, back=pixels, saved=last.out, kernels=(1, 1))
    params = linear_params("output", config.num_classes, last.out, bias=True)
    head = Layer(name="head", params=params, ops=(pool, *classifier(last.out, config.num_classes)))
    uncut = {
        "inside": "its convolutions are not cut.",
        "sequence": NO_SEQUENCE,
        "loss": NO_PIECES,
        "samples": "its batch norms see the whole batch: use microbatch = batch / replicas.",
    }
    return sample_profile(name, map(per_sample, (stem, *blocks, head)), last.out, uncut)


def _vit_block(config: ViTConfig) -> Layer:
    encoder, d = config.encoder, config.hidden_size
    layer = block_layer(encoder, "blocks", config.num_layers, plain_mlp(encoder), is_causal=False)
    # The stream between regions is of the parameters' dtype, under autocast too; each linear casts what it reads.
    ops: list[Op] = []
    for op in layer.ops:
        if op.role == "residual":  # a 16-bit tensor is added to the float32 stream, its gradient cast
            ops.append(memory("residual", "residual", 2.0 * d, back=d, kernels=(1, 1), cut="sequence", wide=True))
            ops.append(memory("residual.narrow", "residual", d, back=d, kernels=(0, 0), cut="sequence"))
        elif op.name == "attention.input":
            ops += cast("attention.input", 3 * d, back=True, saved=3.0 * d, kernels=3)
            ops.append(replace(op, name="attention.input.sum", dtype="float32", saved=Poly()))
        elif op.role == "input":
            ops += cast("mlp.input", d, back=True, saved=d)
            ops.append(replace(op, name="mlp.input.moment", dtype="float32", saved=Poly()))
        elif op.role == "norm":  # with its mean and deviation of every row
            ops.append(replace(op, dtype="float32", saved=Poly(bs=op.saved.bs + 2.0)))
        else:
            ops.append(op)
    return replace(layer, ops=tuple(replace(op, fused=None) for op in ops))


def vit_profile(config: ViTConfig, name: str) -> Profile:
    d, patch, size, tokens = config.hidden_size, config.patch_size, config.image_size, config.num_tokens
    image, passed = config.channels * size * size, tokens * d
    stem = Layer(
        name="stem",
        params=(
            Param(name="token", shape=(d,)),
            Param(name="positions", shape=(tokens, d)),
            Param(name="patches.weight", shape=(d, config.channels, patch, patch)),
            Param(name="patches.bias", shape=(d,)),
        ),
        ops=(
            *cast("images", image, back=False, saved=image),
            without_input_gradient(conv("patches", config.channels, d, patch, size, size // patch)),
            # The class token joins in, the stream becomes float32, positions are added.
            memory("joined", "embedding", 3.0 * passed, back=passed, kernels=(1, 1), working=passed),
            memory(
                "positions", "embedding", 3.0 * passed, back=2.0 * passed, once=(passed,) * 2, kernels=(2, 2), wide=True
            ),
        ),
        boundary=Poly(bs=passed),
    )
    kernels, once = (1, 1), (2.0 * d, 4.0 * d)
    norm = memory(
        "norm", "norm", 2.0 * d, back=5.0 * d, saved=d + 2.0, once=once, kernels=kernels, working=passed, wide=True
    )
    head = Layer(
        name="head",
        params=(*norm_params("norm", d), *linear_params("output", config.num_classes, d, bias=True)),
        ops=(
            # A copy of the class token; going back, a gradient of zeros for all others.
            memory("class", "layout", 2.0 * d, back=(tokens + 1.0) * d, kernels=(1, 1), wide=True),
            norm,
            *cast("output.input", d, back=True, saved=d),
            *classifier(d, config.num_classes),
        ),
    )
    odd = f"its {tokens} tokens, the class token among them, are not divided."
    layers = per_sample(stem), per_sample(_vit_block(config), tokens), per_sample(head)
    return sample_profile(name, layers, d, {"sequence": odd, "loss": NO_PIECES})
