"""A published row's model, from what it says and what its family is known for.

Where a row is silent: a GPT has 4 d wide MLPs and GPT-2's vocabulary, a Llama gates and no biases; whether embeddings
are tied, and how wide experts are, follows from the number of parameters.
"""

from __future__ import annotations

import re
from dataclasses import replace
from functools import cache
from typing import Any

from benchmarks.published_names import answers_questions, plain_name
from benchmarks.published_rows import Row, Unscored
from benchmarks.published_variants import (
    ALL_LINEAR,
    EVERY_MATMUL,
    LORA_RANK,
    NO_MATMUL,
    PLAIN,
    Latent,
    Lora,
    Variant,
    changed,
)
from meshwright.core.errors import MeshwrightError
from meshwright.core.profile import Profile
from meshwright.models.dimensions import Config, DecoderConfig, ResNetConfig, VGGConfig, ViTConfig
from meshwright.models.presets import profile_of

GPT2_VOCAB, BERT_VOCAB, VOCAB_MULTIPLE = 50257, 30522, 128
"""Megatron pads a vocabulary to a multiple of 128 for each rank that shares it."""
EXPERT_MULTIPLE = 64
ROUND_FRACTION = 0.01
"""Parameters are told in round numbers: 175B."""
SPAN_OUTPUTS = 2
"""Of a head that finds where an answer begins and ends."""
_HEAD_SIZES = ((r"gpt.?oss", 64), (r"qwen.?3", 128))
"""Families whose heads are not hidden / heads wide, which no column tells."""

_GATED = re.compile(
    r"swiglu|llama|qwen|mistral|mixtral|gemma|internlm|gpt.?oss|grok|olmoe|dbrx|deepseek|moonlight|kimi|\byi\b",
    re.IGNORECASE,
)
_ROTARY = re.compile(r"\bphi\b|phi-|falcon|stablelm|neox|pythia|gpt-?j|nemotron", re.IGNORECASE)
"""GPTs in all but their positions."""
_ENCODER = re.compile(r"\bbert|roberta|electra", re.IGNORECASE)
_NOT_OURS = (
    (r"\bt5\b|\bt5|\bbart\b|whisper|marian|nmt\b|\bul2\b", "encoder-decoder model"),
    (r"mamba|hybrid|nemotron.?(3.?)?(nano|h\b)|jamba|rwkv|zamba", "layers that are no attention (Mamba)"),
    (r"_mla\b", "latent attention of unknown size"),
    (r"grpo|ppo|rlhf", "reinforcement learning"),
    (r"frozen(?!_resume)", "frozen layers"),  # Megatron's tests also resume from frozen checkpoints
    (r"transformer-?xl|electra", "model of another kind"),
)

_VGG = {"11": (1, 1, 2, 2, 2), "13": (2, 2, 2, 2, 2), "16": (2, 2, 3, 3, 3), "19": (2, 2, 4, 4, 4)}
_RESNET = {"50": (3, 4, 6, 3), "101": (3, 4, 23, 3), "152": (3, 8, 36, 3)}
_VIT = {
    "tiny": (12, 192, 3, 768),
    "small": (12, 384, 6, 1536),
    "base": (12, 768, 12, 3072),
    "large": (24, 1024, 16, 4096),
    "huge": (32, 1280, 16, 5120),
    "giant": (40, 1408, 16, 6144),
    "gigantic": (48, 1664, 16, 8192),
}
_LETTERS = {"t": "tiny", "s": "small", "b": "base", "l": "large", "h": "huge"}


def sequence(row: Row, config: Config) -> int:
    """Tokens of a sample; 1 where samples are not made of them."""
    return 1 if profile(config).counts == "samples" else row.whole("seq_len")


def model(row: Row) -> Config:
    try:
        image = _image_model(row) if row.number("layers") is None else None
        return image or decoder(row)
    except MeshwrightError as error:
        raise Unscored(f"model: {reason_of(error.problems[0])}") from None


