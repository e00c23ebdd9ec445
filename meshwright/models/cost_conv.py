"""What VGG and ResNet cost, from their dimensions alone. No torch.

A relu works in place: it keeps its output, which the next convolution reads. A batch norm keeps its input.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from itertools import groupby

from meshwright.core.profile import Layer, Op, Param, Poly, Profile, Site
from meshwright.models.cost_ops import (
    NO_PIECES,
    NO_SEQUENCE,
    bias,
    cast,
    conv,
    cross_entropy,
    ends_here,
    kept,
    matmul,
    memory,
    once,
    per_sample,
    relu,
)
from meshwright.models.dimensions import BottleneckShape, ConvShape
from meshwright.models.presets import ResNetConfig, VGGConfig


def vgg_kinds(config: VGGConfig) -> tuple[str, ...]:
    """The profile's layer of each block: equal neighbours are one."""
    found: list[str] = []
    for _, run in groupby(config.convs[1:]):
        found += [f"conv{len(found) + 1}"] * len(list(run))
    return (*found, "dense")


def resnet_kinds(config: ResNetConfig) -> tuple[str, ...]:
    return tuple(f"stage{size.stage + 1}{'_entry' * size.enters}" for size in config.bottlenecks)


def _folded(kinds: Iterable[str]) -> Iterable[tuple[str, int]]:
    """(kind, how often) for every run of equals, in order."""
    for kind, run in groupby(kinds):
        yield kind, len(list(run))


def _vgg_conv(size: ConvShape, name: str, repeat: int = 1, is_stem: bool = False) -> Layer:
    out = size.width * size.size * size.size
    passed = out // 4 if size.pools else out
    multiply = conv("conv", size.channels, size.width, 3, size.size, size.size)
    ops = [ends_here(multiply) if is_stem else multiply, relu("relu", out, "none", working=2.0 * out)]
    if is_stem:
        image = size.channels * size.size**2
        ops = [*cast("images", image, "none", back=False, saved=image), *ops]
    if size.pools:
        ops += _pool(out, passed)
    return Layer(
        name=name,
        repeat=repeat,
        params=(
            Param(name="weight", shape=(size.width, size.channels, 3, 3)),
            Param(name="bias", shape=(size.width,)),
        ),
        ops=tuple(ops),
        boundary=Poly(bs=passed),
        is_block=not is_stem,
    )


def _pool(given: float, passed: float) -> tuple[Op, Op]:
    """Keeps the pooled image, and where each of its pixels came from (int64)."""
    back = 2.0 * given + 5.0 * passed
    return (
        memory("pool", given + 5.0 * passed, passed, "none", role="pool", back=back, backward_kernels=1.0),
        kept("pool.places", 2.0 * passed, role="pool", wide=True),
    )


def _vgg_dense(config: VGGConfig) -> Layer:
    flat, f = config.flat_size, config.fc_size
    return Layer(
        name="dense",
        params=(
            Param(name="pair.up.weight", shape=(f, flat), cut=0, units=f),
            Param(name="pair.up.bias", shape=(f,), cut=0, units=f),
            Param(name="pair.down.weight", shape=(f, f), cut=1, units=f),
            Param(name="pair.down.bias", shape=(f,)),
        ),
        ops=(
            matmul("pair.up", f, flat),
            bias("pair.up.bias", f, "tensor"),
            relu("pair.relu", f, "tensor"),
            matmul("pair.down", f, f, cut_dim="k"),
            bias("pair.down.bias", f, "none"),
            relu("relu", f, "none"),
        ),
        sites=(Site(kind="enter", elements=Poly(bs=flat), after=0), Site(kind="exit", elements=Poly(bs=f))),
        boundary=Poly(bs=f),
        is_block=True,
    )


def _classifier(num_in: int, num_classes: int, prefix: str = "") -> tuple[tuple[Param, ...], tuple[Op, ...]]:
    params = (
        Param(name=f"{prefix}weight", shape=(num_classes, num_in)),
        Param(name=f"{prefix}bias", shape=(num_classes,)),
    )
    output = replace(matmul("output", num_classes, num_in), cut="none")
    return params, (output, bias("output.bias", num_classes, "none"), *cross_entropy(num_classes))


def vgg_profile(config: VGGConfig, name: str) -> Profile:
    stem, *rest = config.convs
    layers, place = [_vgg_conv(stem, "stem", is_stem=True)], 0
    for kind, repeat in _folded(vgg_kinds(config)):
        layers.append(_vgg_dense(config) if kind == "dense" else _vgg_conv(rest[place], kind, repeat))
        place += repeat
    params, ops = _classifier(config.fc_size, config.num_classes)
    layers.append(Layer(name="head", params=params, ops=ops))
    return Profile(
        name=name,
        layers=tuple(map(per_sample, layers)),
        hidden_size=config.fc_size,
        max_sequence=1,
        counts="samples",
        stream="parameters",
        uncut={"sequence": NO_SEQUENCE, "loss": NO_PIECES},
    )


