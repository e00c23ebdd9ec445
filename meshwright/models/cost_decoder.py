"""What a decoder costs, layer by layer, from its dimensions alone. No torch.

The counts follow `zoo/decoder.py` line by line; `tests/models/test_cost.py` holds the parameters equal to the
real module's and the saved bytes to what autograd really keeps. Of a mixture of experts only what surrounds it is
compiled with its block: rows that go to their experts are as many as the router says.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Literal

from meshwright.core.profile import Cut, CutDim, FusedCost, Layer, Op, Param, Poly, Profile, Role, Site
from meshwright.models.dimensions import Adapter, DecoderConfig
from meshwright.models.frozen_parameters import freeze

Mlp = tuple[tuple[Param, ...], tuple[Op, ...]]


def linear_params(
    name: str, n: int, k: int, *, bias: bool = False, split: Literal["", "columns", "rows"] = "", units: int = 0
) -> tuple[Param, ...]:
    """Parameters of a linear layer from k to n; `split`: which of outputs (columns) or inputs (rows) ranks share."""
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
    passed: float | None = None,
    back: int = 2,
    cut: Cut = "tensor",
    cut_dim: CutDim = "n",
    role: Role = "linear",
) -> Op:
    """y = x W: the backward is two more of the same size (`back`: one, if x has no gradient). Who produces x keeps it.

    `rows` of x for each token, each times one of `matrices`; `passed`: elements of x and y, if they overlap.
    """
    weights, flops = matrices * n * k, 2.0 * rows * n * k
    passed = rows * (n + k) if passed is None else passed
    return Op(
        name=name,
        kind="matmul",
        role=role,
        flops=Poly(bs=flops),
        backward_flops=Poly(bs=back * flops),
        moved=Poly(one=weights, bs=passed),
        backward_moved=Poly(one=back * weights, bs=back * passed),
        cut=cut,
        shape=(n, k),
        matrices=Poly(one=matrices),
        cut_dim=cut_dim,
        backward_kernels=back,
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
        moves = {"moved": Poly(bs=fused[0]), "backward_moved": Poly(bs=fused[1]), "saved": Poly(bs=saved)}
        left = FusedCost(**moves, kernels=fused[2], backward_kernels=fused[3])
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


inner = functools.partial(memory, cut="tensor")
"""Of what splitting a region divides."""


def kept(name: str, role: Role, elements: float, *, cut: Cut = "none", wide: bool = False, working: float = 0.0) -> Op:
    """Only keeps something: what somebody else reads or writes."""
    return memory(name, role, saved=elements, kernels=(0, 0), cut=cut, wide=wide, working=working)


def bias(name: str, n: float, cut: Cut = "none", count: int = 1) -> Op:
    """Its gradient is a sum over rows, a kernel by itself; forward it is part of the product."""
    return memory(name, "bias", back=n, once=(0, n), kernels=(0, count), cut=cut)


def two_readers(d: float, more: int = 0) -> Op:
    """A region's whole input: kept, read by two (and `more`), whose gradients are added."""
    adds, fused = 1.0 + more, (0.0, 2.0 * d, 0.0, 0.0)
    return memory("mlp.input", "input", back=3.0 * adds * d, saved=d, kernels=(0, adds), working=d, fused=fused)


def swiglu(name: str, f: float, *, working: float, is_compiled: bool = True) -> Op:
    """Keeps gate, up and their product; going back, silu is computed again."""
    fused = (3.0 * f, 5.0 * f, 1.0, 1.0) if is_compiled else None
    back, kernels = 11.0 * f, (2, 4)
    return inner(name, "activation", 5.0 * f, back=back, saved=3.0 * f, kernels=kernels, working=working, fused=fused)


