"""Tiny random models of transformers, saved as it saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 5e5,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
GPT2 = {"vocab_size": 96, "n_positions": 64, "n_embd": 64, "n_layer": 2, "n_head": 4, "bos_token_id": 1}
# name -> (class of config, class of model, settings)
MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "eos_token_id": 2}),
    "gpt2-untied": ("GPT2Config", "GPT2LMHeadModel", {**GPT2, "eos_token_id": 2, "tie_word_embeddings": False}),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {**SIZES, "rope_parameters": LLAMA3_ROPE}),
    "llama-tied": ("LlamaConfig", "LlamaForCausalLM", {**SIZES, "tie_word_embeddings": True, "head_dim": 32}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {**SIZES, "sliding_window": 8}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {**SIZES, "tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {**SIZES, "head_dim": 32}),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {**SIZES, "num_local_experts": 4, "num_experts_per_tok": 2}),
}


def quiet_transformers() -> Any:
    import transformers

    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    return transformers


def randomise(model: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Biases and norms too, which start as constants that could be mistaken for one another."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.add_(torch.empty_like(each).normal_(0, 0.05, generator=generator))
    return model.eval()


def make(name: str, folder: Path, **save: Any) -> Any:
    transformers = quiet_transformers()
    config, kind, settings = MODELS[name]
    model = randomise(getattr(transformers, kind)(getattr(transformers, config)(**settings)))
    model.save_pretrained(folder, **save)
    return model


def tokens() -> Tensor:
    return torch.randint(0, 96, (2, 48), generator=torch.Generator().manual_seed(3))


def logits(model: torch.nn.Module) -> Tensor:
    with torch.no_grad():
        out = model(tokens())
    return out if isinstance(out, Tensor) else out.logits
