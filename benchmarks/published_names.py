"""Public architectures by name: what a row may leave out. From the models' papers and configuration files.

Facts are cells of a row, so that a row's own cells come first. A row whose layers, width or heads are others is another
model of a similar name, and gets none.
"""

from __future__ import annotations

import re
from typing import NamedTuple

from benchmarks.published_rows import Row, Unscored


class _Known(NamedTuple):
    pattern: str
    """Of the name in small letters, with hyphens for blanks and underscores."""
    sizes: tuple[int, int, int, int, int, int]
    """Layers, width, heads, key/value heads, MLP, vocabulary."""
    family: str
    more: str = ""
    """Other facts, `name=value`."""


def _sizes(layers: int, hidden: int, heads: int, kv: int, ffn: int, vocab: int) -> tuple[int, int, int, int, int, int]:
    return layers, hidden, heads, kv, ffn, vocab


def _gpt(layers: int, hidden: int, heads: int, vocab: int = 50257) -> tuple[int, int, int, int, int, int]:
    return layers, hidden, heads, heads, 4 * hidden, vocab


_LATENT = "kv_rank=512 head_size=128 q_rank={} dense_layers={} shared_experts={} expert_ffn={} experts={} topk={}"
_MOE = "experts={} topk={} expert_ffn={}"

