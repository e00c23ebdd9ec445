"""What a mixture of experts costs in place of a block's MLP, from its dimensions alone. No torch.

Only what surrounds it is compiled with its block: rows that go to their experts are as many as the router says.
"""

from __future__ import annotations

from dataclasses import replace

from meshwright.core.profile import Op, Param, Poly, Site
from meshwright.models.cost_ops import Mlp, gather, kept, matmul, memory, swiglu, two_readers, with_role
from meshwright.models.presets import DecoderConfig


def _sent_by_a_token(config: DecoderConfig) -> float:
    """Choices beyond the capacity of their expert go nowhere; how many find room depends on the router."""
    return config.experts_per_token * min(1.0, config.capacity_factor or 1.0)


def sent_to_experts(config: DecoderConfig, after: int) -> Site:
    """Every choice, or as many as find room; an expert's room in a sequence is a whole number, rounded up."""
    d, factor = config.hidden_size, config.capacity_factor
    rounded = config.num_experts if 0 < factor < 1 else 0
    elements = Poly(bs=_sent_by_a_token(config) * d, b=rounded * d)
    return Site(kind="experts", elements=elements, after=after, at_most=factor > 0)


def experts_mlp(config: DecoderConfig) -> Mlp:
    d, f, count, k = config.hidden_size, config.expert_ffn_size, config.num_experts, config.experts_per_token
    used = k / count
    params = [
        Param(name="mlp.router.weight", shape=(count, d), inside=True),
        Param(name="mlp.experts.gate", shape=(count, f, d), cut=1, units=f, shared_out="experts", used=used),
        Param(name="mlp.experts.up", shape=(count, f, d), cut=1, units=f, shared_out="experts", used=used),
        Param(name="mlp.experts.down", shape=(count, d, f), cut=2, units=f, shared_out="experts", used=used),
    ]
    sent, shared = _sent_by_a_token(config), int(config.num_shared_experts > 0)
    moment = Poly(bs=3.0 * sent * max(d, f) + shared * d)
    ops = [
        two_readers(d, more=2 * shared),
        *with_role("router", _routing(config, sent)),
        *with_role("dispatch", _sending(config, sent)),
        matmul("mlp.experts.gate", f, d, rows=sent, matrices=count, role="experts"),
        matmul("mlp.experts.up", f, d, rows=sent, matrices=count, role="experts"),
        replace(swiglu("mlp.experts.swiglu", sent * f, is_compiled=False), working=moment),
        matmul("mlp.experts.down", d, f, rows=sent, matrices=count, role="experts", cut_dim="k"),
        *with_role("dispatch", _returning(config, sent)),
    ]
    if config.balance:
        ops += with_role("router", _balancing(config, sent))
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
            replace(swiglu("mlp.shared.swiglu", size), working=Poly()),  # the experts' moment is the larger one
            matmul("mlp.shared.down", d, size, cut_dim="k"),
            memory("mlp.shared.sum", 3.0 * d, 0.0, "none", role="residual"),
        ]
    return tuple(params), tuple(ops)


