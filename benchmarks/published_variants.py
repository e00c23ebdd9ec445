"""What published models have that our configurations do not, as changes of a profile: both-way and latent attention,
another head, frozen weights with LoRA beside them, parts of a block computed again.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, replace

from meshwright.core.profile import Cut, FusedCost, Layer, Op, Param, Poly, Profile
from meshwright.models.cost_decoder import matmul

ATTENDING = ("attention.query", "attention.value")
"""What LoRA changes unless more is told (Hu et al. 2022)."""
ALL_LINEAR = r"attention\.(query|key|value|output)|mlp\.(up|gate|down)"
EVERY_MATMUL, NO_MATMUL = ".*", "-"
LORA_RANK = 8
PREFIX_TOKENS = 10
"""That each block's attention sees besides (LLaMA-Adapter); so few that only their being trained counts."""


@dataclass(frozen=True, kw_only=True)
class Latent:
    """Attention through a small vector of each token (DeepSeek-V2): ranks, and sizes of a head's parts."""

    query_rank: int
    """0: queries come straight from the stream."""
    rank: int
    plain: int = 128
    rotated: int = 64
    value: int = 128


@dataclass(frozen=True, kw_only=True)
class Lora:
    """A frozen model with something small that is trained."""

    rank: int = LORA_RANK
    """0: no matrices but prefixes, and a scale and a bias for each output of the targets (LLaMA-Adapter v2)."""
    targets: str = "|".join(map(re.escape, ATTENDING))
    """Of matmuls, as a pattern."""


@dataclass(frozen=True, kw_only=True)
class Variant:
    is_causal: bool = True
    classes: int = 0
    """Outputs of the head for each token; 0: the vocabulary."""
    latent: Latent | None = None
    lora: Lora | None = None
    again: tuple[str, ...] = ()
    """Names of `PIECES` that are computed again going back."""


PLAIN = Variant()


@dataclass(frozen=True, kw_only=True)
class _Piece:
    ops: str
    """Computed again."""
    kept: tuple[tuple[str, float], ...] = ()
    """Ops, and the share of what they keep that is still kept."""


_ACTIVATION = (("swiglu$", 2 / 3), ("gelu$", 1 / 2))
PIECES = {
    # Its inputs and its output are kept all the same, by its neighbours; a flash kernel keeps nothing else.
    "core_attn": _Piece(ops=r"attention\.core$"),
    # torchtitan: every second matmul and whatever is none; attention's output is kept.
    "op": _Piece(
        ops=r"_norm$|(swiglu|gelu)$|attention\.(key|rope|output)$|mlp\.gate$",
        kept=((r"(attention|mlp)\.input$", 0.0), ("swiglu$", 1 / 3), ("gelu$", 1 / 2)),
    ),
    "mlp": _Piece(ops=r"mlp\.(up|gate|down|swiglu|gelu)$", kept=((r"mlp\.(swiglu|gelu)$", 0.0),)),
    "layernorm": _Piece(ops=r"_norm$", kept=((r"(attention|mlp)\.input$", 0.0),)),
    "act": _Piece(ops=r"(swiglu|gelu)$", kept=_ACTIVATION),
    "moe": _Piece(ops=r"mlp\.(?!input)", kept=((r"mlp\.(?!input)", 0.0),)),
    "shared_experts": _Piece(ops=r"mlp\.shared\.", kept=((r"mlp\.shared\.", 0.0),)),
    # Query, key and value are made again, the output is kept.
    "mla_up_proj": _Piece(ops=r"attention\.(query|latent)_up$", kept=((r"attention\.core$", 0.2),)),
}
_PIECE_NAMES = (
    ("mla_up_proj", r"mla[ _-]?up"),
    ("core_attn", r"att"),
    ("shared_experts", r"shared[ _-]?exp"),
    ("layernorm", r"norm"),
    ("act", r"(moe|mlp)?[ _-]?act|swiglu|gelu"),
    ("moe", r"\bmoe"),
    ("mlp", r"\bmlp|ffn"),
    ("op", r"\bop\b"),
)


def pieces_of(text: str) -> tuple[str, ...]:
    """`core_attn+layernorm` -> the pieces it names; nothing where a part of it names none."""
    found = []
    for part in re.split(r"[+,;&/]| and ", text):
        name = next((name for name, pattern in _PIECE_NAMES if re.search(pattern, part)), None)
        if name is None:
            return ()
        found.append(name)
    return tuple(found)


def changed(profile: Profile, variant: Variant) -> Profile:
    if variant.latent is not None:
        profile = _blocks(profile, _with_latent(variant.latent))
    if not variant.is_causal:
        profile = _blocks(profile, _both_ways)
    if variant.classes:
        profile = replace(profile, layers=(*profile.layers[:-1], _classifying(profile.layers[-1], variant.classes)))
    if variant.lora is not None:
        profile = _with_lora(profile, variant.lora)
    for name in variant.again:
        profile = _blocks(profile, _computing_again(PIECES[name]))
    return profile