def _norm_op(config: DecoderConfig, name: str, *, follows_add: bool = False, joins: bool = True) -> Op:
    """Keeps its input; the few numbers a row beside it are left out, the output is kept by whoever reads it.

    Back: gradient and input are read once for the input's gradient and once for the weight's; where it `joins` the
    residual stream, that gradient is added to the stream's. Compiled, a norm that `follows_add` is of its kernel.
    """
    d = config.hidden_size
    fused = (d, 5 * d, 0, 2) if follows_add else (2 * d, 5 * d, 1, 2)
    back, kernels = (8 * d, (1, 2)) if joins else (5 * d, (1, 1))
    weights = 2 * d if config.norm == "layer" else d
    once = (weights, 2 * weights)
    return memory(name, "norm", 2 * d, back=back, saved=d, once=once, kernels=kernels, cut="sequence", fused=fused)


def _attention(config: DecoderConfig, is_causal: bool) -> tuple[tuple[Param, ...], tuple[Op, ...]]:
    d, h = config.hidden_size, config.size_of_head
    q, kv = config.num_heads * h, config.num_kv_heads * h
    sizes = {"query": (q, config.num_heads), "key": (kv, config.num_kv_heads), "value": (kv, config.num_kv_heads)}
    projections = [
        linear_params(f"attention.{name}", n, d, bias=config.qkv_bias, split="columns", units=units)
        for name, (n, units) in sizes.items()
    ]
    params = [param for each in zip(*projections, strict=True) for param in each]
    if config.qk_norm:
        params += [Param(name=f"attention.{each}_norm.weight", shape=(h,), inside=True) for each in ("query", "key")]
    params += linear_params("attention.output", d, q, bias=config.bias, split="rows", units=config.num_heads)
    # One whole input serves query, key and value: kept once, and not divided by splitting. Its gradients are added.
    ops = [
        memory("attention.input", "input", back=6.0 * d, saved=d, kernels=(0, 2), fused=(0, 3.0 * d, 0, 0)),
        *(matmul(f"attention.{name}", n, d) for name, (n, _) in sizes.items()),
    ]
    if config.qkv_bias:
        ops.append(bias("attention.biases", q + 2.0 * kv, "tensor", count=3))
    n = float(q + kv)  # elements of queries and keys
    if config.qk_norm:
        fused = (n, 4.0 * n, 1.0, 2.0) if config.positions == "rope" else (2.0 * n, 5.0 * n, 2.0, 4.0)
        ops += [
            kept("attention.qk_norm.statistics", "norm", n / h, cut="tensor", wide=True),
            inner("attention.qk_norm", "norm", 2.0 * n, back=5.0 * n, saved=n, kernels=(2, 2), fused=fused),
        ]
    if config.positions == "rope":
        # Four products, a sum and a difference of halves, and a copy that joins them; the same going back. Then heads
        # lie outside of the sequence, and a product reads a copy: of gradients (a norm reads them as they lie), and of
        # attention's output, which takes the layout of the query.
        copied = 0 if config.qk_norm else 1
        fused = (n, n, 0.0, 1.0) if config.qk_norm else (2.0 * n, 2.0 * n, 1.0, 1.0)
        back, kernels = (9.0 + 2.0 * copied) * n, (14, 16 + 2 * copied)
        ops += [
            inner("attention.rope", "rope", 9.0 * n, back=back, kernels=kernels, fused=fused),
            inner("attention.layout", "layout", 2.0 * q, saved=q),
        ]
    seen = 0.5 if is_causal else 1.0  # of the sequence, on average
    ops.append(
        Op(
            name="attention.core",
            kind="attention",
            role="attention",
            flops=Poly(bss=seen * 4.0 * q),
            backward_flops=Poly(bss=seen * 10.0 * q),
            moved=Poly(bs=2.0 * (q + kv + config.num_heads)),
            backward_moved=Poly(bs=4.0 * (q + kv) + 2.0 * config.num_heads),
            saved=Poly(bs=2.0 * q + 2.0 * kv),  # query, key, value, output
            cut="tensor",
            shape=(config.num_heads, h, 0),
        )
    )
    ops.append(kept("attention.statistics", "attention", config.num_heads, cut="tensor", wide=True))
    ops.append(matmul("attention.output", d, q, cut_dim="k"))
    if config.bias:
        ops.append(bias("attention.output.bias", d))
    return tuple(params), tuple(ops)


