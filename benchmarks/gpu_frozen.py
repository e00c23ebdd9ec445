"""The frozen list: cases on which forecasts for one GPU are judged, apart from the cases they were built with.

Written on 16 November 2026, before the work on milestone 8 (fused loss, kernels, precision, recomputation, forecasts of
compiled models) began. None of these cases is in `gpu_cases`, none is a row of a benchmark table.

The rule: nobody measures, profiles or forecasts a case of this list while building. The list is run once, when all is
done (`python -m benchmarks.gpu forecast --frozen`), and its errors of peak allocated, peak reserved and step time are
reported apart. A case is never changed, added or removed afterwards; one that cannot run any more stays, as a failure.
Its goals: allocated 3 % median, 8 % at the 90th percentile, none above 12 %; reserved 5 % and 12 %; time 5 % and 10 %.

Cases are plain data, so that nothing but the names of models, dimensions and techniques can change what they mean:

    model        a preset (`mw profile`), or "benchmarks.gpu_frozen:hf" for a module of transformers
    change       dimensions of the preset that differ
    arguments    of the function
    batch, microbatch, sequence    as in a plan; a microbatch that is not given is the batch; images have no sequence
    documents    lengths of the documents packed into every row; not given: a row is one document
    techniques   as in a plan; "bf16" is the precision technique with its defaults. None at all is float32.

Every case runs on one 139 GiB GPU with AdamW and clipping, the defaults of `mw.build`.
"""

from __future__ import annotations

from typing import Any

BF16 = {"name": "precision"}
COMPILE = {"name": "compile"}
CHUNKED = {"name": "chunked_loss"}
RECOMPUTE = {"name": "recompute"}


def selective(blocks: str) -> dict[str, Any]:
    """These blocks keep products and attention only."""
    return {"name": "recompute", "layers": "none", "selective": blocks}


_MIXTRAL = {"num_layers": 6, "hidden_size": 1536, "num_heads": 12, "num_kv_heads": 4, "expert_ffn_size": 5376}
_DEEPSEEK = {
    "num_layers": 6,
    "hidden_size": 1536,
    "num_heads": 12,
    "num_kv_heads": 12,
    "ffn_size": 8192,
    "num_experts": 48,
    "experts_per_token": 4,
    "expert_ffn_size": 1024,
    "num_dense_layers": 1,
    "vocab_size": 100352,
}
_KIMI = {**_DEEPSEEK, "num_layers": 5, "hidden_size": 1792, "num_heads": 14, "num_kv_heads": 14, "num_experts": 96}
_TABLES = [2_000_000, 39043, 17289, 7420, 20263, 3, 7120, 1543, 63, 2_000_000, 1_000_000, 403346, 10, 2208, 11938, 155]

