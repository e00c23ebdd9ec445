"""What a recommendation model costs, from its dimensions alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

from meshwright.core.profile import Layer, Op, Param, Poly, Profile
from meshwright.models.config import DLRMConfig
from meshwright.models.cost_ops import NO_PIECES, NO_SEQUENCE, ends_here, matmul, memory, per_sample


def _mlp(sizes: Sequence[int]) -> tuple[list[Param], list[Op]]:
    params: list[Param] = []
    ops: list[Op] = []
    for place, (k, n) in enumerate(pairwise(sizes)):
        params.append(Param(name=f"layers.{place}.weight", shape=(n, k)))
        params.append(Param(name=f"layers.{place}.bias", shape=(n,)))
        ops.append(replace(matmul(f"layers.{place}", n, k), cut="none"))
        ops.append(memory(f"relu.{place}", 2.0 * n, n, "none"))
    return params, ops


def _bottom(config: DLRMConfig) -> Layer:
    params, ops = _mlp((config.num_dense, *config.bottom, config.embedding_size))
    ops[0] = ends_here(ops[0])
    features = Op(name="features", kind="memory", saved=Poly(bs=config.num_dense))
    boundary = Poly(bs=config.embedding_size)
    return Layer(name="bottom", params=tuple(params), ops=(features, *ops), boundary=boundary)


def _tables(config: DLRMConfig) -> Layer:
    d, count = config.embedding_size, len(config.tables)
    vectors = config.num_vectors * d
    lookup = Op(
        name="lookup",
        kind="gather",
        moved=Poly(bs=4.0 * vectors),
        # dense gradients of all tables are written and added
        backward_moved=Poly(one=3.0 * sum(config.tables) * d, bs=3.0 * vectors),
        saved=Poly(bs=2.0 * count),  # ids are int64
    )
    params = tuple(
        Param(name=f"tables.{i}.weight", shape=(rows, d), shared_out="rows") for i, rows in enumerate(config.tables)
    )
    return Layer(name="tables", params=params, ops=(lookup,), boundary=Poly(bs=vectors))


def _top(config: DLRMConfig) -> Layer:
    d, count, features = config.embedding_size, config.num_vectors, config.num_features
    params, ops = _mlp((features, *config.top, 1))
    pairs = Op(
        name="pairs",
        kind="matmul",
        flops=Poly(bs=2.0 * count * count * d),
        backward_flops=Poly(bs=4.0 * count * count * d),
        moved=Poly(bs=2.0 * count * d + count * count),
        backward_moved=Poly(bs=4.0 * count * d + 2.0 * count * count),
        saved=Poly(bs=count * d),
        working=Poly(bs=count * count),
    )
    # The last linear has no relu: its one logit goes to the loss.
    loss = replace(memory("cross_entropy", 4.0, 2.0, "none"), kind="loss", dtype="float32")
    chosen = Op(
        name="features",
        kind="gather",
        moved=Poly(bs=2.0 * features),
        backward_moved=Poly(bs=3.0 * features),
        saved=Poly(one=4.0 * (features - d), bs=features),  # where each pair stands, two int64
    )
    return Layer(name="top", params=tuple(params), ops=(pairs, chosen, *ops[:-1], loss))


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
