"""What models without a sequence cost, from their dimensions alone: ViT, VGG, ResNet and DLRM. No torch.

A relu works in place: it keeps its output, which the next convolution reads. A batch norm keeps its input.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import fields, replace
from itertools import groupby, pairwise
from typing import Any

from meshwright.core.profile import Cut, FusedCost, Layer, Op, Param, Poly, Profile, Role, Site
from meshwright.models.cost_decoder import (
    bias,
    block_layer,
    kept,
    linear_params,
    matmul,
    memory,
    norm_params,
    plain_mlp,
)
from meshwright.models.dimensions import BottleneckShape, ConvShape, DLRMConfig, ResNetConfig, VGGConfig, ViTConfig

NO_PIECES = "a sample has one loss, no vocabulary for every token."
NO_SEQUENCE = "its samples have no sequence."


def kept_once(name: str, role: Role, elements: float) -> Op:
    """In float32, however many samples there are."""
    return replace(kept(name, role, 0.0, wide=True), saved=Poly(one=elements))


JOINED = (0.0, 0.0, 0.0, 0.0)
"""Cost, where compiled, of an op that becomes part of the kernels before and after it."""


def relu(name: str, n: float, cut: Cut = "none", working: float = 0.0) -> Op:
    """In place: keeps its output."""
    more: dict[str, Any] = {"kernels": (1, 1), "cut": cut, "working": working, "fused": JOINED}
    return memory(name, "activation", 2.0 * n, back=3.0 * n, saved=n, **more)


def cast(name: str, n: float, *, back: bool, saved: float = 0.0, kernels: int = 1) -> tuple[Op, Op]:
    """Under autocast, of a float32 tensor that a product reads: what is read, and what is written (and kept)."""
    both = n if back else 0.0
    read = memory(name, "cast", n, back=both, kernels=(kernels, kernels * back), wide=True, fused=JOINED)
    return read, memory(f"{name}.narrow", "cast", n, back=both, saved=saved, kernels=(0, 0), fused=JOINED)


def per_sample(value: Any, tokens: int = 1) -> Any:
    """A layer, or what it is made of, where samples are all `tokens` long: nothing depends on a sequence."""
    if isinstance(value, Poly):
        return Poly(one=value.one, b=value.b + tokens * value.bs + tokens * tokens * value.bss)
    if isinstance(value, tuple):
        return tuple(per_sample(each, tokens) for each in value)
    if isinstance(value, Op):
        value = replace(value, shape=tuple(size or tokens for size in value.shape))
    if not isinstance(value, Layer | Op | FusedCost | Site):
        return value
    return replace(value, **{field.name: per_sample(getattr(value, field.name), tokens) for field in fields(value)})


def sample_profile(name: str, layers: Iterable[Layer], hidden_size: int, uncut: dict[str, str]) -> Profile:
    """Profile of a model whose samples have no sequence."""
    about: dict[str, Any] = {"max_sequence": 1, "counts": "samples", "stream": "parameters"}
    layers = tuple(map(per_sample, layers))
    return Profile(name=name, layers=layers, hidden_size=hidden_size, uncut=uncut, **about)


def conv(name: str, channels: int, width: int, kernel: int, size_in: int, size_out: int, back: int = 2) -> Op:
    """A convolution of squares, as the matmul it is."""
    inputs, rows = channels * kernel * kernel, size_out * size_out
    passed = channels * size_in * size_in + width * rows
    return matmul(name, width, inputs, rows=rows, passed=passed, back=back, role="convolution", cut="none")


def classifier(num_in: int, num_classes: int) -> tuple[Op, ...]:
    """A linear with a bias, and the loss of its scores, which stay as they are and are kept: their gradient is another
    tensor."""
    v = num_classes
    return (
        matmul("output", v, num_in, cut="none"),
        bias("output.bias", v),
        memory("cross_entropy", "loss", v, back=2.0 * v, saved=v, kernels=(2, 1), kind="loss"),
        memory("scores", "loss", working=v, kernels=(0, 0), kind="loss"),
        # Losses times weights, summed; targets are int64.
        memory("weighing", "loss", 10.0, back=6.0, saved=4.0, kernels=(2, 1), wide=True),
    )


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
    multiply = conv("conv", size.channels, size.width, 3, size.size, size.size, back=1 if is_stem else 2)
    ops = [multiply, relu("relu", out, working=2.0 * out)]
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
    return sample_profile(name, layers, f, {"sequence": NO_SEQUENCE, "loss": NO_PIECES})


def _batch_norm(name: str, width: int, size: int) -> tuple[tuple[Param, ...], tuple[Op, Op], Site]:
    n = width * size * size
    # Read for its statistics, then to be normed, which are remembered in a few steps of small vectors; going back it is
    # read with its gradient for sums, then for the input's gradient.
    once = (26.0 * width, 8.0 * width)
    fused = (3.0 * n, 5.0 * n, 3.0, 2.0)
    op = memory(name, "norm", 3.0 * n, back=5.0 * n, saved=n, once=once, kernels=(7, 1), fused=fused)
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
    ops.append(memory("residual", "residual", added, working=added, fused=(added / 1.5, 0.0, 0.0, 0.0)))
    # Two read the block's input: their gradients are added.
    entered = size.channels * inner
    ops.append(memory("input", "input", back=3.0 * entered, kernels=(0, 1), fused=(0.0, 2.0 * entered, 0.0, 0.0)))
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
            conv("conv", config.channels, width, 7, config.image_size, size, back=1),
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
    return sample_profile(name, (stem, *blocks, head), last.out, uncut)


def _vit_block(config: ViTConfig) -> Layer:
    encoder, d = config.encoder, config.hidden_size
    layer = block_layer(encoder, "blocks", config.num_layers, plain_mlp(encoder), is_causal=False)
    # The stream between regions is of the parameters' dtype, under autocast too; each linear casts what it reads. What
    # is compiled of it: a norm reads the stream and writes 16 bits, and going back adds to the stream's gradient.
    ops: list[Op] = []
    for op in layer.ops:
        if op.role == "residual":  # a 16-bit tensor is added to the float32 stream, its gradient cast
            common: dict[str, Any] = {"back": d, "cut": "sequence"}
            stream, narrow = (2.0 * d, 0.0, 1.0, 0.0), (d, d, 0.0, 0.0)
            ops.append(memory("residual", "residual", 2.0 * d, kernels=(1, 1), wide=True, fused=stream, **common))
            ops.append(memory("residual.narrow", "residual", d, kernels=(0, 0), fused=narrow, **common))
        elif op.name == "attention.input":
            read, written = cast("attention.input", 3 * d, back=True, saved=3.0 * d, kernels=3)
            ops += [read, replace(written, fused=FusedCost(saved=Poly(bs=float(d))))]  # one copy for all three
            fused = FusedCost(backward_moved=Poly(bs=1.5 * d))
            ops.append(replace(op, name="attention.input.sum", dtype="float32", saved=Poly(), fused=fused))
        elif op.role == "input":
            ops += cast("mlp.input", d, back=True, saved=d)
            ops.append(replace(op, name="mlp.input.moment", dtype="float32", saved=Poly(), fused=FusedCost()))
        elif op.role == "norm":  # with its mean and deviation of every row
            saved, moved = Poly(bs=op.saved.bs + 2.0), {"moved": Poly(bs=1.5 * d), "backward_moved": Poly(bs=4.5 * d)}
            fused = FusedCost(**moved, saved=saved, kernels=1, backward_kernels=2)
            ops.append(replace(op, dtype="float32", saved=saved, fused=fused))
        else:
            ops.append(op)
    return replace(layer, ops=tuple(ops))


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
            conv("patches", config.channels, d, patch, size, size // patch, back=1),
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
    layers = stem, per_sample(_vit_block(config), tokens), head
    return sample_profile(name, layers, d, {"sequence": odd, "loss": NO_PIECES})


def _mlp(sizes: Sequence[int], back: int = 2) -> tuple[tuple[Param, ...], list[Op]]:
    """`back`: products that the first linear makes going back."""
    params: list[Param] = []
    ops: list[Op] = []
    for place, (k, n) in enumerate(pairwise(sizes)):
        params += linear_params(f"layers.{place}", n, k, bias=True)
        ops.append(matmul(f"layers.{place}", n, k, cut="none", back=2 if place else back))
        ops += [bias(f"layers.{place}.bias", n), relu(f"relu.{place}", n)]
    return tuple(params), ops


def _tables(config: DLRMConfig) -> Layer:
    d, count = config.embedding_size, len(config.tables)
    vectors = config.num_vectors * d
    # Tables are float32, and so are their vectors until they are cast; dense gradients of all tables are written.
    moved, back, gradients = 2.0 * count * d + 2.0 * count, count * d + 2.0 * count, (0, sum(config.tables) * d)
    kernels = (count, count)
    ops = (
        memory("lookup", "embedding", moved, back=back, once=gradients, kernels=kernels, wide=True, kind="gather"),
        *cast("vectors", count * d, back=True, kernels=count),
        # Put side by side; going back, the dense vector's two gradients are added.
        memory("stack", "layout", 2.0 * vectors, back=3.0 * d, kernels=(1, 1)),
        kept("ids", "embedding", 2.0 * count, wide=True),
    )
    params = tuple(
        Param(name=f"tables.{i}.weight", shape=(rows, d), shared_out="rows") for i, rows in enumerate(config.tables)
    )
    return Layer(name="tables", params=params, ops=ops, boundary=Poly(bs=vectors))


def _top(config: DLRMConfig) -> Layer:
    d, count, features = config.embedding_size, config.num_vectors, config.num_features
    params, mlp = _mlp((features, *config.top, 1))
    chosen, square = count * (count - 1) / 2.0, count * count
    back, places = square * 2.0 + chosen, 8.0 * chosen
    # A product of every sample's vectors with themselves: there is no weight.
    passed = 2 * count * d + square
    pairs = matmul("pairs", count, d, rows=count, matrices=0, passed=passed, cut="none", role="matmul")
    pairs = replace(pairs, matrices=Poly(bs=1.0), saved=Poly(bs=count * d), working=Poly(bs=square))
    ops = (
        pairs,
        memory("vectors", "input", back=3.0 * count * d, kernels=(0, 1)),
        memory("chosen", "layout", 2.0 * chosen, back=back, once=(places, places), kernels=(1, 1), kind="gather"),
        memory("features", "layout", 2.0 * features, back=square, saved=features, once=(places, 0), kernels=(2, 1)),
        kept_once("pairs.places", "layout", 4.0 * chosen),  # two int64
        # The last linear has no relu: its one logit goes to the loss.
        *mlp[:-1],
        memory("cross_entropy", "loss", 3.0, back=8.0, saved=2.0, kernels=(1, 3), wide=True, kind="loss"),
        memory("weighing", "loss", 8.5, back=3.5, saved=1.0, kernels=(4, 2), wide=True),
    )
    return Layer(name="top", params=params, ops=ops)


def dlrm_profile(config: DLRMConfig, name: str) -> Profile:
    params, ops = _mlp((config.num_dense, *config.bottom, config.embedding_size), back=1)
    features = cast("features", config.num_dense, back=False, saved=config.num_dense)
    bottom = Layer(name="bottom", params=params, ops=(*features, *ops), boundary=Poly(bs=config.embedding_size))
    uncut = {
        "inside": "its linears are small; its tables can be shared out by rows.",
        "sequence": NO_SEQUENCE,
        "stages": "its features and tables meet in one product: there are no blocks in a row.",
        "loss": NO_PIECES,
    }
    return sample_profile(name, (bottom, _tables(config), _top(config)), config.embedding_size, uncut)
