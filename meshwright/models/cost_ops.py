"""The ops that costs of models are written in. Counts are of elements a token, unless they say otherwise. No torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any, Literal

from meshwright.core.profile import Cut, CutDim, FusedCost, Layer, Op, Param, Poly, Profile, Role

Mlp = tuple[tuple[Param, ...], tuple[Op, ...]]
NO_PIECES = "a sample has one loss, no vocabulary for every token."
NO_SEQUENCE = "its samples have no sequence."


def linear_params(
    name: str, n: int, k: int, *, bias: bool = False, split: Literal["", "columns", "rows"] = "", units: int = 0
) -> tuple[Param, ...]:
    """Of a linear from k to n. Split by columns, each rank makes some of the outputs; by rows, it reads some inputs."""
    dot = f"{name}." if name else ""
    cut = {"": None, "columns": 0, "rows": 1}[split]
    weight = Param(name=f"{dot}weight", shape=(n, k), cut=cut, units=units)
    if not bias:
        return (weight,)
    if split == "columns":
        return weight, Param(name=f"{dot}bias", shape=(n,), cut=0, units=units)
    return weight, Param(name=f"{dot}bias", shape=(n,))


def norm_params(name: str, size: int, *, bias: bool = True) -> tuple[Param, ...]:
    weight = Param(name=f"{name}.weight", shape=(size,))
    return (weight, Param(name=f"{name}.bias", shape=(size,))) if bias else (weight,)


def matmul(
    name: str,
    n: int,
    k: int,
    *,
    rows: float = 1.0,
    matrices: int = 1,
    cut: Cut = "tensor",
    cut_dim: CutDim = "n",
    role: Role = "linear",
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
        cut=cut,
        shape=(n, k),
        matrices=Poly(one=matrices),
        cut_dim=cut_dim,
        backward_kernels=2.0,
    )


def memory(
    name: str,
    role: Role,
    moved: float = 0.0,
    *,
    back: float = 0.0,
    saved: float = 0.0,
    kernels: tuple[float, float] = (1, 0),
    once: tuple[float, float] = (0, 0),
    cut: Cut = "none",
    working: float = 0.0,
    wide: bool = False,
    fused: tuple[float, float, float, float] | None = None,
    kind: Literal["memory", "gather", "loss"] = "memory",
) -> Op:
    """Moves elements going forward and `back`, and those of `once` however many samples there are (weights, their
    gradients). `kernels`, too: going forward and back. `wide`: in float32, whatever is computed in.

    `fused`: moved, moved going back, kernels and kernels going back where its layer is compiled; None: as it is.
    """
    left = None
    if fused is not None:
        left = FusedCost(
            moved=Poly(bs=fused[0]),
            backward_moved=Poly(bs=fused[1]),
            saved=Poly(bs=saved),
            kernels=fused[2],
            backward_kernels=fused[3],
        )
    return Op(
        name=name,
        kind=kind,
        role=role,
        moved=Poly(one=once[0], bs=moved),
        backward_moved=Poly(one=once[1], bs=back),
        saved=Poly(bs=saved),
        working=Poly(bs=working),
        dtype="float32" if wide else "compute",
        cut=cut,
        kernels=kernels[0],
        backward_kernels=kernels[1],
        fused=left,
    )


def kept(name: str, role: Role, elements: float, *, cut: Cut = "none", wide: bool = False, working: float = 0.0) -> Op:
    """Only keeps something: what somebody else reads or writes."""
    return memory(name, role, saved=elements, kernels=(0, 0), cut=cut, wide=wide, working=working)


def kept_once(name: str, role: Role, elements: float) -> Op:
    """In float32, however many samples there are."""
    return replace(kept(name, role, 0.0, wide=True), saved=Poly(one=elements))


def bias(name: str, n: float, cut: Cut = "none", count: int = 1) -> Op:
    """Its gradient is a sum over rows, a kernel by itself; forward it is part of the product."""
    return memory(name, "bias", back=n, once=(0, n), kernels=(0, count), cut=cut)


def relu(name: str, n: float, cut: Cut = "none", working: float = 0.0) -> Op:
    """In place: keeps its output."""
    return memory(name, "activation", 2.0 * n, back=3.0 * n, saved=n, kernels=(1, 1), cut=cut, working=working)


def cast(name: str, n: float, *, back: bool, saved: float = 0.0, kernels: int = 1) -> tuple[Op, Op]:
    """Under autocast, of a float32 tensor that a product reads: what is read, and what is written (and kept)."""
    both = n if back else 0.0
    read = memory(name, "cast", n, back=both, kernels=(kernels, kernels * back), wide=True)
    return read, memory(f"{name}.narrow", "cast", n, back=both, saved=saved, kernels=(0, 0))


def two_readers(d: float, more: int = 0) -> Op:
    """A region's whole input: kept, read by two (and `more`), whose gradients are added."""
    adds, fused = 1.0 + more, (0.0, 2.0 * d, 0.0, 0.0)
    return memory("mlp.input", "input", back=3.0 * adds * d, saved=d, kernels=(0, adds), working=d, fused=fused)


