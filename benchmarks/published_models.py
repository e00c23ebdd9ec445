"""A published row's model and machines, from what it says and what its family is known for.

Where a row is silent: a GPT has 4 d wide MLPs and GPT-2's vocabulary, a Llama gates and no biases; whether embeddings
are tied, and how wide experts are, follows from the number of parameters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

from benchmarks.published_rows import Row, Unscored
from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.core.profile import Profile
from meshwright.models.config import preset as named_model
from meshwright.models.dimensions import Config, DecoderConfig
from meshwright.models.names import profile_of
from meshwright.probe.names import preset

GPT2_VOCAB, VOCAB_MULTIPLE = 50257, 128
"""Megatron pads a vocabulary to a multiple of 128 for each rank that shares it."""
EXPERT_MULTIPLE = 64
ROUND_FRACTION = 0.01
"""Parameters are told in round numbers: 175B."""
_HEAD_SIZES = ((r"gpt.?oss", 64), (r"qwen.?3", 128))
"""Families whose heads are not hidden / heads wide, which no column tells."""
NODE = 8
"""GPUs of a node where a row does not say."""

_GATED = re.compile(r"swiglu|llama|qwen|mistral|mixtral|gemma|internlm|gpt.?oss|\byi\b", re.IGNORECASE)
_NOT_OURS = (
    (r"\bbert|\bt5\b|\bbart\b|roberta|electra", "encoder model"),
    (r"mamba|hybrid", "layers that are no attention (Mamba)"),
    (r"_mla\b|deepseek|moonlight|kimi", "latent attention"),
    (r"frozen", "frozen layers"),
)
_NAMED = (
    (r"\bresnet-?50(v1\.5)?$", "resnet50"),
    (r"\bvgg-?16$", "vgg16"),
    (r"\bvit[-_](b|base)[-_/](patch)?16(_224)?$", "vit-b16"),
    (r"\bvit[-_](l|large)[-_/](patch)?16(_224)?$", "vit-l16"),
)
"""Image models whose name says all."""

# First match wins, so what has no preset stands before the name it contains. PCIe and NVL are other machines.
_DEVICES = (
    (r"GB200|GB300|B300|GH200|\bH20\b|H800|A800|NVL\b|MI2\d0|MI325", None),
    (r"\bB200\b", "b200"),
    (r"\bH200\b", "h200"),
    (r"H100.*PCIe|PCIe.*H100", "h100-pcie"),
    (r"H100", "h100"),
    (r"A100.*PCIe|PCIe.*A100", None),
    (r"A100", "a100-80"),
    (r"V100", "v100"),
    (r"\bL40S\b", "l40s"),
    (r"\b4090\b", "rtx4090"),
    (r"\bMI300X\b", "mi300x"),
)


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Hashable, unlike a cluster: forecasts are remembered by it."""

    device: str
    devices_per_node: int
    num_nodes: int
    outer_bytes_per_second: float | None = None
    """As the row tells; None: as the preset has it."""