def plain_mlp(config: DecoderConfig) -> Mlp:
    d, f = config.hidden_size, config.ffn_size
    params = list(linear_params("mlp.up", f, d, bias=config.bias and config.mlp == "gelu", split="columns", units=f))
    if config.mlp == "swiglu":
        params = [*linear_params("mlp.gate", f, d, split="columns", units=f), *params]
        # The fullest moment is the gradient's, in here or where queries, keys and values have theirs.
        heads = (3 * config.num_heads + 2 * config.num_kv_heads) * config.size_of_head
        gated = swiglu("mlp.swiglu", f, working=max(3 * f, heads))
        ops = [two_readers(d), matmul("mlp.up", f, d), matmul("mlp.gate", f, d), gated]
    else:
        given = memory("mlp.input", "input", saved=d, kernels=(0, 0), working=d, fused=(0, d, 0, 0))
        ops = [given, matmul("mlp.up", f, d), *([bias("mlp.up.bias", f, "tensor")] if config.bias else [])]
        ops.append(inner("mlp.gelu", "activation", 2 * f, back=3 * f, saved=2 * f, kernels=(1, 1), working=2 * f))
    params += linear_params("mlp.down", d, f, bias=config.bias, split="rows", units=f)
    ops.append(matmul("mlp.down", d, f, cut_dim="k"))
    if config.bias:
        ops.append(bias("mlp.down.bias", d))
    return tuple(params), tuple(ops)


def adapted(adapter: Adapter, inside: Mlp) -> Mlp:
    """A region whose linear layers have adapters, beside weights that may be packed.

    Products with a matrix of few rows or columns take as long as what they read and write. B's is added to what the
    frozen weight made. A packed weight is decoded where it is multiplied with, either way, and not kept.
    """
    params: list[Param] = []
    ops: list[Op] = []
    beside: list[Op] = []
    packed: list[Param] = []
    r = adapter.rank
    for param in inside[0]:
        name, _, kind = param.name.rpartition(".")
        n, k = (*param.shape, 0)[:2]
        if kind != "weight" or not k:
            params.append(param)
            continue
        if adapter.base != "bf16":
            param = replace(param, packed=adapter.base)
            if param.cut == 1:  # between blocks
                param = replace(param, units=math.gcd(param.units, param.stored_shape[1]))
            packed.append(param)
        params.append(param)
        if adapter.adapts(name):
            first = Param(name=f"{name}.lora_A", shape=(r, k), inside=True)
            second = Param(name=f"{name}.lora_B", shape=(n, r), cut=0, units=param.units)
            if param.cut == 1:
                first = replace(first, cut=1, units=param.units, inside=False)
                second = replace(second, cut=None, units=0, inside=True)
            params += [first, second]
    trained = {param.name.removesuffix(".lora_A") for param in params if param.name.endswith(".lora_A")}
    for op in inside[1]:
        if op.role != "linear":
            ops += beside
            beside = []
        ops.append(op)
        if op.name in trained:
            n, k = op.shape
            ends: tuple[Cut, Cut] = ("none", "tensor") if op.cut_dim == "n" else ("tensor", "none")
            beside += [
                memory(f"{op.name}.lora_A", "adapter", k + 2.0 * r, back=4.0 * k, kernels=(2, 3), cut=ends[0]),
                kept(f"{op.name}.low_rank", "adapter", r),
                memory(f"{op.name}.lora_B", "adapter", 2.0 * n, back=2.0 * n, kernels=(1, 2), cut=ends[1]),
            ]
    ops += beside
    if packed:
        # In elements of two bytes: as weights are decoded to bf16.
        moved = sum(math.prod(param.shape) + math.prod(param.stored_shape) / 2.0 for param in packed)
        region, count = params[0].name.partition(".")[0], len(packed)
        decode = memory(f"{region}.decode", "adapter", once=(moved, moved), kernels=(count, count), cut="tensor")
        # One at a time: the largest is one of the MLP.
        largest = max(math.prod(param.shape) for param in packed) if region == "mlp" else 0
        ops.append(replace(decode, working=Poly(one=largest)))
    return tuple(params), tuple(ops)