def swiglu(name: str, f: float, *, working: float, is_compiled: bool = True) -> Op:
    """Keeps gate, up and their product; going back, silu is computed again."""
    fused = (3.0 * f, 5.0 * f, 1.0, 1.0) if is_compiled else None
    back, saved = 11.0 * f, 3.0 * f
    return memory(
        name, "activation", 5.0 * f, back=back, saved=saved, kernels=(2, 4), cut="tensor", working=working, fused=fused
    )


def with_role(role: Role, ops: Iterable[Op]) -> list[Op]:
    return [replace(op, role=role) for op in ops]


def per_sample(layer: Layer, tokens: int = 1) -> Layer:
    """The layer of a model whose samples are all `tokens` long: nothing depends on a sequence."""

    def fixed(poly: Poly) -> Poly:
        return Poly(one=poly.one, b=poly.b + tokens * poly.bs + tokens * tokens * poly.bss)

    def fix(op: Op) -> Op:
        names = ("flops", "backward_flops", "moved", "backward_moved", "saved", "working", "matrices")
        polys = {name: fixed(getattr(op, name)) for name in names}
        fused = op.fused
        if fused is not None:
            left = {name: fixed(getattr(fused, name)) for name in ("moved", "backward_moved", "saved")}
            fused = replace(fused, **left)  # type: ignore[arg-type]
        shape = tuple(size or tokens for size in op.shape)
        return replace(op, **polys, fused=fused, shape=shape)  # type: ignore[arg-type]

    sites = tuple(replace(site, elements=fixed(site.elements)) for site in layer.sites)
    return replace(layer, ops=tuple(map(fix, layer.ops)), sites=sites, boundary=fixed(layer.boundary))


def sample_profile(name: str, layers: Iterable[Layer], hidden_size: int, uncut: dict[str, str]) -> Profile:
    """Of a model whose samples have no sequence."""
    layers = tuple(layers)
    about: dict[str, Any] = {"max_sequence": 1, "counts": "samples", "stream": "parameters"}
    return Profile(name=name, layers=layers, hidden_size=hidden_size, uncut=uncut, **about)


def without_input_gradient(op: Op) -> Op:
    """A matmul of something that has no gradient: only its weight's is computed."""

    def half(poly: Poly) -> Poly:
        return Poly(**{name: getattr(poly, name) / 2 for name in ("one", "b", "bs", "bss")})

    back = {"backward_flops": half(op.backward_flops), "backward_moved": half(op.backward_moved)}
    return replace(op, **back, backward_kernels=op.backward_kernels / 2)  # type: ignore[arg-type]


def conv(name: str, channels: int, width: int, kernel: int, size_in: int, size_out: int) -> Op:
    """A convolution of squares, as the matmul it is."""
    inputs = channels * kernel * kernel
    op = matmul(name, width, inputs, rows=size_out * size_out, role="convolution", cut="none")
    weights, passed = op.moved.one, channels * size_in * size_in + width * size_out * size_out
    return replace(op, moved=Poly(one=weights, bs=passed), backward_moved=Poly(one=2 * weights, bs=2 * passed))


def head_loss(num_scores: int, hidden_size: int) -> tuple[Op, ...]:
    """Scores are read, and their gradient is written over them, going forward. Back, products are scaled."""
    v, d = float(num_scores), float(hidden_size)
    return (
        memory("cross_entropy", "loss", 2.0 * v, saved=v, kernels=(1, 0), cut="tensor", kind="loss"),
        memory("scaling", "loss", back=4.0 * d, kernels=(0, 4)),
        # Losses times weights, summed; targets are int64.
        memory("weighing", "loss", 8.0, kernels=(4, 0), wide=True),
    )


def cross_entropy(num_scores: int) -> tuple[Op, ...]:
    """Scores stay as they are and are kept; their gradient is another tensor."""
    v = float(num_scores)
    return (
        memory("cross_entropy", "loss", v, back=2.0 * v, saved=v, kernels=(2, 1), kind="loss"),
        memory("scores", "loss", working=v, kernels=(0, 0), kind="loss"),
        # Losses times weights, summed; targets are int64.
        memory("weighing", "loss", 10.0, back=6.0, saved=4.0, kernels=(2, 1), wide=True),
    )


def classifier(num_in: int, num_classes: int) -> tuple[Op, ...]:
    """A linear with a bias, and the loss of its scores."""
    output = matmul("output", num_classes, num_in, cut="none")
    return output, bias("output.bias", num_classes), *cross_entropy(num_classes)
