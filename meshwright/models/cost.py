"""What a decoder costs, layer by layer, from its dimensions alone. No torch.

The counts follow `models/decoder.py` line by line; `tests/models/test_cost.py` holds the parameters equal to the
real module's and the saved bytes to what autograd really keeps.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.profile import Layer, Op, Param, Poly, Profile, Site
from meshwright.models.config import DecoderConfig
from meshwright.models.cost_ops import matmul, memory

Mlp = tuple[tuple[Param, ...], tuple[Op, ...]]


def _norm_params(config: DecoderConfig, name: str) -> tuple[Param, ...]:
    weight = Param(name=f"{name}.weight", shape=(config.hidden_size,))
    if config.norm == "layer":
        return (weight, Param(name=f"{name}.bias", shape=(config.hidden_size,)))
    return (weight,)


def _norm_op(config: DecoderConfig, name: str) -> Op:
    """Keeps its input; statistics are s-sized and left out, the output is kept by whoever reads it."""
    d = config.hidden_size
    return memory(name, 2.0 * d, d, "sequence")


def _attention(config: DecoderConfig, is_causal: bool) -> tuple[tuple[Param, ...], tuple[Op, ...]]:
    d, h = config.hidden_size, config.size_of_head
    q, kv = config.num_heads * h, config.num_kv_heads * h
    params = [
        Param(name="attention.query.weight", shape=(q, d), cut=0, units=config.num_heads),
        Param(name="attention.key.weight", shape=(kv, d), cut=0, units=config.num_kv_heads),
        Param(name="attention.value.weight", shape=(kv, d), cut=0, units=config.num_kv_heads),
    ]
    if config.qkv_bias:
        params += [
            Param(name="attention.query.bias", shape=(q,), cut=0, units=config.num_heads),
            Param(name="attention.key.bias", shape=(kv,), cut=0, units=config.num_kv_heads),
            Param(name="attention.value.bias", shape=(kv,), cut=0, units=config.num_kv_heads),
        ]
    if config.qk_norm:
        params.append(Param(name="attention.query_norm.weight", shape=(h,), inside=True))
        params.append(Param(name="attention.key_norm.weight", shape=(h,), inside=True))
    params.append(Param(name="attention.output.weight", shape=(d, q), cut=1, units=config.num_heads))
    if config.bias:
        params.append(Param(name="attention.output.bias", shape=(d,)))
    # One whole input serves query, key and value: kept once, and not divided by splitting.
    ops = [Op(name="attention.input", kind="memory", saved=Poly(bs=d), cut="none")]
    ops += [
        matmul("attention.query", q, d),
        matmul("attention.key", kv, d),
        matmul("attention.value", kv, d),
    ]
    if config.qk_norm:
        ops.append(memory("attention.qk_norm", 2.0 * (q + kv), q + kv, "tensor"))
    if config.positions == "rope":
        ops.append(memory("attention.rope", 4.0 * (q + kv), 0.0, "tensor", working=2.0 * (q + kv)))
    # The output takes the layout of the query: rotation leaves heads outside of the sequence, so the next matmul
    # reads (and keeps) a copy of it.
    copied = q if config.positions == "rope" else 0
    seen = 0.5 if is_causal else 1.0  # of the sequence, on average
    ops.append(
        Op(
            name="attention.core",
            kind="attention",
            flops=Poly(bss=seen * 4.0 * q),
            backward_flops=Poly(bss=seen * 10.0 * q),
            moved=Poly(bs=2.0 * (q + kv)),
            backward_moved=Poly(bs=4.0 * (q + kv)),
            saved=Poly(bs=2.0 * q + 2.0 * kv + copied),  # query, key, value, output
            cut="tensor",
            shape=(config.num_heads, h, 0),
        )
    )
    ops.append(matmul("attention.output", d, q, cut_dim="k"))
    return tuple(params), tuple(ops)


def plain_mlp(config: DecoderConfig) -> Mlp:
    d, f = config.hidden_size, config.ffn_size
    params = [Param(name="mlp.up.weight", shape=(f, d), cut=0, units=f)]
    ops = [
        Op(name="mlp.input", kind="memory", saved=Poly(bs=d), cut="none"),
        matmul("mlp.up", f, d),
    ]
    if config.mlp == "swiglu":
        params.insert(0, Param(name="mlp.gate.weight", shape=(f, d), cut=0, units=f))
        ops.append(matmul("mlp.gate", f, d))
        # gate, up and their product
        ops.append(memory("mlp.swiglu", 5.0 * f, 3.0 * f, "tensor", working=f))
    else:
        if config.bias:
            params.append(Param(name="mlp.up.bias", shape=(f,), cut=0, units=f))
        ops.append(memory("mlp.gelu", 2.0 * f, 2.0 * f, "tensor", working=f))
    params.append(Param(name="mlp.down.weight", shape=(d, f), cut=1, units=f))
    if config.bias:
        params.append(Param(name="mlp.down.bias", shape=(d,)))
    ops.append(matmul("mlp.down", d, f, cut_dim="k"))
    return tuple(params), tuple(ops)


def _sent_by_a_token(config: DecoderConfig) -> float:
    """Choices beyond the capacity of their expert go nowhere; how many find room depends on the router."""
    return config.experts_per_token * min(1.0, config.capacity_factor or 1.0)


def _sent_to_experts(config: DecoderConfig, after: int) -> Site:
    """Every choice, or as many as find room; an expert's room in a sequence is a whole number, rounded up."""
    d, factor = config.hidden_size, config.capacity_factor
    rounded = config.num_experts if 0 < factor < 1 else 0
    elements = Poly(bs=_sent_by_a_token(config) * d, b=rounded * d)
    return Site(kind="experts", elements=elements, after=after, at_most=factor > 0)