_KNOWN = (
    _Known(r"llama-?2-7b", _sizes(32, 4096, 32, 32, 11008, 32000), "llama"),
    _Known(r"llama-?2-13b", _sizes(40, 5120, 40, 40, 13824, 32000), "llama"),
    _Known(r"llama-?2-34b|codellama-34b", _sizes(48, 8192, 64, 8, 22016, 32000), "llama"),
    _Known(r"llama-?2-70b", _sizes(80, 8192, 64, 8, 28672, 32000), "llama"),
    _Known(r"llama-?3\.2-1b", _sizes(16, 2048, 32, 8, 8192, 128256), "llama", "tied=1"),
    _Known(r"llama-?3\.2-3b", _sizes(28, 3072, 24, 8, 8192, 128256), "llama", "tied=1"),
    _Known(r"llama-?3(\.1)?-8b", _sizes(32, 4096, 32, 8, 14336, 128256), "llama"),
    _Known(r"llama-?3(\.[13])?-70b", _sizes(80, 8192, 64, 8, 28672, 128256), "llama"),
    _Known(r"llama-?3(\.1)?-405b", _sizes(126, 16384, 128, 8, 53248, 128256), "llama"),
    _Known(
        r"llama-?4-scout",
        _sizes(48, 5120, 40, 8, 16384, 202048),
        "llama",
        _MOE.format(16, 1, 8192) + " shared_experts=1",
    ),
    _Known(r"tiny-?llama", _sizes(22, 2048, 32, 4, 5632, 32000), "llama"),
    _Known(r"llama-7b", _sizes(32, 4096, 32, 32, 11008, 32000), "llama"),
    _Known(r"llama-13b", _sizes(40, 5120, 40, 40, 13824, 32000), "llama"),
    _Known(r"llama-3[03]b", _sizes(60, 6656, 52, 52, 17920, 32000), "llama"),
    _Known(r"llama-65b", _sizes(80, 8192, 64, 64, 22016, 32000), "llama"),
    _Known(r"mistral-nemo", _sizes(40, 5120, 32, 8, 14336, 131072), "mistral", "head_size=128"),
    _Known(r"mistral-(small-)?24b", _sizes(40, 5120, 32, 8, 32768, 131072), "mistral", "head_size=128"),
    _Known(r"mistral-large|mistral-123b", _sizes(88, 12288, 96, 8, 28672, 32768), "mistral"),
    _Known(r"mistral-7b", _sizes(32, 4096, 32, 8, 14336, 32000), "mistral"),
    _Known(r"mixtral-8x7b", _sizes(32, 4096, 32, 8, 14336, 32000), "mixtral", _MOE.format(8, 2, 14336)),
    _Known(r"mixtral-8x22b", _sizes(56, 6144, 48, 8, 16384, 32768), "mixtral", _MOE.format(8, 2, 16384)),
    _Known(r"qwen-?2(\.5)?-0\.5b", _sizes(24, 896, 14, 2, 4864, 151936), "qwen2", "tied=1"),
    _Known(r"qwen-?2(\.5)?-1\.5b", _sizes(28, 1536, 12, 2, 8960, 151936), "qwen2", "tied=1"),
    _Known(r"qwen-?2\.5-3b", _sizes(36, 2048, 16, 2, 11008, 151936), "qwen2", "tied=1"),
    _Known(r"qwen-?2(\.5)?-7b", _sizes(28, 3584, 28, 4, 18944, 152064), "qwen2"),
    _Known(r"qwen-?2\.5-14b", _sizes(48, 5120, 40, 8, 13824, 152064), "qwen2"),
    _Known(r"qwen-?2\.5-32b", _sizes(64, 5120, 40, 8, 27648, 152064), "qwen2"),
    _Known(r"qwen-?2(\.5)?-72b", _sizes(80, 8192, 64, 8, 29568, 152064), "qwen2"),
    _Known(r"qwen-?3-0\.6b", _sizes(28, 1024, 16, 8, 3072, 151936), "qwen3", "tied=1"),
    _Known(r"qwen-?3-1\.7b", _sizes(28, 2048, 16, 8, 6144, 151936), "qwen3", "tied=1"),
    _Known(r"qwen-?3-4b", _sizes(36, 2560, 32, 8, 9728, 151936), "qwen3", "tied=1"),
    _Known(r"qwen-?3-8b", _sizes(36, 4096, 32, 8, 12288, 151936), "qwen3"),
    _Known(r"qwen-?3-14b", _sizes(40, 5120, 40, 8, 17408, 151936), "qwen3"),
    _Known(r"qwen-?3-32b", _sizes(64, 5120, 64, 8, 25600, 151936), "qwen3"),
    _Known(r"qwen-?3-30b", _sizes(48, 2048, 32, 4, 6144, 151936), "qwen3", _MOE.format(128, 8, 768)),
    _Known(r"qwen-?3-235b", _sizes(94, 4096, 64, 4, 12288, 151936), "qwen3", _MOE.format(128, 8, 1536)),
    _Known(r"gemma-?2-2b", _sizes(26, 2304, 8, 4, 9216, 256000), "gemma", "head_size=256 tied=1"),
    _Known(r"gemma-?2-9b", _sizes(42, 3584, 16, 8, 14336, 256000), "gemma", "head_size=256 tied=1"),
    _Known(r"gemma-?2-27b", _sizes(46, 4608, 32, 16, 36864, 256000), "gemma", "head_size=128 tied=1"),
    _Known(r"gemma-?3-1b", _sizes(26, 1152, 4, 1, 6912, 262144), "gemma", "head_size=256 tied=1"),
    _Known(r"gemma-?3-4b", _sizes(34, 2560, 8, 4, 10240, 262208), "gemma", "head_size=256 tied=1"),
    _Known(r"gemma-?3-12b", _sizes(48, 3840, 16, 8, 15360, 262208), "gemma", "head_size=256 tied=1"),
    _Known(r"gemma-?3-27b", _sizes(62, 5376, 32, 16, 21504, 262208), "gemma", "head_size=128 tied=1"),
    _Known(r"gemma-(1\.1-)?2b", _sizes(18, 2048, 8, 1, 16384, 256000), "gemma", "head_size=256 tied=1"),
    _Known(r"gemma-(1\.1-)?7b", _sizes(28, 3072, 16, 16, 24576, 256000), "gemma", "head_size=256 tied=1"),
    _Known(r"phi-1(\.5)?\b", _gpt(24, 2048, 32, 51200), "phi", "tied=0"),
    _Known(r"phi-2\b", _gpt(32, 2560, 32, 51200), "phi", "tied=0"),
    _Known(r"phi-3(\.5)?-mini", _sizes(32, 3072, 32, 32, 8192, 32064), "phi-3 (swiglu)"),
    _Known(r"phi-3-medium", _sizes(40, 5120, 40, 10, 17920, 32064), "phi-3 (swiglu)"),
    _Known(r"phi-4\b", _sizes(40, 5120, 40, 10, 17920, 100352), "phi-4 (swiglu)"),
    _Known(r"falcon-7b", _sizes(32, 4544, 71, 1, 18176, 65024), "falcon", "tied=1"),
    _Known(r"falcon-40b", _sizes(60, 8192, 128, 8, 32768, 65024), "falcon", "tied=1"),
    _Known(r"falcon-180b", _sizes(80, 14848, 232, 8, 59392, 65024), "falcon", "tied=1"),
    _Known(r"stablelm-(base-|tuned-)?alpha-3b", _gpt(16, 4096, 32, 50688), "stablelm", "tied=0"),
    _Known(r"stablelm-(base-|tuned-)?alpha-7b", _gpt(16, 6144, 48, 50688), "stablelm", "tied=0"),
    _Known(r"pythia-160m", _gpt(12, 768, 12, 50304), "gpt-neox", "tied=0"),
    _Known(r"pythia-410m", _gpt(24, 1024, 16, 50304), "gpt-neox", "tied=0"),
    _Known(r"pythia-1b", _gpt(16, 2048, 8, 50304), "gpt-neox", "tied=0"),
    _Known(r"pythia-1\.4b", _gpt(24, 2048, 16, 50304), "gpt-neox", "tied=0"),
    _Known(r"pythia-2\.8b", _gpt(32, 2560, 32, 50304), "gpt-neox", "tied=0"),
    _Known(r"pythia-6\.9b", _gpt(32, 4096, 32, 50432), "gpt-neox", "tied=0"),
    _Known(r"pythia-12b", _gpt(36, 5120, 40, 50688), "gpt-neox", "tied=0"),
    _Known(r"gpt-?neox-20b", _gpt(44, 6144, 64, 50432), "gpt-neox", "tied=0"),
    _Known(r"gpt-?j-6b", _gpt(28, 4096, 16, 50400), "gpt-j", "tied=0"),
    _Known(r"gpt-?2-xl", _gpt(48, 1600, 25), "gpt2"),
    _Known(r"gpt-?2-large", _gpt(36, 1280, 20), "gpt2"),
    _Known(r"gpt-?2-medium", _gpt(24, 1024, 16), "gpt2"),
    _Known(r"gpt-?2(-small|-124m)?$", _gpt(12, 768, 12), "gpt2"),
    _Known(r"gpt-?3-12[56]m", _gpt(12, 768, 12), "gpt3"),
    _Known(r"gpt-?3-35[0-9]m", _gpt(24, 1024, 16), "gpt3"),
    _Known(r"gpt-?3-760m", _gpt(24, 1536, 16), "gpt3"),
    _Known(r"gpt-?3-1\.3b", _gpt(24, 2048, 16), "gpt3"),
    _Known(r"gpt-?3-2\.7b", _gpt(32, 2560, 32), "gpt3"),
    _Known(r"gpt-?3-6\.7b", _gpt(32, 4096, 32), "gpt3"),
    _Known(r"gpt-?3-13b", _gpt(40, 5120, 40), "gpt3"),
    _Known(r"gpt-?3-175b", _gpt(96, 12288, 96), "gpt3"),
    _Known(r"opt-125m", _gpt(12, 768, 12, 50272), "opt"),
    _Known(r"opt-1\.3b", _gpt(24, 2048, 32, 50272), "opt"),
    _Known(r"opt-2\.7b", _gpt(32, 2560, 32, 50272), "opt"),
    _Known(r"opt-6\.7b", _gpt(32, 4096, 32, 50272), "opt"),
    _Known(r"opt-13b", _gpt(40, 5120, 40, 50272), "opt"),
    _Known(r"opt-30b", _gpt(48, 7168, 56, 50272), "opt"),
    _Known(r"opt-66b", _gpt(64, 9216, 72, 50272), "opt"),
    _Known(r"opt-175b", _gpt(96, 12288, 96, 50272), "opt"),
    _Known(r"bloom-560m", _gpt(24, 1024, 16, 250880), "bloom"),
    _Known(r"bloom-3b", _gpt(30, 2560, 32, 250880), "bloom"),
    _Known(r"bloom-7b", _gpt(30, 4096, 32, 250880), "bloom"),
    _Known(r"bloom(-176b)?$", _gpt(70, 14336, 112, 250880), "bloom"),
    _Known(r"nemotron-?4-15b", _sizes(32, 6144, 48, 8, 24576, 256000), "nemotron", "tied=0"),
    _Known(r"nemotron(-?4)?-340b", _sizes(96, 18432, 96, 8, 73728, 256000), "nemotron", "tied=0"),
    _Known(r"nemotron(-?3)?-8b", _sizes(32, 4096, 32, 32, 16384, 256000), "nemotron", "tied=0"),
    _Known(r"grok-?1", _sizes(64, 6144, 48, 8, 32768, 131072), "grok", _MOE.format(8, 2, 32768)),
    _Known(r"gpt-?oss-20b", _sizes(24, 2880, 64, 8, 2880, 201088), "gpt-oss", _MOE.format(32, 4, 2880)),
    _Known(r"gpt-?oss-120b", _sizes(36, 2880, 64, 8, 2880, 201088), "gpt-oss", _MOE.format(128, 4, 2880)),
    _Known(r"olmoe", _sizes(16, 2048, 16, 16, 1024, 50304), "olmoe", _MOE.format(64, 8, 1024)),
    _Known(r"olmo-?2-7b", _sizes(32, 4096, 32, 32, 11008, 100352), "olmo (swiglu)"),
    _Known(r"dbrx", _sizes(40, 6144, 48, 8, 10752, 100352), "dbrx", _MOE.format(16, 4, 10752)),
    _Known(r"\byi-6b", _sizes(32, 4096, 32, 4, 11008, 64000), "yi"),
    _Known(r"\byi-34b", _sizes(60, 7168, 56, 8, 20480, 64000), "yi"),
    _Known(r"smollm2?-135m", _sizes(30, 576, 9, 3, 1536, 49152), "llama", "tied=1"),
    _Known(r"smollm2?-360m", _sizes(32, 960, 15, 5, 2560, 49152), "llama", "tied=1"),
    _Known(r"smollm2?-1\.7b", _sizes(24, 2048, 32, 32, 8192, 49152), "llama", "tied=1"),
    _Known(r"internlm2-20b", _sizes(48, 6144, 48, 8, 16384, 92544), "internlm"),
    _Known(
        r"deepseek-?v2-lite",
        _sizes(27, 2048, 16, 16, 10944, 102400),
        "deepseek",
        _LATENT.format(0, 1, 2, 1408, 64, 6),
    ),
    _Known(
        r"deepseek-?v2", _sizes(60, 5120, 128, 128, 12288, 102400), "deepseek", _LATENT.format(1536, 1, 2, 1536, 160, 6)
    ),
    _Known(
        r"deepseek-?(v3|r1)",
        _sizes(61, 7168, 128, 128, 18432, 129280),
        "deepseek",
        _LATENT.format(1536, 3, 1, 2048, 256, 8),
    ),
    _Known(r"moonlight", _sizes(27, 2048, 16, 16, 11264, 163840), "moonlight", _LATENT.format(0, 1, 2, 1408, 64, 6)),
    _Known(r"kimi-?k2", _sizes(61, 7168, 64, 64, 18432, 163840), "kimi", _LATENT.format(1536, 1, 1, 2048, 384, 8)),
    # NVIDIA's DeepLearningExamples train the large one where they do not say.
    _Known(r"bert-large|languagemodeling/bert$", _sizes(24, 1024, 16, 16, 4096, 30522), "bert"),
    _Known(r"distilbert", _sizes(6, 768, 12, 12, 3072, 30522), "bert"),
    _Known(r"roberta-base", _sizes(12, 768, 12, 12, 3072, 50265), "bert (roberta)"),
    _Known(r"roberta-large", _sizes(24, 1024, 16, 16, 4096, 50265), "bert (roberta)"),
    _Known(r"bert-base", _sizes(12, 768, 12, 12, 3072, 30522), "bert"),
)
_SIZES = ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab")
_SQUAD_TOKENS = "384"
"""What questions and their texts are cut to (Devlin et al. 2019)."""


def plain_name(row: Row) -> str:
    return re.sub(r"[\s_]+", "-", row.text("model").lower())


def answers_questions(row: Row) -> bool:
    """Whether it is trained on SQuAD, as its name or a table's heading says."""
    return any("squad" in row.text(column).lower() for column in ("model", "task", "hardware"))


def known_by_name(row: Row) -> Row:
    """The row with what everybody knows of its model."""
    name = plain_name(row)
    found = next((each for each in _KNOWN if re.search(rf"(?<![a-z]){each.pattern}", name)), None)
    if found is None:
        return row
    facts = {column: str(size) for column, size in zip(_SIZES, found.sizes, strict=True)}
    facts |= {"family": found.family, **dict(part.split("=") for part in found.more.split())}
    if answers_questions(row):
        facts["seq_len"] = _SQUAD_TOKENS
    try:
        is_another = any(row.number(column) not in (None, float(facts[column])) for column in _SIZES[:3])
    except Unscored:
        is_another = True
    return row if is_another else row.filled(facts)
