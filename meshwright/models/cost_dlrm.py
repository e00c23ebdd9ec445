"""What a recommendation model costs, from its dimensions alone. No torch."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

from meshwright.core.profile import Layer, Op, Param, Poly, Profile
from meshwright.models.cost_ops import (
    NO_PIECES,
    NO_SEQUENCE,
    bias,
    cast,
    kept,
    kept_once,
    linear_params,
    matmul,
    memory,
    per_sample,
    relu,
    sample_profile,
    without_input_gradient,
)
from meshwright.models.dimensions import DLRMConfig


def _mlp(sizes: Sequence[int]) -> tuple[tuple[Param, ...], list[Op]]:
    params: list[Param] = []
    ops: list[Op] = []
    for place, (k, n) in enumerate(pairwise(sizes)):
        params += linear_params(f"layers.{place}", n, k, bias=True)
        ops.append(matmul(f"layers.{place}", n, k, cut="none"))
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
    chosen = count * (count - 1) / 2.0
    back, places, square = count * count * 2.0 + chosen, 8.0 * chosen, float(count * count)
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
    params, (first, *ops) = _mlp((config.num_dense, *config.bottom, config.embedding_size))
    features = cast("features", config.num_dense, back=False, saved=config.num_dense)
    bottom = Layer(
        name="bottom",
        params=params,
        ops=(*features, without_input_gradient(first), *ops),
        boundary=Poly(bs=config.embedding_size),
    )
    uncut = {
        "inside": "its linears are small; its tables can be shared out by rows.",
        "sequence": NO_SEQUENCE,
        "stages": "its features and tables meet in one product: there are no blocks in a row.",
        "loss": NO_PIECES,
    }
    layers = map(per_sample, (bottom, _tables(config), _top(config)))
    return sample_profile(name, layers, config.embedding_size, uncut)