def _norm(name: str, width: int, size: int) -> tuple[tuple[Param, ...], tuple[Op, Op], Site]:
    elements = width * size * size
    params = (Param(name=f"{name}.weight", shape=(width,)), Param(name=f"{name}.bias", shape=(width,)))
    # Read for its statistics, then to be normed, which are remembered in a few steps of small vectors; going back it is
    # read with its gradient for sums, then for the input's gradient.
    op = memory(name, 3.0 * elements, 0.0, "none", role="norm", back=5.0 * elements, kernels=8.0, backward_kernels=1.0)
    op = replace(once(op, 30.0 * width, 8.0 * width), saved=Poly(bs=elements))
    statistics = replace(kept(f"{name}.statistics", 0.0, role="norm", wide=True), saved=Poly(one=2.0 * width))
    return params, (op, statistics), Site(kind="statistics", elements=Poly(one=2.0 * width))


def _normed(
    name: str, channels: int, width: int, kernel: int, size_in: int, size_out: int
) -> tuple[tuple[Param, ...], tuple[Op, ...], Site]:
    """A convolution without bias, and its batch norm."""
    params, norm, site = _norm(f"{name}_norm", width, size_out)
    weight = Param(name=f"{name}.weight", shape=(width, channels, kernel, kernel))
    return (weight, *params), (conv(name, channels, width, kernel, size_in, size_out), *norm), site


def _bottleneck(size: BottleneckShape, name: str, repeat: int) -> Layer:
    w, inner, outer = size.width, size.size**2, size.size_out**2
    pieces = [
        _normed("narrow", size.channels, w, 1, size.size, size.size),
        _normed("middle", w, w, 3, size.size, size.size_out),
        _normed("wide", w, size.out, 1, size.size_out, size.size_out),
    ]
    relus = [w * inner, w * outer, size.out * outer]
    if size.enters:
        pieces.append(_normed("shortcut", size.channels, size.out, 1, size.size, size.size_out))
        relus.append(0)
    ops: list[Op] = []
    for (_, some, _), size_kept in zip(pieces, relus, strict=True):
        ops += [*some, relu("relu", size_kept, "none")] if size_kept else some
    return Layer(
        name=name,
        repeat=repeat,
        params=tuple(param for params, _, _ in pieces for param in params),
        ops=(
            *ops,
            memory("residual", 3.0 * size.out * outer, 0.0, "none", role="residual", working=3.0 * size.out * outer),
            # Two read the block's input: their gradients are added.
            memory(
                "input",
                0.0,
                0.0,
                "none",
                role="input",
                back=3.0 * size.channels * inner,
                kernels=0.0,
                backward_kernels=1.0,
            ),
        ),
        sites=tuple(site for _, _, site in pieces),
        boundary=Poly(bs=size.out * outer),
        is_block=True,
    )


def _resnet_stem(config: ResNetConfig) -> Layer:
    width, size, pooled = config.stem_width, config.stem_size, config.bottlenecks[0].size
    params, norm, site = _norm("norm", width, size)
    out, passed = width * size * size, width * pooled * pooled
    image = config.channels * config.image_size**2
    weight = Param(name="conv.weight", shape=(width, config.channels, 7, 7))
    return Layer(
        name="stem",
        params=(weight, *params),
        ops=(
            *cast("images", image, "none", back=False, saved=image),
            ends_here(conv("conv", config.channels, width, 7, config.image_size, size)),
            *norm,
            relu("relu", out, "none", working=2.0 * out),
            *_pool(out, passed),
        ),
        sites=(site,),
        boundary=Poly(bs=passed),
    )


def resnet_profile(config: ResNetConfig, name: str) -> Profile:
    sizes, layers, place = config.bottlenecks, [_resnet_stem(config)], 0
    for kind, repeat in _folded(resnet_kinds(config)):
        layers.append(_bottleneck(sizes[place], kind, repeat))
        place += repeat
    last = sizes[-1]
    params, ops = _classifier(last.out, config.num_classes, "output.")
    # Back: a gradient for every pixel, divided by their number.
    pixels = last.out * last.size_out**2
    pool = memory(
        "pool", pixels + last.out, last.out, "none", role="pool", back=pixels + last.out, backward_kernels=1.0
    )
    layers.append(Layer(name="head", params=params, ops=(pool, *ops)))
    return Profile(
        name=name,
        layers=tuple(map(per_sample, layers)),
        hidden_size=last.out,
        max_sequence=1,
        counts="samples",
        stream="parameters",
        uncut={
            "inside": "its convolutions are not cut.",
            "sequence": NO_SEQUENCE,
            "loss": NO_PIECES,
            "samples": "its batch norms see the whole batch: use microbatch = batch / replicas.",
        },
    )
