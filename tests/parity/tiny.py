"""The tiny models and plans of this folder, and the two questions asked of them."""

from __future__ import annotations

from typing import Any

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import Technique, technique_named
from meshwright.models.cost_decoder import decoder_profile
from meshwright.models.presets import DecoderConfig

SEQUENCE = 16
BATCH = 8
STEPS = 3
EXACT = 1e-9
"""Relative to the global norm; in float64 about 1e-15 is reached."""

# Weights large enough that every part of the model moves the loss; the gradient norm is then above the clip.
LLAMA: dict[str, Any] = {
    "num_layers": 4,
    "hidden_size": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "ffn_size": 24,
    "vocab_size": 36,
    "max_sequence": 32,
    "init_std": 0.2,
}
QWEN = LLAMA | {"qk_norm": True, "tied": True, "qkv_bias": True}
GPT = LLAMA | {
    "positions": "learned",
    "norm": "layer",
    "mlp": "gelu",
    "bias": True,
    "qkv_bias": True,
    "tied": True,
    "num_kv_heads": 4,
}
# Smaller weights: a router rounded to bf16 must not send tokens elsewhere.
MOE = QWEN | {
    "init_std": 0.15,
    "num_layers": 2,
    "num_experts": 4,
    "experts_per_token": 2,
    "expert_ffn_size": 12,
    "balance": 0.1,
}
FAMILIES = {"llama": LLAMA, "qwen": QWEN, "gpt": GPT}

ADAMW = {"name": "adamw", "lr": 1e-2, "clip": 0.5}
SGD = {"name": "sgd", "lr": 1e-2, "clip": 0.5, "momentum": 0.9}


def t(name: str, **settings: Any) -> Technique:
    return technique_named(name)(**settings)


REPLICATE = t("replicate", size=2)
SHARD1, SHARD2, SHARD3 = (t("shard", size=2, stage=stage) for stage in (1, 2, 3))
TENSOR, SEQUENCED = (t("tensor", size=2, sequence=sequence) for sequence in (False, True))
PIPELINE = t("pipeline", size=2)
UNEVEN = t("pipeline", size=2, stages=(1, 3))
GPIPE = t("pipeline", size=2, schedule="gpipe")
INTERLEAVED = t("pipeline", size=2, schedule="interleaved")
ZBV = t("pipeline", size=2, schedule="zbv")
RING, ULYSSES = (t("context", size=2, kind=kind) for kind in ("ring", "ulysses"))
EXPERT = t("expert", size=2)
ROWS = t("rows", size=2)
RECOMPUTE, RECOMPUTE_ONE = t("recompute"), t("recompute", layers=1)
RECOMPUTE_SOME = t("recompute", layers="first 1", selective="first 1")
CHUNKED = t("chunked_loss", chunks=4)
COMPILE = t("compile", backend="aot_eager")
BF16 = t("precision", dtype="bf16")
IN_BACKWARD = t("update_in_backward")
OFFLOAD, OFFLOAD_ONE = (t("offload_activations", layers=layers, smallest=300) for layers in ("all", "last 1"))
OFFLOAD_INPUTS = t("offload_activations", layers="none", inputs=True, smallest=300)
COMPRESS, COMPRESS_ONE = (t("compress_activations", layers=layers) for layers in ("all", "last 1"))
ON_HOST, ON_HOST_AHEAD = t("offload_states", share=0.5), t("offload_states", ahead=True, host_ranks=2)
ON_DISK = t("offload_states", disk_share=0.5)
STREAMED = t("stream_weights")
EVERY_STEP = t("multi_rate", layers="first 1", every=1)
UNCUT = t("local_loss", every=2)
KEEP_ALL = t("compress_gradients", codec="topk", keep=1.0)
ISLANDS = t("local_steps", size=2, every=1, outer="average")
PEERS = t("gossip", size=2)
SERVED = t("parameter_server", size=2)
LOW_BIT, LOWEST_BIT = (t("lowbit_optimizer", bits=bits, smallest=100) for bits in (8, 4))

ALONE = (
    REPLICATE,
    SHARD1,
    SHARD2,
    SHARD3,
    TENSOR,
    SEQUENCED,
    UNEVEN,
    GPIPE,
    RECOMPUTE_ONE,
    RECOMPUTE,
    CHUNKED,
    COMPILE,
)
CUBES = (
    (REPLICATE, SEQUENCED, PIPELINE),
    (SHARD3, TENSOR, UNEVEN),
    (REPLICATE, SHARD3, TENSOR),
    (REPLICATE, SHARD1, GPIPE),
    (SHARD2, SEQUENCED, PIPELINE, RECOMPUTE_ONE, CHUNKED, COMPILE),
)
"""2 x 2 x 2 ranks."""

LONG_CUBES = (
    (REPLICATE, INTERLEAVED, RING),
    (SHARD3, INTERLEAVED, RING, RECOMPUTE_ONE),
    (REPLICATE, ZBV, RING),
    (REPLICATE, TENSOR, PIPELINE, RING),
)
"""With the sequence split; the last one has four axes, 16 ranks."""
EXPERT_CUBES = (
    (EXPERT, SHARD2, RING, RECOMPUTE),
    (EXPERT, SEQUENCED, RING),
    (EXPERT, TENSOR, PIPELINE, RING),
)
"""With experts shared out, on a model that has some; the last one on 16 ranks."""

