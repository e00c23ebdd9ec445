"""The ops that costs of models are written in."""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.profile import Cut, CutDim, Layer, Op, Poly


def matmul(name: str, n: int, k: int, *, rows: float = 1.0, matrices: int = 1, cut_dim: CutDim = "n") -> Op:
    """y = x W: the backward is two more of the same size. Who produces x keeps it.

    `rows` of x for each token, each times one of `matrices`.
    """
    weights = matrices * n * k
    return Op(
        name=name,
        kind="matmul",
        flops=Poly(bs=2.0 * rows * n * k),
        backward_flops=Poly(bs=4.0 * rows * n * k),
        moved=Poly(one=weights, bs=rows * (n + k)),
        backward_moved=Poly(one=2 * weights, bs=2 * rows * (n + k)),
        cut="tensor",
        shape=(n, k),
        matrices=Poly(one=matrices),
        cut_dim=cut_dim,
        backward_kernels=2.0,
    )


def memory(
    name: str,
    moved: float,
    saved: float,
    cut: Cut,
    working: float = 0.0,
    *,
    kernels: float = 1.0,
    backward_kernels: float = 1.0,
) -> Op:
    return Op(
        name=name,
        kind="memory",
        moved=Poly(bs=moved),
        backward_moved=Poly(bs=1.5 * moved),
        saved=Poly(bs=saved),
        working=Poly(bs=working),
        cut=cut,
        kernels=kernels,
        backward_kernels=backward_kernels,
    )


def per_sample(layer: Layer, tokens: int = 1) -> Layer:
    """The layer of a model whose samples are all `tokens` long: nothing depends on a sequence."""

    def fixed(poly: Poly) -> Poly:
        return Poly(one=poly.one, b=poly.b + tokens * poly.bs + tokens * tokens * poly.bss)

    ops = tuple(
        replace(
            op,
            flops=fixed(op.flops),
            backward_flops=fixed(op.backward_flops),
            moved=fixed(op.moved),
            backward_moved=fixed(op.backward_moved),
            saved=fixed(op.saved),
            working=fixed(op.working),
            matrices=fixed(op.matrices),
        )
        for op in layer.ops
    )
    sites = tuple(replace(site, elements=fixed(site.elements)) for site in layer.sites)
    return replace(layer, ops=ops, sites=sites, boundary=fixed(layer.boundary))


def ends_here(op: Op) -> Op:
    """A matmul of something that has no gradient: only its weight's is computed."""
    half = {name: getattr(op.backward_flops, name) / 2 for name in ("one", "b", "bs", "bss")}
    return replace(op, backward_flops=Poly(**half), backward_kernels=op.backward_kernels / 2)


def conv(name: str, channels: int, width: int, kernel: int, size_in: int, size_out: int) -> Op:
    """A convolution of squares, as the matmul it is."""
    op = matmul(name, width, channels * kernel * kernel, rows=size_out * size_out)
    weights, passed = op.moved.one, channels * size_in * size_in + width * size_out * size_out
    return replace(
        op, cut="none", moved=Poly(one=weights, bs=passed), backward_moved=Poly(one=2 * weights, bs=2 * passed)
    )


def class_loss(num_classes: int) -> Op:
    return Op(
        name="cross_entropy",
        kind="loss",
        moved=Poly(bs=4.0 * num_classes),
        backward_moved=Poly(bs=3.0 * num_classes),
        saved=Poly(bs=float(num_classes)),
        working=Poly(bs=float(num_classes)),
        dtype="float32",
    )


NO_PIECES = "a sample has one loss, no vocabulary for every token."
NO_SEQUENCE = "its samples have no sequence."