_DECODERS: tuple[dict[str, Any], ...] = (
    {
        "name": "llama3.2-1b, 8 x 2048, compiled",
        "model": "llama3.2-1b",
        "batch": 8,
        "sequence": 2048,
        "techniques": [BF16, COMPILE],
    },
    {
        "name": "llama3.2-1b, 2 x 16384, compiled, chunked loss",
        "model": "llama3.2-1b",
        "batch": 2,
        "sequence": 16384,
        "techniques": [BF16, COMPILE, CHUNKED],
    },
    {
        "name": "llama3.2-1b, 16 x 1024 in 4, eager",
        "model": "llama3.2-1b",
        "batch": 16,
        "microbatch": 4,
        "sequence": 1024,
        "techniques": [BF16],
    },
    {
        "name": "llama3.2-3b, 2 x 8192, compiled, selective everywhere",
        "model": "llama3.2-3b",
        "batch": 2,
        "sequence": 8192,
        "techniques": [BF16, COMPILE, selective("0-27")],
    },
    {
        "name": "llama3.2-3b, 4 x 2048, eager, recompute, chunked loss",
        "model": "llama3.2-3b",
        "batch": 4,
        "sequence": 2048,
        "techniques": [BF16, RECOMPUTE, CHUNKED],
    },
    {
        "name": "llama3-8b x6, 2 x 8192, compiled",
        "model": "llama3-8b",
        "change": {"num_layers": 6},
        "batch": 2,
        "sequence": 8192,
        "techniques": [BF16, COMPILE],
    },
    {
        "name": "llama3-8b x5, 1 x 32768, compiled, recompute, chunked loss",
        "model": "llama3-8b",
        "change": {"num_layers": 5, "max_sequence": 32768},
        "batch": 1,
        "sequence": 32768,
        "techniques": [BF16, COMPILE, RECOMPUTE, CHUNKED],
    },
    {
        "name": "mistral-7b x7, 6 x 2048 in 3, compiled, three full and four selective",
        "model": "mistral-7b",
        "change": {"num_layers": 7},
        "batch": 6,
        "microbatch": 2,
        "sequence": 2048,
        "techniques": [BF16, COMPILE, {"name": "recompute", "layers": "0-2", "selective": "3-6"}],
    },
    {
        "name": "llama3-8b x2, 2 x 2048, float32, eager",
        "model": "llama3-8b",
        "change": {"num_layers": 2, "vocab_size": 64000},
        "batch": 2,
        "sequence": 2048,
        "techniques": [],
    },
    {
        "name": "gpt2-medium, 16 x 1024, compiled",
        "model": "gpt2-medium",
        "batch": 16,
        "sequence": 1024,
        "techniques": [BF16, COMPILE],
    },
    {
        "name": "gpt2-large, 8 x 1024, eager",
        "model": "gpt2-large",
        "batch": 8,
        "sequence": 1024,
        "techniques": [BF16],
    },
    {
        "name": "gpt2-large, 24 x 512 in 2, compiled, selective on half",
        "model": "gpt2-large",
        "batch": 24,
        "microbatch": 12,
        "sequence": 512,
        "techniques": [BF16, COMPILE, selective("0-17")],
    },
    {
        "name": "qwen3-0.6b, 8 x 4096, compiled",
        "model": "qwen3-0.6b",
        "batch": 8,
        "sequence": 4096,
        "techniques": [BF16, COMPILE],
    },
    {
        "name": "qwen3-1.7b, 4 x 4096, eager, recompute",
        "model": "qwen3-1.7b",
        "batch": 4,
        "sequence": 4096,
        "techniques": [BF16, RECOMPUTE],
    },
    {
        "name": "qwen3-4b x12, 2 x 8192, compiled, chunked loss",
        "model": "qwen3-4b",
        "change": {"num_layers": 12},
        "batch": 2,
        "sequence": 8192,
        "techniques": [BF16, COMPILE, CHUNKED],
    },
    {
        "name": "mixtral-like of 1536 x6, 4 x 2048, eager",
        "model": "mixtral-8x7b",
        "change": _MIXTRAL,
        "batch": 4,
        "sequence": 2048,
        "techniques": [BF16],
    },
    {
        "name": "mixtral-8x7b x3, 1 x 8192, compiled, selective everywhere",
        "model": "mixtral-8x7b",
        "change": {"num_layers": 3},
        "batch": 1,
        "sequence": 8192,
        "techniques": [BF16, COMPILE, selective("0-2")],
    },
    {
        "name": "deepseek-like of 48 experts x6, 4 x 2048, compiled",
        "model": "deepseek-v3-like",
        "change": _DEEPSEEK,
        "batch": 4,
        "sequence": 2048,
        "techniques": [BF16, COMPILE],
    },
    {
        "name": "kimi-like of 96 experts x5, 4 x 2048 in 2, eager, chunked loss",
        "model": "kimi-k2-like",
        "change": _KIMI,
        "batch": 4,
        "microbatch": 2,
        "sequence": 2048,
        "techniques": [BF16, CHUNKED],
    },
    {
        "name": "llama3.2-1b, 4 x 8192 of 8 equal documents, compiled",
        "model": "llama3.2-1b",
        "batch": 4,
        "sequence": 8192,
        "documents": [1024] * 8,
        "techniques": [BF16, COMPILE],
    },
    {
        "name": "qwen3-0.6b, 8 x 4096 of uneven documents, eager, selective everywhere",
        "model": "qwen3-0.6b",
        "batch": 8,
        "sequence": 4096,
        "documents": [2500, 96, 700, 33, 511, 256],
        "techniques": [BF16, selective("0-27")],
    },
)