def block_layer(config: DecoderConfig, name: str, repeat: int, mlp: Mlp, is_causal: bool = True) -> Layer:
    d = config.hidden_size
    attention = _attention(config, is_causal)
    if config.adapter is not None:
        attention, mlp = adapted(config.adapter, attention), adapted(config.adapter, mlp)
    attention_params, attention_ops = attention
    mlp_params, mlp_ops = mlp
    add = memory("residual", "residual", 3.0 * d, cut="sequence")  # its gradient goes both ways as it is
    first, second = (norm_params(each, d, bias=config.norm == "layer") for each in ("attention_norm", "mlp_norm"))
    middle = len(first) + len(attention_params)
    before_mlp = middle + len(second)
    sites = [
        Site(kind="enter", elements=Poly(bs=d), after=len(first)),
        Site(kind="exit", elements=Poly(bs=d), after=middle),
        Site(kind="enter", elements=Poly(bs=d), after=before_mlp),
        Site(kind="exit", elements=Poly(bs=d), tail=True),
    ]
    if any(param.shared_out == "experts" for param in mlp_params):
        # Every choice, or as many as find room; an expert's room in a sequence is a whole number, rounded up.
        factor = config.capacity_factor
        rounded = config.num_experts if 0 < factor < 1 else 0
        elements = Poly(bs=_sent_by_a_token(config) * d, b=rounded * d)
        sites.append(Site(kind="experts", elements=elements, after=before_mlp, at_most=factor > 0))
        if config.capacity_factor or config.balance:
            sites.append(Site(kind="choices", elements=Poly(bs=config.experts_per_token), after=before_mlp))
    attention_norm, mlp_norm = _norm_op(config, "attention_norm"), _norm_op(config, "mlp_norm", follows_add=True)
    return Layer(
        name=name,
        repeat=repeat,
        params=(*first, *attention_params, *second, *mlp_params),
        ops=(attention_norm, *attention_ops, add, mlp_norm, *mlp_ops, add),
        sites=tuple(sites),
        boundary=Poly(bs=d),
        is_block=True,
    )


def _sent_by_a_token(config: DecoderConfig) -> float:
    """Choices beyond the capacity of their expert go nowhere; how many find room depends on the router."""
    return config.experts_per_token * min(1.0, config.capacity_factor or 1.0)


