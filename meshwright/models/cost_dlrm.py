"""What a recommendation model costs, from its dimensions alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.core.profile import Layer, Op, Param, Poly, Profile
from meshwright.models.cost_ops import (
    NO_PIECES,
    NO_SEQUENCE,
    bias,
    cast,
    ends_here,
    gather,
    kept,
    matmul,
    memory,
    once,
    per_sample,
    relu,
)
from meshwright.models.presets import DLRMConfig


def _mlp(sizes: Sequence[int]) -> tuple[list[Param], list[Op]]:
    params: list[Param] = []
    ops: list[Op] = []
    for place, (k, n) in enumerate(pairwise(sizes)):
        params.append(Param(name=f"layers.{place}.weight", shape=(n, k)))
        params.append(Param(name=f"layers.{place}.bias", shape=(n,)))
        ops.append(replace(matmul(f"layers.{place}", n, k), cut="none"))
        ops.append(bias(f"layers.{place}.bias", n, "none"))
        ops.append(relu(f"relu.{place}", n, "none"))
    return params, ops


def _bottom(config: DLRMConfig) -> Layer:
    params, ops = _mlp((config.num_dense, *config.bottom, config.embedding_size))
    ops[0] = ends_here(ops[0])
    features = cast("features", config.num_dense, "none", back=False, saved=config.num_dense)
    boundary = Poly(bs=config.embedding_size)
    return Layer(name="bottom", params=tuple(params), ops=(*features, *ops), boundary=boundary)


def _tables(config: DLRMConfig) -> Layer:
    d, count = config.embedding_size, len(config.tables)
    vectors = config.num_vectors * d
    # Tables are float32, and so are their vectors until they are cast; dense gradients of all tables are written.
    lookup = replace(gather("lookup", 2.0 * count * d + 2.0 * count, 0.0, "none", count, count), dtype="float32")
    lookup = replace(lookup, backward_moved=Poly(one=sum(config.tables) * d, bs=count * d + 2.0 * count))
    read, written = cast("vectors", count * d, "none", back=True)
    read = replace(read, kernels=count, backward_kernels=count)
    # Put side by side; going back, the dense vector's two gradients are added.
    stack = memory("stack", 2.0 * vectors, 0.0, "none", role="layout", back=3.0 * d, backward_kernels=1.0)
    ops = (lookup, read, written, stack, kept("ids", 2.0 * count, role="embedding", wide=True))
    params = tuple(
        Param(name=f"tables.{i}.weight", shape=(rows, d), shared_out="rows") for i, rows in enumerate(config.tables)
    )
    return Layer(name="tables", params=params, ops=ops, boundary=Poly(bs=vectors))


def _top(config: DLRMConfig) -> Layer:
    d, count, features = config.embedding_size, config.num_vectors, config.num_features
    params, ops = _mlp((features, *config.top, 1))
    pairs = Op(
        name="pairs",
        kind="matmul",
        role="matmul",
        flops=Poly(bs=2.0 * count * count * d),
        backward_flops=Poly(bs=4.0 * count * count * d),
        moved=Poly(bs=2.0 * count * d + count * count),
        backward_moved=Poly(bs=4.0 * count * d + 2.0 * count * count),
        saved=Poly(bs=count * d),
        working=Poly(bs=count * count),
        shape=(count, d),
        matrices=Poly(bs=1.0),
        backward_kernels=2.0,
    )
    pair_sum = memory(
        "vectors", 0.0, 0.0, "none", role="input", back=3.0 * count * d, kernels=0.0, backward_kernels=1.0
    )
    # The last linear has no relu: its one logit goes to the loss.
    loss = memory("cross_entropy", 3.0, 2.0, "none", role="loss", back=8.0, backward_kernels=3.0, wide=True)
    weighing = memory("weighing", 8.5, 1.0, "none", role="loss", back=3.5, kernels=4.0, backward_kernels=2.0, wide=True)
    chosen = count * (count - 1) / 2.0
    ops[-1:] = [replace(loss, kind="loss"), weighing]
    choose = gather("chosen", 2.0 * chosen, count * count * 2.0 + chosen, "none", 1.0, 1.0, role="layout")
    choose = once(choose, 8.0 * chosen, 8.0 * chosen)
    features_ = memory(
        "features", 2.0 * features, features, "none", role="layout", back=float(count * count), kernels=2.0
    )
    where = replace(kept("pairs.places", 0.0, role="layout", wide=True), saved=Poly(one=4.0 * chosen))  # two int64
    features_ = once(replace(features_, backward_kernels=1.0), 8.0 * chosen, 0.0)
    pairs_ = (pairs, pair_sum, choose, features_, where)
    return Layer(name="top", params=tuple(params), ops=(*pairs_, *ops))


def dlrm_profile(config: DLRMConfig, name: str) -> Profile:
    return Profile(
        name=name,
        layers=tuple(map(per_sample, (_bottom(config), _tables(config), _top(config)))),
        hidden_size=config.embedding_size,
        max_sequence=1,
        counts="samples",
        stream="parameters",
        uncut={
            "inside": "its linears are small; its tables can be shared out by rows.",
            "sequence": NO_SEQUENCE,
            "stages": "its features and tables meet in one product: there are no blocks in a row.",
            "loss": NO_PIECES,
        },
    )