def _blocks(profile: Profile, change: Callable[[Layer], Layer]) -> Profile:
    return replace(profile, layers=tuple(change(each) if each.is_block else each for each in profile.layers))


def times(poly: Poly, factor: float) -> Poly:
    return Poly(one=poly.one * factor, b=poly.b * factor, bs=poly.bs * factor, bss=poly.bss * factor)


def plus(first: Poly, second: Poly) -> Poly:
    return Poly(one=first.one + second.one, b=first.b + second.b, bs=first.bs + second.bs, bss=first.bss + second.bss)


def _memory(name: str, moved: float, saved: float, cut: Cut = "none") -> Op:
    """Reads and writes going forward, half as much again going back."""
    elements = Poly(bs=moved)
    return Op(
        name=name, kind="memory", moved=elements, backward_moved=times(elements, 1.5), saved=Poly(bs=saved), cut=cut
    )


def _keeping(op: Op, share: float) -> Op:
    """With so much of what it keeps."""
    fused = None if op.fused is None else replace(op.fused, saved=times(op.fused.saved, share))
    return replace(op, saved=times(op.saved, share), fused=fused)


def _going_forward(op: Op) -> Op:
    """Without its way back."""
    fused = None if op.fused is None else replace(op.fused, backward_moved=Poly(), backward_kernels=0.0)
    return replace(op, backward_flops=Poly(), backward_moved=Poly(), backward_kernels=0.0, fused=fused)


def _both_ways(layer: Layer) -> Layer:
    def op(item: Op) -> Op:
        if item.kind != "attention":
            return item
        return replace(item, flops=times(item.flops, 2), backward_flops=times(item.backward_flops, 2))

    return replace(layer, ops=tuple(map(op, layer.ops)))


def _classifying(head: Layer, classes: int) -> Layer:
    """A few outputs for each token in place of the vocabulary."""
    weight = next(param for param in head.params if param.name == "output.weight")
    vocabulary, width = weight.shape
    params = tuple(
        replace(param, shape=(classes, width), tied="", cut=None) if param is weight else param for param in head.params
    )

    def op(item: Op) -> Op:
        if item.name == "output":
            return replace(matmul("output", classes, width), cut="none")
        if item.kind != "loss":
            return item
        share = classes / vocabulary
        names = ("moved", "backward_moved", "saved", "working")
        return replace(item, **{name: times(getattr(item, name), share) for name in names})

    return replace(head, params=params, ops=tuple(map(op, head.ops)))


def _with_latent(latent: Latent) -> Callable[[Layer], Layer]:
    def change(layer: Layer) -> Layer:
        output = next(param for param in layer.params if param.name == "attention.output.weight")
        width, heads = output.shape[0], output.units
        params, ops = _latent_attention(latent, width, heads)
        before = [param for param in layer.params if not param.name.startswith("attention.")]
        first = next(i for i, param in enumerate(layer.params) if param.name.startswith("attention."))
        kept = [op for op in layer.ops if not op.name.startswith("attention.")]
        place = next(i for i, op in enumerate(layer.ops) if op.name.startswith("attention."))
        return replace(
            layer,
            params=(*before[:first], *params, *before[first:]),
            ops=(*kept[:place], *ops, *kept[place:]),
        )

    return change


def _latent_attention(latent: Latent, width: int, heads: int) -> tuple[tuple[Param, ...], tuple[Op, ...]]:
    seen, held = heads * (latent.plain + latent.rotated), heads * latent.value
    small, shared = latent.query_rank, latent.rank + latent.rotated
    ops = [Op(name="attention.input", kind="memory", saved=Poly(bs=width))]
    params = []
    if small:
        params.append(Param(name="attention.query_down.weight", shape=(small, width)))
        ops += [replace(matmul("attention.query_down", small, width), cut="none")]
        ops += [_memory("attention.query_norm", 2.0 * small, 2.0 * small)]
    source = small or width
    params += [
        Param(name="attention.query_up.weight", shape=(seen, source), cut=0, units=heads),
        Param(name="attention.latent.weight", shape=(shared, width)),
        Param(name="attention.latent_up.weight", shape=(heads * latent.plain + held, latent.rank), cut=0, units=heads),
        Param(name="attention.output.weight", shape=(width, held), cut=1, units=heads),
    ]
    rotated = float(heads * latent.rotated + latent.rotated)
    core = Op(
        name="attention.core",
        kind="attention",
        # Half of the sequence is seen; scores over a query's size, the sum over a value's.
        flops=Poly(bss=0.5 * 2.0 * (seen + held)),
        backward_flops=Poly(bss=0.5 * 5.0 * (seen + held)),
        moved=Poly(bs=2.0 * (seen + held)),
        backward_moved=Poly(bs=4.0 * (seen + held)),
        saved=Poly(bs=2.0 * (seen + held)),
        cut="tensor",
        shape=(heads, latent.plain + latent.rotated, 0),
    )
    ops += [
        matmul("attention.query_up", seen, source),
        replace(matmul("attention.latent", shared, width), cut="none"),
        _memory("attention.latent_norm", 2.0 * latent.rank, 2.0 * latent.rank),
        matmul("attention.latent_up", heads * latent.plain + held, latent.rank),
        _memory("attention.rope", 4.0 * rotated, 0.0, "tensor"),
        core,
        matmul("attention.output", width, held, cut_dim="k"),
    ]
    return tuple(params), tuple(ops)