def machine(row: Row) -> Machine:
    gpus = row.whole("gpus")
    per_node = min(gpus, row.whole("gpus_per_node", NODE))
    device = _device(row)
    outer = _outer_bytes_per_second(row.text("interconnect"), row.whole("gpus_per_node", NODE))
    return Machine(
        device=device, devices_per_node=per_node, num_nodes=-(-gpus // per_node), outer_bytes_per_second=outer
    )


def _device(row: Row) -> str:
    hardware, memory_gb = row.text("hardware"), row.number("gpu_mem_gb")
    name = next((name for pattern, name in _DEVICES if re.search(pattern, hardware, re.IGNORECASE)), None)
    if name is None:
        uncounted = re.sub(r"\b\d+ ?x ?", "", hardware)
        raise Unscored(f"no preset for {uncounted or 'hardware that is not named'}")
    if name == "a100-80" and (memory_gb == 40 or (memory_gb is None and re.search(r"(?<!or )\b40 ?GB", hardware))):
        return "a100-40" if "or 80" not in hardware else name
    if name == "v100" and (memory_gb == 16 or re.search(r"\b16 ?GB?\b", hardware)):
        raise Unscored("no preset for V100 16GB")
    return name


def _outer_bytes_per_second(interconnect: str, devices_per_node: int) -> float | None:
    """A device's share of its node's cards: `1600 Gbps/node`, `4x100Gb RoCE per node`."""
    if whole := re.search(r"(\d+) ?Gbps/node", interconnect):
        bits = float(whole[1]) * 1e9
    elif cards := re.search(r"(\d+)x(\d+) ?Gb", interconnect):
        bits = int(cards[1]) * int(cards[2]) * 1e9
    else:
        return None
    return bits / 8 / devices_per_node


@cache
def cluster(machine: Machine) -> Cluster:
    name = f"{machine.num_nodes}x{machine.devices_per_node}x{machine.device}"
    found = preset(machine.device).resized(machine.devices_per_node, machine.num_nodes, name=name)
    if machine.outer_bytes_per_second is None:
        return found
    return replace(found, outer=replace(found.outer, bytes_per_second=machine.outer_bytes_per_second))


def sequence(row: Row, config: Config) -> int:
    """Tokens of a sample; 1 where samples are not made of them."""
    return 1 if profile(config).counts == "samples" else row.whole("seq_len")


def model(row: Row) -> Config:
    for pattern, name in _NAMED:
        if re.search(pattern, row.text("model"), re.IGNORECASE) and row.number("layers") is None:
            return named_model(name)
    return decoder(row)


def decoder(row: Row) -> DecoderConfig:
    named = f"{row.text('family')} {row.text('model')}"
    for pattern, reason in _NOT_OURS:
        if re.search(pattern, named, re.IGNORECASE):
            raise Unscored(reason)
    if not (row.number("layers") and row.number("hidden") and row.number("heads")):
        raise Unscored(f"no layers, hidden or heads ({row.text('family') or 'family not named'})")
    experts = row.whole("experts", 0, least=0)
    is_gated = _GATED.search(named) is not None or experts > 0
    try:
        head = next((size for pattern, size in _HEAD_SIZES if re.search(pattern, named, re.IGNORECASE)), 0)
        config = DecoderConfig(**_sizes(row, is_gated), **_style(is_gated, named), head_size=head)
        config = with_experts(config, experts, row) if experts > 1 else config
        return _tied(config, row, named)
    except MeshwrightError as error:
        raise Unscored(f"model: {reason_of(error.problems[0])}") from None


def _sizes(row: Row, is_gated: bool) -> dict[str, int]:
    hidden, heads, tp = row.whole("hidden"), row.whole("heads"), row.whole("tp", 1)
    # A Llama's MLP has as many parameters as a GPT's: two thirds of 4 d for each of three matrices.
    usual_ffn = -(-8 * hidden // 3 // 256) * 256 if is_gated else 4 * hidden
    is_gpt = not is_gated or row.text("family").lower().startswith("gpt")
    vocab = row.whole("vocab", GPT2_VOCAB if is_gpt else None)
    if vocab % tp:
        vocab = -(-vocab // (VOCAB_MULTIPLE * tp)) * VOCAB_MULTIPLE * tp
    return {
        "num_layers": row.whole("layers"),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": row.whole("kv_heads", heads),
        "ffn_size": row.whole("ffn", usual_ffn),
        "vocab_size": vocab,
        "max_sequence": row.whole("seq_len"),
    }


def _style(is_gated: bool, named: str) -> dict[str, Any]:
    if is_gated:
        return {}
    has_bias = "no bias" not in named
    return {"positions": "learned", "norm": "layer", "mlp": "gelu", "bias": has_bias, "qkv_bias": has_bias}


def _tied(config: DecoderConfig, row: Row, named: str) -> DecoderConfig:
    """As the family does, unless the number of parameters that is told says otherwise."""
    is_tied = "untie" not in named and ("tied emb" in named or config.positions == "learned")
    usual, other = replace(config, tied=is_tied), replace(config, tied=not is_tied)
    told = row.number("params")
    if "tie" in row.text("family") or "untie" in named or not told:
        return usual
    usual_gap, other_gap = (abs(profile(each).num_params / told - 1) for each in (usual, other))
    return usual if usual_gap <= max(ROUND_FRACTION, other_gap) else other


def with_experts(config: DecoderConfig, count: int, row: Row) -> DecoderConfig:
    """Experts of the width that makes up the number of parameters: the table has only the dense MLP's."""
    told, topk = row.number("params"), row.whole("topk")
    if not told:
        raise Unscored("width of the experts is not known")
    experts = {"num_experts": count, "experts_per_token": topk}
    thin = replace(config, **experts, expert_ffn_size=EXPERT_MULTIPLE)
    thick = replace(config, **experts, expert_ffn_size=2 * EXPERT_MULTIPLE)
    least, step = profile(thin).num_params, profile(thick).num_params - profile(thin).num_params
    width = EXPERT_MULTIPLE * (1 + round((told - least) / step))
    if width < EXPERT_MULTIPLE:
        raise Unscored("width of the experts is not known")
    return replace(thin, expert_ffn_size=width)


@cache
def profile(config: Config) -> Profile:
    return profile_of(config, "published")


def reason_of(problem: Any) -> str:
    """A problem without its numbers: equal reasons are counted together."""
    text = re.sub(r"\b\d+x\d+x", "", f"{problem.where}: {problem.what}")
    return re.sub(r"(?<![a-z\d])\d+", "#", text).rstrip(".")
