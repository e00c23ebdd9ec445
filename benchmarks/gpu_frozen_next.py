"""The second frozen list, under the rules of `gpu_frozen`: written on 18 November 2026, after the first one was run and
before anything was changed because of it beyond what docs/performance.md names. Not forecast, profiled or measured by
anybody since; to be run once (`python -m benchmarks.gpu forecast --list next`).
"""

from __future__ import annotations

from typing import Any

from benchmarks.gpu_frozen import BF16, CHUNKED, COMPILE, RECOMPUTE, selective

FP8 = {"name": "precision", "matmul": "fp8_tensorwise"}
NARROW = {"name": "precision", "weights": "bf16"}
LOW_BIT = {"name": "lowbit_optimizer"}
LEAN = {"name": "compile", "keep": "products"}
ONE_GRAPH = {"name": "compile", "scope": "model"}
REPLAYED = {"name": "compile", "scope": "model", "graphs": True}
_OPT = {"kind": "OPTForCausalLM", "hidden_size": 1024, "ffn_dim": 4096, "num_hidden_layers": 20, "dropout": 0.0}
_OPT |= {"num_attention_heads": 16, "word_embed_proj_dim": 1024, "max_position_embeddings": 2048}
_ROBERTA = {"kind": "RobertaForMaskedLM", "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
_ROBERTA |= {"hidden_size": 1024, "num_hidden_layers": 12, "num_attention_heads": 16, "intermediate_size": 4096}


def _case(name: str, model: str, batch: int, sequence: int, *techniques: dict[str, Any], **more: Any) -> dict[str, Any]:
    case = {"name": name, "model": model, "batch": batch, "techniques": list(techniques), **more}
    return case | ({"sequence": sequence} if sequence else {})


_X9, _X4 = {"num_layers": 9}, {"num_layers": 4}
_EXPERTS = {"num_layers": 4, "hidden_size": 2304, "num_heads": 18, "num_kv_heads": 6, "expert_ffn_size": 6912}
CASES: tuple[dict[str, Any], ...] = (
    _case("llama3.2-1b, 6 x 4096 in 3, compiled", "llama3.2-1b", 6, 4096, BF16, COMPILE, microbatch=2),
    _case("llama3.2-1b, 4 x 6144, products alone", "llama3.2-1b", 4, 6144, BF16, LEAN),
    _case("llama3.2-3b, 3 x 4096, fp8, products alone, chunked loss", "llama3.2-3b", 3, 4096, FP8, LEAN, CHUNKED),
    _case("llama3.2-3b, 4 x 3072, bf16 weights, compiled", "llama3.2-3b", 4, 3072, NARROW, COMPILE),
    _case("llama3-8b x9, 2 x 4096, fewer bits", "llama3-8b", 2, 4096, FP8, LEAN, LOW_BIT, change=_X9),
    _case("mistral-7b x4, 8 x 1024, eager", "mistral-7b", 8, 1024, BF16, change=_X4),
    _case(
        "mistral-7b x4, 1 x 24576, compiled, recompute", "mistral-7b", 1, 24576, BF16, COMPILE, RECOMPUTE, change=_X4
    ),
    _case("qwen3-1.7b, 3 x 4096, compiled, selective on half", "qwen3-1.7b", 3, 4096, BF16, COMPILE, selective("0-13")),
    _case("qwen3-0.6b, 12 x 1024, one graph, replayed", "qwen3-0.6b", 12, 1024, BF16, REPLAYED),
    _case("gpt2-124m, 12 x 1024, one graph", "gpt2-124m", 12, 1024, BF16, ONE_GRAPH),
    _case("gpt2-large, 6 x 1024, compiled", "gpt2-large", 6, 1024, BF16, COMPILE),
    _case("gpt2-medium, 24 x 768 in 2, eager, recompute", "gpt2-medium", 24, 768, BF16, RECOMPUTE, microbatch=12),
    _case("mixtral-like of 2304 x4, 3 x 4096, compiled", "mixtral-8x7b", 3, 4096, BF16, COMPILE, change=_EXPERTS),
    _case("mixtral-like of 2304 x4, 4 x 1024, eager", "mixtral-8x7b", 4, 1024, BF16, change=_EXPERTS),
    _case(
        "llama3.2-1b, 6 x 4096 of 16 documents, compiled", "llama3.2-1b", 6, 4096, BF16, COMPILE, documents=[256] * 16
    ),
    _case("vit-b16, 192, one graph", "vit-b16", 192, 0, BF16, ONE_GRAPH),
    _case("vit-h14, 32, compiled", "vit-h14", 32, 0, BF16, COMPILE),
    _case("vit-l16, 24, eager", "vit-l16", 24, 0, BF16),
    _case("resnet50, 192, one graph", "resnet50", 192, 0, BF16, ONE_GRAPH),
    _case("resnet50, 96, eager", "resnet50", 96, 0, BF16),
    _case("vgg16, 96, one graph", "vgg16", 96, 0, BF16, ONE_GRAPH),
    _case("dlrm-small, 32768, eager", "dlrm-small", 32768, 0, BF16),
    _case(
        "transformers' OPT of 300m, 6 x 2048, compiled",
        "benchmarks.gpu_frozen:hf",
        6,
        2048,
        BF16,
        COMPILE,
        arguments=_OPT,
    ),
    _case("transformers' RoBERTa, 24 x 512, eager", "benchmarks.gpu_frozen:hf", 24, 512, BF16, arguments=_ROBERTA),
)
