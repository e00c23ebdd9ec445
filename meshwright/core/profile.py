"""What each layer of a model costs, as polynomials in b (samples of a microbatch) and s (sequence length).

A layer is the unit of everything: stages are cut between layers, gradients are bucketed and shards gathered by
layer, recomputation is chosen by layer. Equal layers are folded with `repeat`. Quantities count *elements*, not
bytes, so that `precision` can rescale them; `dtype` says whether an element follows the compute dtype.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any, ClassVar, Literal, NamedTuple

from meshwright.core.codec import Artefact, encode, fingerprint, read_artefact
from meshwright.core.errors import Problem, raise_problems, wrong_numbers

Cut = Literal["none", "sequence", "tensor"]
"""How splitting a layer's inside divides an op: never, only when the sequence is split too, or always."""

CutDim = Literal["n", "k", "matrices"]

Role = Literal[
    "",
    "linear",
    "experts",
    "convolution",
    "matmul",
    "attention",
    "norm",
    "activation",
    "rope",
    "residual",
    "cast",
    "weight_cast",
    "bias",
    "loss",
    "embedding",
    "router",
    "dispatch",
    "layout",
    "input",
    "pool",
    "block",
    "optimizer",
    "adapter",
]
"""What an op is for, by which techniques choose the ops they change. linear: a product with a weight; experts: with
stacked weights of experts; matmul: any other product. dispatch: rows sorted, sent to experts and returned. layout: a
copy in another order. input: of several readers, kept once. block: what a traced block does outside of its modules,
mostly residual sums, in an order that is not known. adapter: products with low-rank matrices, and weights decoded to be
multiplied with. Empty: none of these."""
BLOCK_OF_WEIGHTS = 64
"""Elements of a row that share a scale, where weights are stored in few bits."""
_BLOCK_BYTES = {"int8": BLOCK_OF_WEIGHTS + 4, "nf4": BLOCK_OF_WEIGHTS // 2 + 4}


def _as_floats(value: Any, *names: str) -> None:
    """64 and 64.0 are one number, and must have one fingerprint."""
    for name in names:
        object.__setattr__(value, name, float(getattr(value, name)))


@dataclass(frozen=True, kw_only=True, slots=True)
class Poly:
    """one + b·samples + bs·tokens + bss·tokens·sequence."""

    one: float = 0.0
    b: float = 0.0
    bs: float = 0.0
    bss: float = 0.0

    def __post_init__(self) -> None:
        _as_floats(self, "one", "b", "bs", "bss")

    def __call__(self, b: Any, s: Any, parts: Any = 1) -> Any:
        """For one of `parts` equal parts of each sequence, `s` tokens long, whose tokens see all of it."""
        return self.one + b * (self.b + s * (self.bs + s * parts * self.bss))

    def times(self, factor: float) -> Poly:
        return Poly(one=self.one * factor, b=self.b * factor, bs=self.bs * factor, bss=self.bss * factor)

    def plus(self, other: Poly) -> Poly:
        one, b, bs, bss = self.one + other.one, self.b + other.b, self.bs + other.bs, self.bss + other.bss
        return Poly(one=one, b=b, bs=bs, bss=bss)


@dataclass(frozen=True, kw_only=True, slots=True)
class Param:
    """A parameter of a layer; `cut` is the dim that may be split, into at most `units` equal pieces (0: any)."""

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    units: int = 0
    inside: bool = False
    """Whole on every rank, but used on a split tensor: each rank sees only its part of the gradient."""
    tied: str = ""
    """`layer.name` of the parameter it shares its storage with."""
    frozen: bool = False
    """Not trained: no gradient, no optimizer state."""
    shared_out: Literal["", "experts", "rows"] = ""
    """What dim 0 counts, where ranks with different samples may share it out and send each other what they ask for."""
    used: float = 1.0
    """Share of it that one token multiplies by: of stacked experts, those it is sent to."""
    packed: Literal["", "int8", "nf4"] = ""
    """Stored as bytes, codes and a scale for each block of a row; empty: as numbers."""

    @property
    def stored_shape(self) -> tuple[int, ...]:
        """Of numbers, or of bytes where it is packed."""
        return packed_shape(self.shape, self.packed) if self.packed else self.shape


def packed_shape(shape: tuple[int, ...], packed: str) -> tuple[int, ...]:
    """Shape of the bytes that a matrix is stored in: rows, blocks of a row, bytes of a block."""
    return shape[0], shape[1] // BLOCK_OF_WEIGHTS, _BLOCK_BYTES[packed]


@dataclass(frozen=True, kw_only=True, slots=True)
class FusedCost:
    """An op's share of what a compiler leaves of its layer: chains read what enters and write what leaves them."""

    moved: Poly = Poly()
    backward_moved: Poly = Poly()
    saved: Poly = Poly()
    kernels: float = 0.0
    backward_kernels: float = 0.0

    def __post_init__(self) -> None:
        _as_floats(self, "kernels", "backward_kernels")


@dataclass(frozen=True, kw_only=True, slots=True)
class Op:
    name: str
    kind: Literal["matmul", "attention", "memory", "gather", "loss"]
    role: Role = ""
    flops: Poly = Poly()
    backward_flops: Poly = Poly()
    moved: Poly = Poly()
    """Elements read and written going forward."""
    backward_moved: Poly = Poly()
    saved: Poly = Poly()
    """Elements kept from forward to backward."""
    working: Poly = Poly()
    """Elements alive only while the op runs."""
    dtype: Literal["compute", "float32"] = "compute"
    cut: Cut = "none"
    shape: tuple[int, ...] = ()
    """(n, k) of a matmul's m x k by k x n, (heads, head size, tokens seen) of attention; 0 stands
    for the sequence."""
    matrices: Poly = Poly(one=1.0)
    """How many such products it is: experts, or a batch of matrices."""
    cut_dim: CutDim = "n"
    """What of a matmul's shape a cut divides."""
    kernels: float = 1.0
    """Launched going forward, one after the other; of a matmul, how many products."""
    backward_kernels: float = 1.0
    fused: FusedCost | None = None
    """Where its layer is compiled; None: nothing changes."""

    def __post_init__(self) -> None:
        _as_floats(self, "kernels", "backward_kernels")

    @property
    def sees_all(self) -> bool:
        """Whether it is attention over every pair of tokens: a causal kernel computes half of 4 x heads x head size."""
        if self.kind != "attention" or len(self.shape) != 3:
            return False
        heads, size, tokens = self.shape
        return (self.flops.bss or self.flops.b / max(tokens, 1) ** 2) >= 3.0 * heads * size


@dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """A place where splitting a layer's inside makes its ranks talk.

    `enter`: whole input of a split region; `exit`: its partial output; `loss`: statistics of a split vocabulary.
    `statistics`: of a batch norm, where ranks that see different samples talk, once forward and once backward.
    `experts`: rows sent to the experts of their choice, where ranks that see different samples share those out.
    `choices`: of experts by every token of a sequence, where a capacity or a balance asks for all of them.
    A `tail` site comes after everything that backward needs, so recomputation never replays it.
    """

    kind: Literal["enter", "exit", "loss", "statistics", "experts", "choices"]
    elements: Poly
    tail: bool = False
    after: int = -1
    """How many of the layer's parameters are used before it (-1: all): what is not trained sends no gradient back."""
    at_most: bool = False
    """Fewer elements where the data decides so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    name: str
    repeat: int = 1
    params: tuple[Param, ...] = ()
    ops: tuple[Op, ...] = ()
    sites: tuple[Site, ...] = ()
    boundary: Poly = Poly()
    """Elements handed to the next layer: what a stage sends, and all that full recomputation keeps."""
    is_block: bool = False
    """One of the repeated blocks, where stages are cut and recomputation is counted."""
    unit: str = ""
    """Layers of one unit are gathered and reduced together; empty: by itself."""

    def num_params(self) -> int:
        return sum(math.prod(param.shape) for param in self.params if not param.tied)

    @property
    def has_adapters(self) -> bool:
        return any(op.role == "adapter" for op in self.ops)


class ModelFlops(NamedTuple):
    """What utilization is a share of the peak by, counted in two ways."""

    published: float
    """6 N + 12 L H s a token, N with embeddings and only the experts a token is sent to, H all heads together, causal
    attention not halved: the convention of model flops utilization (MFU) as it is published."""
    needed: float
    """What must be computed: no product for an embedding, and half of causal attention."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Profile(Artefact):
    """What each layer of a model costs: parameters, operations, bytes, as polynomials of samples and sequence."""

    VERSION: ClassVar[int] = 1

    name: str
    layers: tuple[Layer, ...]
    hidden_size: int
    max_sequence: int
    counts: Literal["tokens", "samples"] = "tokens"
    """What a step is measured in: samples where a sample has no sequence (s is 1 then)."""
    stream: Literal["compute", "parameters"] = "compute"
    """Dtype of what flows from layer to layer: the one computed in, or (under autocast) the parameters'."""
    block_path: str = "blocks"
    """Blocks are called PATH.0, PATH.1 and so on; their parameters' names begin so. Other names are all listed,
    separated by commas."""
    uncut: Mapping[str, str] = field(default_factory=dict)
    """What of this model cannot be divided, and why: `inside` (of a layer), `sequence` (between such regions),
    `stages`, `loss` (over tokens, in pieces), `samples` (of a batch, over time)."""
    unpriced: tuple[str, ...] = ()
    """What could not be counted, or only roughly, and where it is."""
    imbalance: float = 1.0
    """Times the mean that the busiest rank's experts get rows, where ranks share experts out: not known before a router
    has learned; 1 is even."""
    group_borders: tuple[int, ...] = ()
    """Blocks, by number, before which a head with a loss of its own stands. Such heads are one layer that is no block,
    with `repeat`, listed before the last."""
    unfrozen: str = ""
    """Fingerprint before the costs were reduced by what frozen parameters do not need; empty: they were not."""
    version: int = 1

    @property
    def block_layers(self) -> tuple[Layer, ...]:
        return tuple(layer for layer in self.layers if layer.is_block)

    def block_name(self, number: int) -> str:
        names = self.block_path.split(",")
        return names[number] if len(names) > 1 else f"{self.block_path}.{number}".lstrip(".")

    def blocks_within(self, first: int, count: int) -> tuple[int, ...]:
        """How many of the `count` blocks from `first` on belong to each block layer."""
        ends = list(accumulate(layer.repeat for layer in self.block_layers))
        spans = zip([0, *ends], ends, strict=False)
        return tuple(max(0, min(end, first + count) - max(start, first)) for start, end in spans)

    def kinds_within(self, first: int, count: int) -> tuple[int, ...]:
        """What tells spans of blocks apart: equal numbers of each kind, and local heads at the same ends."""
        found = self.blocks_within(first, count)
        if not self.group_borders:
            return found
        return *found, self.heads_within(first, first + count), first in self.group_borders

    def heads_within(self, first: Any, last: Any) -> Any:
        """How many local heads stand after the blocks from `first` to `last` - 1; numbers or arrays."""
        return sum((first < border) * (border <= last) for border in self.group_borders)

    def trains_before(self, block: int) -> bool:
        """Whether any parameter before a block, by its number, is trained."""
        counts = iter(self.blocks_within(0, block))
        before = [layer for at, layer in enumerate(self.layers) if (next(counts) if layer.is_block else at == 0)]
        return any(not param.frozen for layer in before for param in layer.params)

    @property
    def num_blocks(self) -> int:
        return sum(layer.repeat for layer in self.layers if layer.is_block)

    @property
    def num_params(self) -> int:
        return sum(layer.num_params() * layer.repeat for layer in self.layers)

    @property
    def num_trained_params(self) -> int:
        each = ((p, layer.repeat) for layer in self.layers for p in layer.params if not (p.tied or p.frozen))
        return sum(math.prod(param.shape) * repeat for param, repeat in each)

    @property
    def lookup_tables(self) -> dict[tuple[str, str], Param]:
        """By layer and name, trained tables of which a token (or sample) reads one row, and that nothing else uses."""
        tied = {param.tied for layer in self.layers for param in layer.params}
        found: dict[tuple[str, str], Param] = {}
        for layer in self.layers:
            if layer.is_block or not any((op.name, op.kind) == ("lookup", "gather") for op in layer.ops):
                continue
            tables = [param for param in layer.params if param.shared_out == "rows"] or layer.params[:1]
            own = [p for p in tables if not (p.frozen or p.packed or f"{layer.name}.{p.name}" in tied)]
            found |= {(layer.name, param.name): param for param in own}
        return found

    @property
    def fingerprint(self) -> str:
        if self.unfrozen:
            return self.unfrozen
        data = encode(self)
        for name in ("unfrozen", "imbalance"):  # neither is the model's
            data.pop(name, None)
        if not self.group_borders:
            del data["group_borders"]
        for layer in data["layers"]:
            for op in layer["ops"]:
                del op["role"]  # changes no cost: checkpoints of before there were roles stay valid
            for param in layer["params"]:
                if not param["packed"]:
                    del param["packed"]
        return fingerprint(data)

    def with_documents(self, length: float) -> Profile:
        """Where tokens see their own document only, of so many tokens (the mean of squares over the mean)."""

        def inside(op: Op) -> Op:
            if op.kind != "attention" or not op.flops.bss:
                return op
            ahead, back = (
                replace(each, bs=each.bs + each.bss * length, bss=0.0) for each in (op.flops, op.backward_flops)
            )
            return replace(op, flops=ahead, backward_flops=back, shape=(*op.shape[:2], round(length)))

        return replace(self, layers=tuple(replace(each, ops=tuple(map(inside, each.ops))) for each in self.layers))

    def model_flops(self, tokens: float, sequence: float) -> ModelFlops:
        """Of forward and backward passes over so many tokens, whatever a plan computes again.

        A sample without a sequence costs what its layers do. What is frozen has no weight gradient (4 N of 6 N), and no
        backward at all where nothing before it is trained (2 N).
        """
        if self.counts == "samples":
            each = sum(
                layer.repeat * (op.flops(1, 1) + op.backward_flops(1, 1)) for layer in self.layers for op in layer.ops
            )
            return ModelFlops(tokens * float(each), tokens * float(each))
        published = needed = 0.0
        passes = 1  # forward; and backward, as soon as something is trained
        for at, layer in enumerate(self.layers):
            passes = 2 if any(not param.frozen for param in layer.params) else passes
            for param in layer.params:
                used = 2.0 * math.prod(param.shape) * layer.repeat * param.used * (passes + (not param.frozen))
                published += used * (not param.tied)  # N counts what is tied once
                needed += used * (at > 0)  # the first layer looks rows up; a tied head multiplies
            widths = [op.shape[0] * op.shape[1] for op in layer.ops if op.kind == "attention"]
            full = 4.0 * (sum(widths) or self.hidden_size * layer.is_block) * sequence
            seen = sum(op.flops(1, sequence) for op in layer.ops if op.kind == "attention") / sequence
            backward_and_forward = layer.repeat * (3 if passes == 2 else 1)
            published += backward_and_forward * full
            needed += backward_and_forward * (seen or full)
        return ModelFlops(tokens * published, tokens * needed)

    @classmethod
    def from_json(cls, text: str, source: str = "profile") -> Profile:
        result = read_artefact(cls, text, source)
        problems = [problem.within(source) for problem in result.problems()]
        raise_problems(problems)
        return result

    def problems(self) -> Iterator[Problem]:
        """Numbers that no model has, as only a file can hold them."""
        counts = {"hidden_size": self.hidden_size, "max_sequence": self.max_sequence}
        costs: dict[str, float] = {}
        for i, layer in enumerate(self.layers):
            counts[f"layers[{i}].repeat"] = layer.repeat
            counts |= {f"layers[{i}].params.{each.name}": min(each.shape, default=1) for each in layer.params}
            for op in layer.ops:
                for name in ("flops", "backward_flops", "moved", "backward_moved", "saved", "working"):
                    # A fitted term may be below zero; what it adds up to may not.
                    costs[f"layers[{i}].ops.{op.name}.{name}"] = getattr(op, name)(1, self.max_sequence)
            yield from (
                Problem(
                    where=f"layers[{i}].ops.{op.name}.shape", what=f"has {len(op.shape)} numbers; a matmul has n and k."
                )
                for op in layer.ops
                if op.kind == "matmul" and len(op.shape) != 2
            )
        yield from wrong_numbers(counts, "above zero")
        yield from wrong_numbers({"imbalance": self.imbalance}, "at least 1", lambda value: 1 <= value < math.inf)
        yield from wrong_numbers(costs, "zero or more")