def _with_lora(profile: Profile, lora: Lora) -> Profile:
    """Everything frozen but what is small: no weight gradients, and nothing kept for them."""
    layers = []
    for layer in profile.layers:
        params = [replace(param, frozen=True) for param in layer.params]
        ops: list[Op] = []
        for op in layer.ops:
            ops.append(_frozen(op, lora) if layer is not profile.layers[0] else _going_forward(op))
            if op.kind == "matmul" and layer.is_block and re.fullmatch(lora.targets, op.name):
                more, beside = _trained(op, lora.rank)
                params += more
                ops += beside
        if layer.is_block and not lora.rank:
            params.append(Param(name="attention.prefix", shape=(PREFIX_TOKENS, profile.hidden_size)))
        layers.append(replace(layer, params=tuple(params), ops=tuple(ops)))
    return replace(profile, layers=tuple(layers))


def _trained(op: Op, rank: int) -> tuple[list[Param], list[Op]]:
    """What is beside a frozen matmul."""
    n, k = op.shape
    if not rank:
        scaled = [_memory(f"{op.name}.scale", 4.0 * n, float(n))]
        return [Param(name=f"{op.name}.{name}", shape=(n,)) for name in ("scale", "shift")], scaled
    params = [Param(name=f"{op.name}.lora_a", shape=(rank, k)), Param(name=f"{op.name}.lora_b", shape=(n, rank))]
    return params, [
        replace(matmul(f"{op.name}.lora_a", rank, k), cut="none"),
        replace(matmul(f"{op.name}.lora_b", n, rank), cut="none"),
        _memory(f"{op.name}.lora_sum", 3.0 * n, float(rank)),
    ]


_READERS = (
    # What is kept of an op only for the weight of another: (op, share of it, whose weight).
    (r"attention\.input", 1.0, r"attention\.(query|key|value)"),
    (r"attention\.layout", 1.0, r"attention\.output"),
    (r"mlp\.input", 1.0, r"mlp\.(up|gate)"),
    (r"mlp\.swiglu", 1 / 3, r"mlp\.down"),
    (r"mlp\.gelu", 1 / 2, r"mlp\.down"),
    (r"output\.input", 1.0, r"output"),
)


def _frozen(op: Op, lora: Lora) -> Op:
    if op.kind == "matmul":
        backward, moved = times(op.backward_flops, 0.5), times(op.backward_moved, 0.5)
        return replace(op, backward_flops=backward, backward_moved=moved, backward_kernels=op.backward_kernels / 2)
    if re.search(r"bias(es)?$", op.name):
        return _going_forward(op)
    for name, share, reader in _READERS:
        readers = {f"{area}.{part}" for area in ("attention", "mlp") for part in _PARTS}
        is_read = lora.rank and any(re.fullmatch(reader, x) and re.fullmatch(lora.targets, x) for x in readers)
        if re.fullmatch(name, op.name) and not is_read:
            return _keeping(op, 1 - share)
    return op


_PARTS = ("query", "key", "value", "output", "up", "gate", "down")


def _computing_again(piece: _Piece) -> Callable[[Layer], Layer]:
    def change(layer: Layer) -> Layer:
        ops: list[Op] = []
        for op in layer.ops:
            share = next((share for pattern, share in piece.kept if re.search(pattern, op.name)), 1.0)
            dropped = times(op.saved, 1 - share)
            ops.append(replace(_keeping(op, share), working=plus(op.working, dropped)))
            if re.search(piece.ops, op.name) and (op.flops != Poly() or op.moved != Poly()):
                ops.append(_again(op))
        return replace(layer, ops=tuple(ops))

    return change


def _again(op: Op) -> Op:
    """Its way forward, going back."""
    fused = op.fused
    if fused is not None:
        fused = FusedCost(backward_moved=fused.moved, backward_kernels=fused.kernels)
    return replace(
        op,
        name=f"{op.name}.again",
        flops=Poly(),
        moved=Poly(),
        saved=Poly(),
        working=Poly(),
        backward_flops=op.flops,
        backward_moved=op.moved,
        kernels=0.0,
        backward_kernels=op.kernels,
        fused=fused,
    )