_OTHERS: tuple[dict[str, Any], ...] = (
    {"name": "vit-h14, 64, compiled", "model": "vit-h14", "batch": 64, "techniques": [BF16, COMPILE]},
    {"name": "vit-h14, 40, eager", "model": "vit-h14", "batch": 40, "techniques": [BF16]},
    {
        "name": "vit-l16, 96 in 3, compiled, recompute",
        "model": "vit-l16",
        "batch": 96,
        "microbatch": 32,
        "techniques": [BF16, COMPILE, RECOMPUTE],
    },
    {"name": "resnet50, 256, compiled", "model": "resnet50", "batch": 256, "techniques": [BF16, COMPILE]},
    {"name": "resnet50, 64, float32, eager", "model": "resnet50", "batch": 64, "techniques": []},
    {"name": "vgg16, 32, float32, eager", "model": "vgg16", "batch": 32, "techniques": []},
    {"name": "vgg16, 128, compiled", "model": "vgg16", "batch": 128, "techniques": [BF16, COMPILE]},
    {"name": "dlrm-small, 16384, float32, eager", "model": "dlrm-small", "batch": 16384, "techniques": []},
    {
        "name": "dlrm of 16 tables and five million rows, 4096, eager",
        "model": "dlrm-large",
        "change": {"tables": _TABLES, "embedding_size": 64},
        "batch": 4096,
        "techniques": [BF16],
    },
)

_FOREIGN: tuple[dict[str, Any], ...] = (
    {
        "name": "transformers' Qwen2 of 0.5b, 4 x 2048, eager",
        "model": "benchmarks.gpu_frozen:hf",
        "arguments": {
            "kind": "Qwen2ForCausalLM",
            "hidden_size": 896,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            "intermediate_size": 4864,
            "vocab_size": 151936,
            "tie_word_embeddings": True,
        },
        "batch": 4,
        "sequence": 2048,
        "techniques": [BF16],
    },
    {
        "name": "transformers' GPT-NeoX of 410m, 8 x 2048, compiled",
        "model": "benchmarks.gpu_frozen:hf",
        "arguments": {
            "kind": "GPTNeoXForCausalLM",
            "hidden_size": 1024,
            "num_hidden_layers": 24,
            "num_attention_heads": 16,
            "intermediate_size": 4096,
            "vocab_size": 50304,
            "max_position_embeddings": 2048,
            "hidden_dropout": 0.0,
            "attention_dropout": 0.0,
        },
        "batch": 8,
        "sequence": 2048,
        "techniques": [BF16, COMPILE],
    },
    {
        "name": "transformers' Phi of 1.3b, 4 x 2048, eager, recompute",
        "model": "benchmarks.gpu_frozen:hf",
        "arguments": {
            "kind": "PhiForCausalLM",
            "hidden_size": 2048,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "intermediate_size": 8192,
            "vocab_size": 51200,
            "max_position_embeddings": 2048,
            "resid_pdrop": 0.0,
            "embd_pdrop": 0.0,
        },
        "batch": 4,
        "sequence": 2048,
        "techniques": [BF16, RECOMPUTE],
    },
    {
        "name": "transformers' BERT base, 32 x 512, eager",
        "model": "benchmarks.gpu_frozen:hf",
        "arguments": {
            "kind": "BertForMaskedLM",
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "batch": 32,
        "sequence": 512,
        "techniques": [BF16],
    },
    {
        "name": "transformers' ViT base, 128, eager",
        "model": "benchmarks.gpu_frozen:hf",
        "arguments": {
            "kind": "ViTForImageClassification",
            "image": 224,
            "num_labels": 1000,
            "hidden_dropout_prob": 0.0,
            "attention_probs_dropout_prob": 0.0,
        },
        "batch": 128,
        "techniques": [BF16],
    },
)

CASES = (*_DECODERS, *_OTHERS, *_FOREIGN)


def hf(kind: str, image: int = 0, **config: Any) -> Any:
    """A module of transformers with weights of its own making; with sample inputs where they are images."""
    import torch
    import transformers

    from benchmarks.zoo_hf import Called

    model_class = getattr(transformers, kind)
    module = model_class(model_class.config_class(use_cache=False, **config))
    return (Called(module, ("pixel_values",)), None, torch.zeros(1, 3, image, image)) if image else module