def _experts(config: DecoderConfig) -> Mlp:
    d, f, count, k = config.hidden_size, config.expert_ffn_size, config.num_experts, config.experts_per_token
    used = k / count
    params = [
        Param(name="mlp.router.weight", shape=(count, d), inside=True),
        Param(name="mlp.experts.gate", shape=(count, f, d), cut=1, units=f, shared_out="experts", used=used),
        Param(name="mlp.experts.up", shape=(count, f, d), cut=1, units=f, shared_out="experts", used=used),
        Param(name="mlp.experts.down", shape=(count, d, f), cut=2, units=f, shared_out="experts", used=used),
    ]
    sent = _sent_by_a_token(config)
    scores = count if config.balance or config.router == "sigmoid" else 0
    ops = [
        Op(name="mlp.input", kind="memory", saved=Poly(bs=d), cut="none"),
        replace(matmul("mlp.router", count, d), dtype="float32", cut="none"),
        # Every expert's score, and four numbers of each choice, two of them int64.
        replace(memory("mlp.choice", 4.0 * count, scores + 8.0 * sent, "none"), dtype="float32"),
        replace(memory("mlp.send", 2.0 * sent * d, sent * d, "none", working=sent * d), kind="gather"),
        matmul("mlp.experts.gate", f, d, rows=sent, matrices=count),
        matmul("mlp.experts.up", f, d, rows=sent, matrices=count),
        memory("mlp.experts.swiglu", 5.0 * sent * f, 3.0 * sent * f, "tensor", working=sent * f),
        matmul("mlp.experts.down", d, f, rows=sent, matrices=count, cut_dim="k"),
        replace(memory("mlp.return", 4.0 * sent * d, sent * d, "none", working=sent * d), kind="gather"),
    ]
    if config.num_shared_experts:
        size = config.num_shared_experts * f
        params += [
            Param(name="mlp.shared.gate.weight", shape=(size, d), cut=0, units=size),
            Param(name="mlp.shared.up.weight", shape=(size, d), cut=0, units=size),
            Param(name="mlp.shared.down.weight", shape=(d, size), cut=1, units=size),
        ]
        ops += [
            matmul("mlp.shared.gate", size, d),
            matmul("mlp.shared.up", size, d),
            memory("mlp.shared.swiglu", 5.0 * size, 3.0 * size, "tensor", working=size),
            matmul("mlp.shared.down", d, size, cut_dim="k"),
        ]
    return tuple(params), tuple(ops)


