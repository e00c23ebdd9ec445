"""The ops that costs of models are written in."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from meshwright.core.profile import Cut, CutDim, FusedCost, Layer, Op, Param, Poly, Role

Mlp = tuple[tuple[Param, ...], tuple[Op, ...]]


def matmul(
    name: str, n: int, k: int, *, rows: float = 1.0, matrices: int = 1, cut_dim: CutDim = "n", role: Role = "linear"
) -> Op:
    """y = x W: the backward is two more of the same size. Who produces x keeps it.

    `rows` of x for each token, each times one of `matrices`.
    """
    weights = matrices * n * k
    return Op(
        name=name,
        kind="matmul",
        role=role,
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
    *,
    role: Role = "",
    back: float = 0.0,
    kernels: float = 1.0,
    backward_kernels: float = 0.0,
    working: float = 0.0,
    wide: bool = False,
    fused: tuple[float, float, float, float] | None = None,
) -> Op:
    """Elements moved going forward and `back`. `wide`: in float32 whatever is computed in.

    `fused`: moved, moved going back, kernels and kernels going back where its layer is compiled; None: as it is.
    """
    op = Op(
        name=name,
        kind="memory",
        role=role,
        moved=Poly(bs=moved),
        backward_moved=Poly(bs=back),
        saved=Poly(bs=saved),
        working=Poly(bs=working),
        dtype="float32" if wide else "compute",
        cut=cut,
        kernels=kernels,
        backward_kernels=backward_kernels,
    )
    if fused is None:
        return op
    left = FusedCost(
        moved=Poly(bs=fused[0]),
        backward_moved=Poly(bs=fused[1]),
        saved=Poly(bs=saved),
        kernels=fused[2],
        backward_kernels=fused[3],
    )
    return replace(op, fused=left)


def once(op: Op, moved: float, back: float) -> Op:
    """Elements moved however many samples there are: weights, their gradients, numbers of places."""
    return replace(
        op,
        moved=replace(op.moved, one=op.moved.one + moved),
        backward_moved=replace(op.backward_moved, one=op.backward_moved.one + back),
    )


def gather(
    name: str, moved: float, back: float, cut: Cut, kernels: float, backward_kernels: float, role: Role = "embedding"
) -> Op:
    op = memory(name, moved, 0.0, cut, role=role, back=back, kernels=kernels, backward_kernels=backward_kernels)
    return replace(op, kind="gather")


def with_role(role: Role, ops: Iterable[Op]) -> list[Op]:
    return [replace(op, role=role) for op in ops]


def kept(name: str, elements: float, cut: Cut = "none", *, role: Role = "", wide: bool = False) -> Op:
    """Only keeps something: what somebody else reads or writes."""
    return memory(name, 0.0, elements, cut, role=role, kernels=0.0, wide=wide)


def bias(name: str, n: float, cut: Cut, count: int = 1) -> Op:
    """Its gradient is a sum over rows, a kernel by itself; forward it is part of the product."""
    return once(memory(name, 0.0, 0.0, cut, role="bias", back=n, kernels=0.0, backward_kernels=count), 0.0, n)


def relu(name: str, n: float, cut: Cut, working: float = 0.0) -> Op:
    """In place: keeps its output."""
    return memory(name, 2.0 * n, n, cut, role="activation", back=3.0 * n, backward_kernels=1.0, working=working)


def cast(name: str, n: float, cut: Cut, *, back: bool, saved: float = 0.0) -> tuple[Op, Op]:
    """Under autocast, of a float32 tensor that a product reads: what is read, and what is written (and kept)."""
    both = n if back else 0.0
    read = memory(name, n, 0.0, cut, role="cast", back=both, backward_kernels=float(back), wide=True)
    return read, memory(f"{name}.narrow", n, saved, cut, role="cast", back=both, kernels=0.0)


def two_readers(d: float, more: int = 0) -> Op:
    """A region's whole input: kept, read by two (and `more`), whose gradients are added."""
    adds = 1.0 + more
    fused = (0.0, 2.0 * d, 0.0, 0.0)
    return memory(
        "mlp.input",
        0.0,
        d,
        "none",
        role="input",
        back=3.0 * adds * d,
        kernels=0.0,
        backward_kernels=adds,
        working=d,
        fused=fused,
    )


def swiglu(name: str, f: float, cut: Cut = "tensor", *, is_compiled: bool = True) -> Op:
    """Keeps gate, up and their product; going back, silu is computed again."""
    fused = (3.0 * f, 5.0 * f, 1.0, 1.0) if is_compiled else None
    return memory(
        name,
        5.0 * f,
        3.0 * f,
        cut,
        role="activation",
        back=11.0 * f,
        kernels=2.0,
        backward_kernels=4.0,
        working=3.0 * f,
        fused=fused,
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
            shape=tuple(size or tokens for size in op.shape),
            fused=None if op.fused is None else _fixed(op.fused, fixed),
        )
        for op in layer.ops
    )
    sites = tuple(replace(site, elements=fixed(site.elements)) for site in layer.sites)
    return replace(layer, ops=ops, sites=sites, boundary=fixed(layer.boundary))


def _fixed(fused: FusedCost, fixed: Callable[[Poly], Poly]) -> FusedCost:
    return replace(
        fused, moved=fixed(fused.moved), backward_moved=fixed(fused.backward_moved), saved=fixed(fused.saved)
    )


def ends_here(op: Op) -> Op:
    """A matmul of something that has no gradient: only its weight's is computed."""

    def half(poly: Poly) -> Poly:
        return Poly(**{name: getattr(poly, name) / 2 for name in ("one", "b", "bs", "bss")})

    back = {"backward_flops": half(op.backward_flops), "backward_moved": half(op.backward_moved)}
    return replace(op, **back, backward_kernels=op.backward_kernels / 2)  # type: ignore[arg-type]


def conv(name: str, channels: int, width: int, kernel: int, size_in: int, size_out: int) -> Op:
    """A convolution of squares, as the matmul it is."""
    op = matmul(name, width, channels * kernel * kernel, rows=size_out * size_out, role="convolution")
    weights, passed = op.moved.one, channels * size_in * size_in + width * size_out * size_out
    return replace(
        op, cut="none", moved=Poly(one=weights, bs=passed), backward_moved=Poly(one=2 * weights, bs=2 * passed)
    )


def cross_entropy(num_scores: int, cut: Cut = "none") -> tuple[Op, ...]:
    """Of a float32 copy of the scores; a tensor of their size is kept, and made the gradient in place."""
    v = float(num_scores)
    # Targets are int64.
    moved, back = 3.0 * v + 6.0, 5.0 * v + 8.0
    loss = memory(
        "cross_entropy", moved, v + 2.0, cut, role="loss", back=back, kernels=4.0, backward_kernels=5.0, wide=True
    )
    scores = memory("scores", v, 0.0, cut, role="loss", back=v, kernels=0.0, working=v)
    # Losses times weights, summed.
    weighing = memory("weighing", 4.0, 1.0, "none", role="loss", back=2.0, kernels=2.0, backward_kernels=1.0, wide=True)
    return replace(loss, kind="loss"), replace(scores, kind="loss"), weighing


NO_PIECES = "a sample has one loss, no vocabulary for every token."
NO_SEQUENCE = "its samples have no sequence."