def experts_mlp(config: DecoderConfig) -> Mlp:
    d, f, count = config.hidden_size, config.expert_ffn_size, config.num_experts
    used = config.experts_per_token / count
    up = Param(name="mlp.experts.up", shape=(count, f, d), cut=1, units=f, shared_out="experts", used=used)
    params = [
        Param(name="mlp.router.weight", shape=(count, d), inside=True),
        *(replace(up, name="mlp.experts.gate"), up, replace(up, name="mlp.experts.down", shape=(count, d, f), cut=2)),
    ]
    sent, shared = _sent_by_a_token(config), int(config.num_shared_experts > 0)
    moment = 3.0 * sent * max(d, f) + shared * d
    ops = [
        two_readers(d, more=2 * shared),
        *_routing(config, sent),
        *_sending(config, sent),
        matmul("mlp.experts.gate", f, d, rows=sent, matrices=count, role="experts"),
        matmul("mlp.experts.up", f, d, rows=sent, matrices=count, role="experts"),
        swiglu("mlp.experts.swiglu", sent * f, working=moment, is_compiled=False),
        matmul("mlp.experts.down", d, f, rows=sent, matrices=count, role="experts", cut_dim="k"),
        # Rows times their shares, added up by token.
        memory("mlp.weigh", "dispatch", (2.0 * sent + 1.0) * d, back=6.0 * sent * d, saved=sent * d, kernels=(2, 3)),
        _gather("mlp.return", (3.0 * d + 4.0) * sent, (2.0 * d + 4.0) * sent),
    ]
    if config.balance:  # the loss that spreads tokens evenly: sums over sequences, most of a number for each expert
        is_sigmoid = config.router == "sigmoid"
        moved, back, kernels = (4.0, 12.0, (10, 11)) if is_sigmoid else (3.0, 5.0, (9, 5))
        ops.append(memory("mlp.balance", "router", moved * count + sent, back=back * count, kernels=kernels, wide=True))
        ops.append(memory("mlp.counts", "router", 5.0 * sent, wide=True, kind="gather"))
    if config.num_shared_experts:
        size = config.num_shared_experts * f
        for name in ("gate", "up"):
            params += linear_params(f"mlp.shared.{name}", size, d, split="columns", units=size)
        params += linear_params("mlp.shared.down", d, size, split="rows", units=size)
        ops += [
            matmul("mlp.shared.gate", size, d),
            matmul("mlp.shared.up", size, d),
            swiglu("mlp.shared.swiglu", size, working=0.0),  # the experts' moment is the larger one
            matmul("mlp.shared.down", d, size, cut_dim="k"),
            memory("mlp.shared.sum", "residual", 3.0 * d),
        ]
    return tuple(params), tuple(ops)


def _gather(name: str, moved: float, back: float, kernels: tuple[float, float] = (1, 1), wide: bool = False) -> Op:
    return memory(name, "dispatch", moved, back=back, kernels=kernels, wide=wide, kind="gather")


def _routing(config: DecoderConfig, sent: float) -> list[Op]:
    """In float32: the input is cast, scored, and the best experts chosen."""
    d, count, k = config.hidden_size, config.num_experts, sent
    is_sigmoid = config.router == "sigmoid"
    # Scores and shares, a step each: sigmoid and a quotient, or softmax of the chosen.
    moved, back, steps, steps_back = (2.0 * count + 7.0 * k, 5.0 * count + 18.0 * k, 4, 10)
    if not is_sigmoid:
        moved, back, steps, steps_back = (4.0 * k, count + 5.0 * k, 2, 3)
    if config.balance:  # scores are read twice
        back, steps_back = back + 3.0 * count, steps_back + 1
    # Scores where they are needed again, shares, and where each choice came from (int64).
    remembered = (count if config.balance or is_sigmoid else 0) + 7.0 * k
    weight = (0, count * d)
    return [
        replace(matmul("mlp.router", count, d, cut="none", role="router"), dtype="float32"),
        memory("mlp.router.input", "router", d, back=2.0 * d, once=weight, kernels=(1, 3), wide=True),
        memory("mlp.router.narrow", "router", d, back=2.0 * d, once=weight, kernels=(0, 0)),
        memory("mlp.scores", "router", moved, back=back, kernels=(steps, steps_back), wide=True),
        replace(_gather("mlp.choice", count + 3.0 * k, 2.0 * count + 3.0 * k, wide=True), role="router"),
        kept("mlp.choices", "router", remembered, wide=True),
        kept("mlp.shares", "router", k),
    ]


