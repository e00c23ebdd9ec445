"""What transformers' six architectures of our decoder read from config.json, as tables. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What transformers' class of that name does where config.json is silent, and what our decoder cannot do of it."""

    keys: Mapping[str, str]
    """Our field -> its key."""
    defaults: Mapping[str, Any] = field(default_factory=dict)
    only: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """Key -> the values we can honour, the default first."""
    implied: Mapping[str, Any] = field(default_factory=dict)
    """Our fields that the architecture decides."""
    has_rope: bool = True
    default_theta: float = 10_000.0
    has_mixed_windows: bool = False


_GPT2_KEYS = {
    "num_layers": "n_layer",
    "hidden_size": "n_embd",
    "num_heads": "n_head",
    "num_kv_heads": "n_head",
    "ffn_size": "n_inner",
    "vocab_size": "vocab_size",
    "max_sequence": "n_positions",
    "norm_epsilon": "layer_norm_epsilon",
    "tied": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_LLAMA_KEYS = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "ffn_size": "intermediate_size",
    "vocab_size": "vocab_size",
    "max_sequence": "max_position_embeddings",
    "head_size": "head_dim",
    "norm_epsilon": "rms_norm_eps",
    "tied": "tie_word_embeddings",
    "init_std": "initializer_range",
}
_MIXTRAL_KEYS = {
    **_LLAMA_KEYS,
    "num_experts": "num_local_experts",
    "experts_per_token": "num_experts_per_tok",
    "expert_ffn_size": "intermediate_size",
}
_SILENT = {"rms_norm_eps": 1e-6, "tie_word_embeddings": False, "initializer_range": 0.02, "head_dim": None}
_ROPE_ONLY = {"hidden_act": ("silu",), "partial_rotary_factor": (1.0,)}

FAMILIES: dict[str, Family] = {
    "GPT2LMHeadModel": Family(
        keys=_GPT2_KEYS,
        defaults={
            "n_inner": None,
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "initializer_range": 0.02,
        },
        only={
            "activation_function": ("gelu_new", "gelu_pytorch_tanh"),
            "scale_attn_weights": (True,),
            "scale_attn_by_inverse_layer_idx": (False,),
            "reorder_and_upcast_attn": (False,),
            "add_cross_attention": (False,),
        },
        implied={"positions": "learned", "norm": "layer", "mlp": "gelu", "qkv_bias": True, "bias": True},
        has_rope=False,
    ),
    "LlamaForCausalLM": Family(
        keys=_LLAMA_KEYS,
        defaults={**_SILENT, "num_key_value_heads": None},
        only={**_ROPE_ONLY, "attention_bias": (False,), "mlp_bias": (False,)},
    ),
    "MistralForCausalLM": Family(
        keys=_LLAMA_KEYS, defaults={**_SILENT, "num_key_value_heads": 8, "sliding_window": 4096}, only=_ROPE_ONLY
    ),
    "Qwen2ForCausalLM": Family(
        keys=_LLAMA_KEYS,
        defaults={**_SILENT, "num_key_value_heads": 32, "sliding_window": 4096},
        only=_ROPE_ONLY,
        implied={"qkv_bias": True},
        has_mixed_windows=True,
    ),
    "Qwen3ForCausalLM": Family(
        keys=_LLAMA_KEYS,
        defaults={**_SILENT, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
        only={**_ROPE_ONLY, "attention_bias": (False,)},
        implied={"qk_norm": True},
        has_mixed_windows=True,
    ),
    "MixtralForCausalLM": Family(
        keys=_MIXTRAL_KEYS,
        defaults={**_SILENT, "num_key_value_heads": 8, "rms_norm_eps": 1e-5, "sliding_window": None},
        only={**_ROPE_ONLY, "router_jitter_noise": (0.0,)},
        default_theta=1_000_000.0,
    ),
}

# Keys that decide nothing our decoder computes: tokens of generation, training's dropout, names, versions.
# fmt: off
HARMLESS = frozenset({
    "architectures", "model_type", "transformers_version", "torch_dtype", "dtype", "use_cache", "_name_or_path",
    "name_or_path", "bos_token_id", "eos_token_id", "pad_token_id", "unk_token_id", "sep_token_id",
    "decoder_start_token_id", "attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop", "summary_type",
    "summary_use_proj", "summary_activation", "summary_proj_to_labels", "summary_first_dropout", "n_ctx",
    "predict_special_tokens", "task_specific_params", "id2label", "label2id", "pretraining_tp", "max_window_layers",
    "output_router_logits", "router_aux_loss_coef", "return_dict", "max_length", "min_length", "temperature", "top_k",
    "top_p", "typical_p", "num_beams", "num_beam_groups", "num_return_sequences", "repetition_penalty",
    "length_penalty", "diversity_penalty", "no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "do_sample",
    "early_stopping", "chunk_size_feed_forward", "is_decoder", "_attn_implementation_autoset",
    "gradient_checkpointing", "unsloth_version", "unsloth_fixed",
})
# fmt: on
LLAMA3 = {
    "rope_factor": "factor",
    "rope_low_frequency": "low_freq_factor",
    "rope_high_frequency": "high_freq_factor",
    "rope_original_sequence": "original_max_position_embeddings",
}
NULLABLE = ("n_inner", "head_dim", "num_key_value_heads")
"""null: 4 * n_embd, hidden_size / heads, as many as heads."""
HINTS = {"tied": bool, "norm_epsilon": float, "init_std": float}

# What each family can hold: our field -> the values it allows. Fields that are not here it takes as they are, or they
# are of training only.
_ROPE_NEEDS: dict[str, tuple[Any, ...]] = {
    "positions": ("rope",),
    "norm": ("rms",),
    "mlp": ("swiglu",),
    "bias": (False,),
}
NEEDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "LlamaForCausalLM": {**_ROPE_NEEDS, "qkv_bias": (False,), "qk_norm": (False,), "sliding_window": (0,)},
    "MistralForCausalLM": {**_ROPE_NEEDS, "qkv_bias": (False,), "qk_norm": (False,)},
    "Qwen2ForCausalLM": {**_ROPE_NEEDS, "qkv_bias": (True,), "qk_norm": (False,)},
    "Qwen3ForCausalLM": {**_ROPE_NEEDS, "qkv_bias": (False,), "qk_norm": (True,)},
    "MixtralForCausalLM": {
        **_ROPE_NEEDS,
        "qkv_bias": (False,),
        "qk_norm": (False,),
        "num_shared_experts": (0,),
        "num_dense_layers": (0,),
        "router": ("softmax",),
        "routed_scale": (1.0,),
    },
    "GPT2LMHeadModel": {
        "positions": ("learned",),
        "norm": ("layer",),
        "mlp": ("gelu",),
        "bias": (True,),
        "qkv_bias": (True,),
        "qk_norm": (False,),
        "sliding_window": (0,),
    },
}
WITH_EXPERTS = ("MixtralForCausalLM",)