def _image_model(row: Row) -> Config | None:
    """Models whose name says all, beside the size of the images."""
    name = plain_name(row)
    last = name.rsplit("/", maxsplit=1)[-1]
    told = re.search(r"\bimg (\d+)", row.text("notes"))
    size = int(told[1]) if told else 224
    resnet = r"(?:^|/|convnets-)(?:tv-|gluon-|ssl-|swsl-)?(?:resnet-?|rn)(50|101|152)(?:-?v1\.5|-v1b)?$"
    if found := re.search(resnet, name):
        return ResNetConfig(stages=_RESNET[found[1]], image_size=size)
    if found := re.fullmatch(r"(?:tv-)?vgg-?(11|13|16|19)", last):
        return VGGConfig(stages=_VGG[found[1]], image_size=size)
    kinds = "|".join(_VIT)
    if found := re.fullmatch(rf"(?:vit|deit)-({kinds})-patch(\d+)-(\d+)(?:-dino|-sam)?", last):
        return _vit(found[1], int(found[2]), int(found[3]))
    if found := re.fullmatch(r"vit-([tsblh])[/-]?(\d+)", name):
        return _vit(_LETTERS[found[1]], int(found[2]), size)
    if found := re.search(r"ViT-([gG])/(\d+)$", row.text("model")):
        return _vit("gigantic" if found[1] == "G" else "giant", int(found[2]), size)
    return None


def _vit(kind: str, patch: int, size: int) -> ViTConfig:
    layers, hidden, heads, ffn = _VIT[kind]
    return ViTConfig(
        num_layers=layers, hidden_size=hidden, num_heads=heads, ffn_size=ffn, patch_size=patch, image_size=size
    )


def named(row: Row) -> str:
    return f"{row.text('family')} {row.text('model')}"


def check_expressible(row: Row) -> None:
    for pattern, reason in _NOT_OURS:
        if re.search(pattern, named(row), re.IGNORECASE):
            raise Unscored(reason)
    if not (row.number("layers") and row.number("hidden") and row.number("heads")):
        raise Unscored(f"no layers, hidden or heads ({row.text('family') or 'family not named'})")


def decoder(row: Row) -> DecoderConfig:
    check_expressible(row)
    experts = row.whole("experts", 0, least=0)
    is_gated = _GATED.search(named(row)) is not None or experts > 0
    head = next((size for pattern, size in _HEAD_SIZES if re.search(pattern, named(row), re.IGNORECASE)), 0)
    try:
        config = DecoderConfig(
            **_sizes(row, is_gated), **_style(is_gated, named(row)), head_size=row.whole("head_size", head, least=0)
        )
        config = with_experts(config, experts, row) if experts > 1 else config
        return _tied(config, row)
    except MeshwrightError as error:
        raise Unscored(f"model: {reason_of(error.problems[0])}") from None


def variant(row: Row, config: Config) -> Variant:
    """What the configuration has no word for, but for what a plan decides."""
    if not isinstance(config, DecoderConfig):
        return PLAIN
    ranks = row.number("kv_rank")
    if ranks is None and re.search(r"deepseek|moonlight|kimi|\bmla\b", named(row), re.IGNORECASE):
        raise Unscored("latent attention of unknown size")
    latent = Latent(query_rank=row.whole("q_rank", 0, least=0), rank=int(ranks)) if ranks else None
    is_encoder = _ENCODER.search(named(row)) is not None
    classes = SPAN_OUTPUTS if is_encoder and answers_questions(row) else 0
    return Variant(is_causal=not is_encoder, classes=classes, latent=latent, lora=_lora(row))


def _lora(row: Row) -> Lora | None:
    text = f"{row.text('task')} {row.text('precision')}".lower()
    if re.search(r"dora\b|\bia3|p-?tuning", text):
        raise Unscored("adapters of another kind")
    if re.search(r"adapter|prefix", text):
        return Lora(rank=0, targets=EVERY_MATMUL if re.search(r"adapter.?v2", text) else NO_MATMUL)
    if "lora" not in text:
        return None
    rank = re.search(r"\br(?:ank)? ?=? ?(\d+)", text)
    targets = {"targets": ALL_LINEAR} if re.search(r"all[ -]linear", text) else {}
    return Lora(rank=int(rank[1]) if rank else LORA_RANK, **targets)