def _routing(config: DecoderConfig, sent: float) -> list[Op]:
    """In float32: the input is cast, scored, and the best experts chosen."""
    d, count, k = float(config.hidden_size), config.num_experts, sent
    is_sigmoid = config.router == "sigmoid"
    router = replace(matmul("mlp.router", count, int(d)), dtype="float32", cut="none")
    given = memory("mlp.router.input", d, 0.0, "none", back=2.0 * d, backward_kernels=3.0, wide=True)
    narrow = memory("mlp.router.narrow", d, 0.0, "none", back=2.0 * d, kernels=0.0)
    weight = Poly(one=count * d, bs=2.0 * d)
    # Scores and shares, a step each: sigmoid and a quotient, or softmax of the chosen.
    moved, back, steps, steps_back = (2.0 * count + 7.0 * k, 5.0 * count + 18.0 * k, 4.0, 10.0)
    if not is_sigmoid:
        moved, back, steps, steps_back = (4.0 * k, count + 5.0 * k, 2.0, 3.0)
    if config.balance:  # scores are read twice
        back, steps_back = back + 3.0 * count, steps_back + 1.0
    scores = memory("mlp.scores", moved, 0.0, "none", back=back, kernels=steps, backward_kernels=steps_back, wide=True)
    choice = replace(gather("mlp.choice", count + 3.0 * k, 2.0 * count + 3.0 * k, "none", 1.0, 1.0), dtype="float32")
    # Scores where they are needed again, shares, and where each choice came from (int64).
    remembered = (count if config.balance or is_sigmoid else 0) + 7.0 * k
    return [
        router,
        replace(given, backward_moved=weight),
        replace(narrow, backward_moved=weight),
        scores,
        choice,
        kept("mlp.choices", remembered, wide=True),
        kept("mlp.shares", k),
    ]


GROUPED_PRODUCTS, GROUPED_PRODUCTS_BACK = 3, 6
"""Each asks where its groups end: a running sum, in int32."""


def _sending(config: DecoderConfig, sent: float) -> list[Op]:
    """Choices sorted by expert, rows copied in that order; going back, added where they came from."""
    d, count, k = float(config.hidden_size), config.num_experts, sent
    ends = 7.0 * count
    order = memory(
        "mlp.order", 4.0 * k + 2.0 * k, 0.0, "none", back=4.0 * k, kernels=3.0, backward_kernels=2.0, wide=True
    )
    sort = replace(gather("mlp.sort", 6.0 * k + 4.0 * k, 6.0 * k, "none", 2.0, 1.0), dtype="float32")
    groups = memory("mlp.groups", 0.0, 0.0, "none", kernels=2.0 * GROUPED_PRODUCTS, wide=True)
    groups = replace(
        groups,
        moved=Poly(one=GROUPED_PRODUCTS * ends),
        backward_moved=Poly(one=GROUPED_PRODUCTS_BACK * ends),
        backward_kernels=2.0 * GROUPED_PRODUCTS_BACK,
    )
    return [
        order,
        sort,
        groups,
        gather("mlp.send", 2.0 * k * d + 4.0 * k, k * d + 2.0 * d + 4.0 * k, "none", 1.0, 1.0),
        kept("mlp.rows", k * d),
        # Two products read the rows: their gradients are added, and sums begin at zero.
        memory("mlp.rows.sum", 0.0, 0.0, "none", back=3.0 * k * d + d, kernels=0.0, backward_kernels=2.0),
    ]


def _returning(config: DecoderConfig, sent: float) -> list[Op]:
    """Rows times their shares, added up by token."""
    d, k = float(config.hidden_size), sent
    weigh = memory("mlp.weigh", 2.0 * k * d + d, k * d, "none", back=6.0 * k * d, kernels=2.0, backward_kernels=3.0)
    return [weigh, gather("mlp.return", (3.0 * d + 4.0) * k, (2.0 * d + 4.0) * k, "none", 1.0, 1.0)]


def _balancing(config: DecoderConfig, sent: float) -> list[Op]:
    """The loss that spreads tokens evenly: sums over sequences, most of them of a number for each expert."""
    count, k = config.num_experts, sent
    is_sigmoid = config.router == "sigmoid"
    moved, kernels = (4.0 * count, 10.0) if is_sigmoid else (3.0 * count, 9.0)
    back, back_kernels = (12.0 * count, 11.0) if is_sigmoid else (5.0 * count, 5.0)
    return [
        memory(
            "mlp.balance", moved + k, 0.0, "none", back=back, kernels=kernels, backward_kernels=back_kernels, wide=True
        ),
        replace(gather("mlp.counts", 5.0 * k, 0.0, "none", 1.0, 0.0), dtype="float32"),
    ]