LONG = (
    t("replicate", size=4),
    t("shard", size=4),
    t("tensor", size=4),
    t("tensor", size=4, sequence=True),
    t("pipeline", size=4),
    t("pipeline", size=3, stages=(1, 2, 1), schedule="gpipe"),
)
RAGGED = ((t("shard", size=4),), (SHARD3, TENSOR), (SHARD1, SEQUENCED))
"""For 37 words."""
SHARING = (
    (PIPELINE,),
    (REPLICATE,),
    (SHARD1,),
    (SHARD2,),
    (SHARD3,),
    (TENSOR,),
    (SEQUENCED,),
    (ZBV,),
    (INTERLEAVED,),
    (RING,),
    (ULYSSES,),
    (EXPERT,),
    (t("replicate", size=4),),
    (t("shard", size=4),),
    (t("tensor", size=4, sequence=True),),
    (t("pipeline", size=4),),
    (t("context", size=4),),
    (t("expert", size=4),),
    (SHARD3, TENSOR),
    (REPLICATE, SHARD2),
    (SEQUENCED, PIPELINE),
    (SHARD3, INTERLEAVED, RECOMPUTE_ONE),
    (EXPERT, RING),
    (TENSOR, RING, CHUNKED),
)
"""Plans of two and of four ranks: what ranks that share one GPU run."""
FOR_SGD = ((SHARD3,), (REPLICATE, SEQUENCED), (UNEVEN, SHARD2))
IN_BF16 = ((), (REPLICATE,), (SHARD3,), (SEQUENCED,), (PIPELINE, RECOMPUTE))

# bf16 keeps 8 bits, so 2^-8 of each number is lost. With equal weights (the first step) losses and gradients are a
# rounding or two apart. Later weights are not equal: Adam makes whole steps of the signs of the smallest gradients.
# The weights stay within a rounding of each other and so do the losses; single gradients are not bounded any more.
ROUNDED = {
    "first loss": 2**-8,
    "first gradient": 2**-7,
    "first gradient norm": 2**-7,
    "loss": 2**-8,
    "parameter": 2**-8,
}

WIDE = LLAMA | {"hidden_size": 32, "ffn_size": 64, "init_std": 0.1}
"""Linear layers of multiples of 16; cut in two, keys and values are not, and stay in 16 bits."""
FP8 = t("precision", matmul="fp8_tensorwise")
ALL_FP8 = t("precision", matmul="fp8_tensorwise", edge_blocks=0)
BY_ROW = t("precision", matmul="fp8_rowwise", edge_blocks=0)
# Single elements of a gradient are off by a few hundredths of its norm, losses by far less.
LOSSY = {"first loss": 2**-7, "first gradient": 2**-4, "first gradient norm": 2**-4, "loss": 2**-5, "parameter": 2**-6}


def profile_of(config: dict[str, Any]) -> Profile:
    return decoder_profile(decode(DecoderConfig, config, "config"), "tiny")


def plan_of(*techniques: Technique, batch: int = BATCH, microbatch: int = 2) -> Plan:
    return Plan(techniques=techniques, batch=batch, microbatch=microbatch)


def departures(answers: list[dict[str, Any]], bounds: dict[str, float]) -> list[str]:
    """Every quantity of every rank beyond its bound."""
    # A stage with nothing to train has no gradient.
    assert set().union(*(answer["errors"] for answer in answers)) >= set(bounds)
    assert all("loss" in answer["errors"] or "first loss" in answer["errors"] for answer in answers)
    return [
        f"rank {rank}: {quantity} differs by {error:.1e} at {place}, more than {bounds[quantity]:.0e}"
        for rank, answer in enumerate(answers)
        for quantity, (error, place) in answer["errors"].items()
        if quantity in bounds and not error <= bounds[quantity]
    ]


def model_for(techniques: tuple[Technique, ...]) -> dict[str, Any]:
    """Fewer layers where eight ranks must compile them."""
    return QWEN | {"num_layers": 2} if COMPILE in techniques else QWEN


def model_for_sharing(plan: Plan) -> dict[str, Any]:
    """A model that a plan of `SHARING` can cut."""
    tensor = plan.technique("tensor")
    return MOE if plan.technique("expert") else GPT if tensor is not None and tensor.size == 4 else QWEN


def joined(techniques: tuple[Technique, ...]) -> str:
    """A name for a test."""
    return "+".join(map(str, techniques)) or "one device"


def bounds(exact: float) -> dict[str, float]:
    return dict.fromkeys(("loss", "gradient", "gradient norm", "parameter"), exact)


def price_differences(answers: list[dict[str, Any]]) -> list[str]:
    """Where what moved, or what is held by the rank with the largest pieces, is not what was promised."""
    found = []
    for rank, answer in enumerate(answers):
        moved, promised = map(tuple, answer["observed"]), map(tuple, answer["priced"])
        for what in sorted(set(moved) ^ set(promised)):
            where = "moved, not priced" if list(what) in answer["observed"] else "priced, not moved"
            found.append(f"rank {rank}: {where}: {what}")
        if answer["holds_largest"] and answer["state"] != answer["priced_state"]:
            found.append(f"rank {rank}: holds {answer['state']}, priced {answer['priced_state']}")
    assert any(answer["holds_largest"] for answer in answers)
    return found