def _sending(config: DecoderConfig, sent: float) -> list[Op]:
    """Choices sorted by expert, rows copied in that order; going back, added where they came from."""
    d, k = config.hidden_size, sent
    # Each of the grouped products asks where its groups end: a running sum, in int32.
    (forward, back), ends = (3, 6), 7.0 * config.num_experts
    once = (forward * ends, back * ends)
    return [
        memory("mlp.order", "dispatch", 4.0 * k + 2.0 * k, back=4.0 * k, kernels=(3, 2), wide=True),
        _gather("mlp.sort", 6.0 * k + 4.0 * k, 6.0 * k, (2, 1), wide=True),
        memory("mlp.groups", "dispatch", once=once, kernels=(2 * forward, 2 * back), wide=True),
        _gather("mlp.send", 2.0 * k * d + 4.0 * k, k * d + 2.0 * d + 4.0 * k),
        kept("mlp.rows", "dispatch", k * d),
        # Two products read the rows: their gradients are added, and sums begin at zero.
        memory("mlp.rows.sum", "dispatch", back=3.0 * k * d + d, kernels=(0, 2)),
    ]


def decoder_profile(config: DecoderConfig, name: str) -> Profile:
    d, v = config.hidden_size, config.vocab_size
    params = [Param(name="tokens.weight", shape=(v, d), cut=0)]
    # A dense gradient of the whole table is written. Numbers of tokens are int64.
    moved, back, once = 2.0 * d + 4.0, d + 4.0, (0, v * d)
    ops = [
        memory("lookup", "embedding", moved, back=back, once=once, kernels=(1, 1), working=d, kind="gather"),
        kept("tokens", "embedding", 2.0, wide=True),
    ]
    if config.positions == "rope":
        # The tables of cosines and sines: small, but steps all the same.
        steps = 11 if config.rope_scaling == "none" else 20
        ops.append(memory("rotary", "rope", once=(config.size_of_head, 0), kernels=(steps, 0), wide=True))
    else:
        params.append(Param(name="positions.weight", shape=(config.max_sequence, d)))
        table = (d, config.max_sequence * d)
        ops += [
            memory("places", "embedding", once=(2.0, 0), wide=True),
            memory("positions", "embedding", once=table, kernels=(1, 1), kind="gather"),
            memory("add_positions", "embedding", 2.0 * d, back=d, kernels=(1, 1)),
        ]
    if config.tied:  # the head's gradient is added
        ops.append(memory("tied", "embedding", once=(0, 3.0 * v * d), kernels=(0, 1)))
    boundary = Poly(bs=d)
    exits = (Site(kind="exit", elements=boundary),)
    layers = [Layer(name="embed", params=tuple(params), ops=tuple(ops), sites=exits, boundary=boundary)]
    dense = config.num_dense_layers if config.num_experts else config.num_layers
    if dense:
        layers.append(block_layer(config, "dense_blocks" if config.num_experts else "blocks", dense, plain_mlp(config)))
    if config.num_experts:
        layers.append(block_layer(config, "blocks", config.num_layers - dense, experts_mlp(config)))
    weight = Param(name="output.weight", shape=(v, d), cut=0, tied="embed.tokens.weight" if config.tied else "")
    norm = norm_params("norm", d, bias=config.norm == "layer")
    head = Layer(
        name="head",
        params=(*norm, weight),
        ops=(
            _norm_op(config, "norm", joins=False),
            kept("output.input", "input", d, working=d),
            matmul("output", v, d),
            # Scores are read, and their gradient is written over them, going forward. Back, products are scaled.
            memory("cross_entropy", "loss", 2.0 * v, saved=v, kernels=(1, 0), cut="tensor", kind="loss"),
            memory("scaling", "loss", back=4.0 * d, kernels=(0, 4)),
            # Losses times weights, summed; targets are int64.
            memory("weighing", "loss", 8.0, kernels=(4, 0), wide=True),
        ),
        sites=(Site(kind="enter", elements=boundary, after=len(norm)), Site(kind="loss", elements=Poly(bs=1.0))),
    )
    if config.local_heads:
        own = (*norm, replace(weight, tied=""))
        layers.append(replace(head, name="local_heads", repeat=config.local_heads, params=own))
    profile = Profile(
        name=name,
        layers=(*layers, head),
        hidden_size=d,
        max_sequence=config.max_sequence,
        group_borders=config.group_borders,
    )
    return profile if config.adapter is None else freeze(profile, lambda name: ".lora_" not in name)