def _sizes(row: Row, is_gated: bool) -> dict[str, int]:
    hidden, heads, tp = row.whole("hidden"), row.whole("heads"), row.whole("tp", 1)
    # A Llama's MLP has as many parameters as a GPT's: two thirds of 4 d for each of three matrices.
    usual_ffn = -(-8 * hidden // 3 // 256) * 256 if is_gated else 4 * hidden
    is_gpt = not is_gated or row.text("family").lower().startswith("gpt")
    is_encoder = _ENCODER.search(named(row)) is not None
    vocab = row.whole("vocab", BERT_VOCAB if is_encoder else GPT2_VOCAB if is_gpt else None)
    if vocab % (8 * tp):  # nobody multiplies by an odd number of words
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


def _style(is_gated: bool, name: str) -> dict[str, Any]:
    if is_gated:
        return {"qkv_bias": re.search(r"qwen-?2", name, re.IGNORECASE) is not None}
    has_bias = "no bias" not in name and re.search(r"falcon|nemotron", name, re.IGNORECASE) is None
    positions = "rope" if _ROTARY.search(name) else "learned"
    return {"positions": positions, "norm": "layer", "mlp": "gelu", "bias": has_bias, "qkv_bias": has_bias}


def _tied(config: DecoderConfig, row: Row) -> DecoderConfig:
    """As the family does, unless the number of parameters that is told says otherwise."""
    name = named(row)
    if row.text("tied"):
        return replace(config, tied=row.is_on("tied"))
    is_tied = "untie" not in name and ("tied emb" in name or config.mlp == "gelu")
    usual, other = replace(config, tied=is_tied), replace(config, tied=not is_tied)
    told = row.number("params")
    if "tie" in row.text("family") or "untie" in name or not told:
        return usual
    usual_gap, other_gap = (abs(profile(each).num_params / told - 1) for each in (usual, other))
    return usual if usual_gap <= max(ROUND_FRACTION, other_gap) else other


def with_experts(config: DecoderConfig, count: int, row: Row) -> DecoderConfig:
    """Experts as wide as they are known to be, or as makes up the number of parameters."""
    told, topk = row.number("params"), row.whole("topk")
    experts = {
        "num_experts": count,
        "experts_per_token": topk,
        "num_shared_experts": row.whole("shared_experts", 0, least=0),
        "num_dense_layers": row.whole("dense_layers", 0, least=0),
    }
    if known := row.number("expert_ffn"):
        return replace(config, **experts, expert_ffn_size=int(known))
    if not told:
        raise Unscored("width of the experts is not known")
    thin = replace(config, **experts, expert_ffn_size=EXPERT_MULTIPLE)
    thick = replace(config, **experts, expert_ffn_size=2 * EXPERT_MULTIPLE)
    least, step = profile(thin).num_params, profile(thick).num_params - profile(thin).num_params
    width = EXPERT_MULTIPLE * (1 + round((told - least) / step))
    if width < EXPERT_MULTIPLE:
        raise Unscored("width of the experts is not known")
    return replace(thin, expert_ffn_size=width)


@cache
def profile(config: Config, variant: Variant = PLAIN) -> Profile:
    return changed(profile_of(config, "published"), variant)


def is_dense(row: Row) -> bool:
    """A transformer of one kind of block, going one way or both, whose dimensions are known: what we claim to do."""
    if any(re.search(pattern, named(row), re.IGNORECASE) for pattern, _ in _NOT_OURS[:4]):
        return False
    if re.search(r"deepseek|moonlight|kimi|vision|diffusion|cnn|transformer-?xl", named(row), re.IGNORECASE):
        return False
    try:
        return bool(row.number("layers") and row.number("hidden") and row.number("heads")) and (
            row.whole("experts", 0, least=0) <= 1
        )
    except Unscored:
        return False


def reason_of(problem: Any) -> str:
    """A problem without its numbers: equal reasons are counted together."""
    text = re.sub(r"\b\d+x\d+x", "", f"{problem.where}: {problem.what}")
    return re.sub(r"(?<![a-z\d])\d+", "#", text).rstrip(".")
