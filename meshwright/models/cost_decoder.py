"""What a decoder costs, layer by layer, from its dimensions alone. No torch.

The counts follow `zoo/decoder.py` line by line; `tests/models/test_cost.py` holds the parameters equal to the
real module's and the saved bytes to what autograd really keeps.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.profile import Layer, Op, Param, Poly, Profile, Site
from meshwright.models.cost_moe import experts_mlp, sent_to_experts
from meshwright.models.cost_ops import (
    Mlp,
    bias,
    cross_entropy,
    gather,
    kept,
    matmul,
    memory,
    once,
    swiglu,
    two_readers,
)
from meshwright.models.presets import DecoderConfig


def _norm_params(config: DecoderConfig, name: str) -> tuple[Param, ...]:
    weight = Param(name=f"{name}.weight", shape=(config.hidden_size,))
    if config.norm == "layer":
        return (weight, Param(name=f"{name}.bias", shape=(config.hidden_size,)))
    return (weight,)


def _norm_op(config: DecoderConfig, name: str, *, follows_add: bool = False, joins: bool = True) -> Op:
    """Keeps its input; the few numbers a row beside it are left out, the output is kept by whoever reads it.

    Back: gradient and input are read once for the input's gradient and once for the weight's; where it `joins` the
    residual stream, that gradient is added to the stream's. Compiled, a norm that `follows_add` is of its kernel.
    """
    d = float(config.hidden_size)
    fused = (d, 5.0 * d, 0.0, 2.0) if follows_add else (2.0 * d, 5.0 * d, 1.0, 2.0)
    back, kernels = (8.0 * d, 2.0) if joins else (5.0 * d, 1.0)
    weights = 2.0 * d if config.norm == "layer" else d
    op = memory(name, 2.0 * d, d, "sequence", role="norm", back=back, backward_kernels=kernels, fused=fused)
    return once(op, weights, 2.0 * weights)


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
    # One whole input serves query, key and value: kept once, and not divided by splitting. Its gradients are added.
    ops = [
        memory(
            "attention.input",
            0.0,
            d,
            "none",
            role="input",
            back=6.0 * d,
            kernels=0.0,
            backward_kernels=2.0,
            fused=(0, 3.0 * d, 0, 0),
        ),
        matmul("attention.query", q, d),
        matmul("attention.key", kv, d),
        matmul("attention.value", kv, d),
    ]
    if config.qkv_bias:
        ops.append(bias("attention.biases", q + 2.0 * kv, "tensor", count=3))
    ops += _turned(config, float(q + kv), float(q))
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
    ops.append(kept("attention.statistics", config.num_heads, "tensor", role="attention", wide=True))
    ops.append(matmul("attention.output", d, q, cut_dim="k"))
    if config.bias:
        ops.append(bias("attention.output.bias", d, "none"))
    return tuple(params), tuple(ops)


def _turned(config: DecoderConfig, n: float, q: float) -> list[Op]:
    """Norms of the n elements of queries and keys, and their turning by position."""
    ops = []
    if config.qk_norm:
        fused = (n, 4.0 * n, 1.0, 2.0) if config.positions == "rope" else (2.0 * n, 5.0 * n, 2.0, 4.0)
        ops.append(kept("attention.qk_norm.statistics", n / config.size_of_head, "tensor", role="norm", wide=True))
        ops.append(
            memory(
                "attention.qk_norm",
                2.0 * n,
                n,
                "tensor",
                role="norm",
                back=5.0 * n,
                kernels=2,
                backward_kernels=2,
                fused=fused,
            )
        )
    if config.positions != "rope":
        return ops
    # Four products, a sum and a difference of halves, and a copy that joins them; the same going back. Then heads lie
    # outside of the sequence, and a product reads a copy: of gradients (a norm reads them as they lie), and of
    # attention's output, which takes the layout of the query.
    copied = 0.0 if config.qk_norm else 1.0
    ops.append(
        memory(
            "attention.rope",
            9.0 * n,
            0.0,
            "tensor",
            role="rope",
            back=(9.0 + 2.0 * copied) * n,
            kernels=14.0,
            backward_kernels=16.0 + 2.0 * copied,
            fused=(n, n, 0.0, 1.0) if config.qk_norm else (2.0 * n, 2.0 * n, 1.0, 1.0),
        )
    )
    ops.append(memory("attention.layout", 2.0 * q, q, "tensor", role="layout"))
    return ops


def plain_mlp(config: DecoderConfig) -> Mlp:
    d, f = config.hidden_size, config.ffn_size
    params = [Param(name="mlp.up.weight", shape=(f, d), cut=0, units=f)]
    ops = [matmul("mlp.up", f, d)]
    if config.mlp == "swiglu":
        params.insert(0, Param(name="mlp.gate.weight", shape=(f, d), cut=0, units=f))
        ops.append(matmul("mlp.gate", f, d))
        # The fullest moment is the gradient's, in here or where queries, keys and values have theirs.
        heads = (3 * config.num_heads + 2 * config.num_kv_heads) * config.size_of_head
        ops.append(replace(swiglu("mlp.swiglu", f), working=Poly(bs=max(3 * f, heads))))
        ops.insert(0, two_readers(d))
    else:
        if config.bias:
            params.append(Param(name="mlp.up.bias", shape=(f,), cut=0, units=f))
            ops.append(bias("mlp.up.bias", f, "tensor"))
        ops.append(
            memory(
                "mlp.gelu",
                2.0 * f,
                2.0 * f,
                "tensor",
                role="activation",
                back=3.0 * f,
                backward_kernels=1.0,
                working=2.0 * f,
            )
        )
        ops.insert(
            0, memory("mlp.input", 0.0, d, "none", role="input", kernels=0.0, working=d, fused=(0, float(d), 0, 0))
        )
    params.append(Param(name="mlp.down.weight", shape=(d, f), cut=1, units=f))
    ops.append(matmul("mlp.down", d, f, cut_dim="k"))
    if config.bias:
        params.append(Param(name="mlp.down.bias", shape=(d,)))
        ops.append(bias("mlp.down.bias", d, "none"))
    return tuple(params), tuple(ops)


def _blocks(config: DecoderConfig) -> tuple[Layer, ...]:
    if not config.num_experts:
        return (block_layer(config, "blocks", config.num_layers, plain_mlp(config)),)
    dense = config.num_dense_layers
    routed = block_layer(config, "blocks", config.num_layers - dense, experts_mlp(config))
    return (block_layer(config, "dense_blocks", dense, plain_mlp(config)), routed) if dense else (routed,)


def block_layer(config: DecoderConfig, name: str, repeat: int, mlp: Mlp, is_causal: bool = True) -> Layer:
    d = config.hidden_size
    attention_params, attention_ops = _attention(config, is_causal)
    mlp_params, mlp_ops = mlp
    add = memory("residual", 3.0 * d, 0.0, "sequence", role="residual")  # its gradient goes both ways as it is
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
        sites.append(sent_to_experts(config, before_mlp))
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
            _norm_op(config, "mlp_norm", follows_add=True),
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
    # A dense gradient of the whole table is written.
    lookup = gather("lookup", 2.0 * d + 4.0, 0.0, "none", 1.0, 1.0)
    moment = Poly(bs=d)
    lookup = replace(lookup, backward_moved=Poly(one=v * d, bs=d + 4.0), working=moment)
    ops = [lookup, kept("tokens", 2.0, role="embedding", wide=True)]  # numbers of tokens are int64
    if config.positions == "rope":
        # The tables of cosines and sines: small, but steps all the same.
        steps = 11.0 if config.rope_scaling == "none" else 20.0
        turns = memory("rotary", 0.0, 0.0, "none", role="rope", kernels=steps, wide=True)
        ops.append(replace(turns, moved=Poly(one=config.size_of_head)))
    else:
        ops += _learned_positions(config)
    if config.tied:  # the head's gradient is added
        table = Poly(one=3.0 * v * d)
        ops.append(
            replace(
                memory("tied", 0.0, 0.0, "none", role="embedding", kernels=0, backward_kernels=1), backward_moved=table
            )
        )
    return Layer(
        name="embed",
        params=tuple(params),
        ops=tuple(ops),
        sites=(Site(kind="exit", elements=Poly(bs=d)),),
        boundary=Poly(bs=d),
    )


def _learned_positions(config: DecoderConfig) -> list[Op]:
    d = float(config.hidden_size)
    numbers = memory("places", 0.0, 0.0, "none", role="embedding", wide=True)
    lookup = gather("positions", 0.0, 0.0, "none", 1.0, 1.0)
    table = Poly(one=config.max_sequence * d)
    return [
        replace(numbers, moved=Poly(one=2.0)),
        replace(lookup, moved=Poly(one=d), backward_moved=table),
        memory("add_positions", 2.0 * d, 0.0, "none", role="embedding", back=d, backward_kernels=1.0),
    ]


def _head(config: DecoderConfig) -> Layer:
    d, v = config.hidden_size, config.vocab_size
    weight = Param(name="output.weight", shape=(v, d), cut=0, tied="embed.tokens.weight" if config.tied else "")
    norm = _norm_params(config, "norm")
    return Layer(
        name="head",
        params=(*norm, weight),
        ops=(
            _norm_op(config, "norm", joins=False),
            replace(kept("output.input", d, role="input"), working=Poly(bs=d)),
            matmul("output", v, d),
            *cross_entropy(v, "tensor"),
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