def _blocks(config: DecoderConfig) -> tuple[Layer, ...]:
    if not config.num_experts:
        return (block_layer(config, "blocks", config.num_layers, plain_mlp(config)),)
    dense = config.num_dense_layers
    routed = block_layer(config, "blocks", config.num_layers - dense, _experts(config))
    return (block_layer(config, "dense_blocks", dense, plain_mlp(config)), routed) if dense else (routed,)


def block_layer(config: DecoderConfig, name: str, repeat: int, mlp: Mlp, is_causal: bool = True) -> Layer:
    d = config.hidden_size
    attention_params, attention_ops = _attention(config, is_causal)
    mlp_params, mlp_ops = mlp
    add = memory("residual", 3.0 * d, 0.0, "sequence")
    first, second = _norm_params(config, "attention_norm"), _norm_params(config, "mlp_norm")
    middle = len(first) + len(attention_params)
    before_mlp = middle + len(second)
    sites = [
        Site(kind="enter", elements=Poly(bs=d), after=len(first)),
        Site(kind="exit", elements=Poly(bs=d), after=middle),
        Site(kind="enter", elements=Poly(bs=d), after=before_mlp),
        Site(kind="exit", elements=Poly(bs=d), tail=True),
    ]
    if any(param.shared_out == "experts" for param in mlp_params):
        sites.append(_sent_to_experts(config, before_mlp))
        if config.capacity_factor or config.balance:
            sites.append(Site(kind="choices", elements=Poly(bs=config.experts_per_token), after=before_mlp))
    return Layer(
        name=name,
        repeat=repeat,
        params=(*first, *attention_params, *second, *mlp_params),
        ops=(
            _norm_op(config, "attention_norm"),
            *attention_ops,
            add,
            _norm_op(config, "mlp_norm"),
            *mlp_ops,
            add,
        ),
        sites=tuple(sites),
        boundary=Poly(bs=d),
        is_block=True,
    )


def _embed(config: DecoderConfig) -> Layer:
    d, v = config.hidden_size, config.vocab_size
    params = [Param(name="tokens.weight", shape=(v, d), cut=0)]
    if config.positions == "learned":
        params.append(Param(name="positions.weight", shape=(config.max_sequence, d)))
    lookup = Op(
        name="lookup",
        kind="gather",
        moved=Poly(bs=2.0 * d),
        # a dense gradient of the whole table is written and added
        backward_moved=Poly(one=3.0 * v * d, bs=2.0 * d),
        saved=Poly(bs=2.0),  # token numbers are int64
    )
    return Layer(
        name="embed",
        params=tuple(params),
        ops=(lookup,),
        sites=(Site(kind="exit", elements=Poly(bs=d)),),
        boundary=Poly(bs=d),
    )


def _head(config: DecoderConfig) -> Layer:
    d, v = config.hidden_size, config.vocab_size
    weight = Param(name="output.weight", shape=(v, d), cut=0, tied="embed.tokens.weight" if config.tied else "")
    loss = Op(
        name="cross_entropy",
        kind="loss",
        moved=Poly(bs=4.0 * v),
        backward_moved=Poly(bs=3.0 * v),
        saved=Poly(bs=float(v)),  # probabilities, made the gradient in place
        working=Poly(bs=float(v)),  # logits, then their gradient, beside them
        dtype="float32",
        cut="tensor",
    )
    norm = _norm_params(config, "norm")
    return Layer(
        name="head",
        params=(*norm, weight),
        ops=(
            _norm_op(config, "norm"),
            Op(name="output.input", kind="memory", saved=Poly(bs=d), cut="none"),
            matmul("output", v, d),
            loss,
        ),
        sites=(Site(kind="enter", elements=Poly(bs=d), after=len(norm)), Site(kind="loss", elements=Poly(bs=1.0))),
    )


def decoder_profile(config: DecoderConfig, name: str) -> Profile:
    return Profile(
        name=name,
        layers=(_embed(config), *_blocks(config), _head(config)),
        hidden_size=config.hidden_size,
        max_sequence=config.max_sequence,
    )
