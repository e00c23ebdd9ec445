"""Tiny models of transformers' architectures, made without a network: for the zoo.

A default config is made small by the names of its attributes, and dropout is switched off; the rest is the
architecture's own. What the installed version does not have, or does not build, is left out of the table.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.zoo_plain import CLASSES, LENGTH, VOCAB, Made

SMALL: dict[str, Any] = {
    "vocab_size": VOCAB, "hidden_size": 16, "d_model": 16, "n_embd": 16, "embed_dim": 16, "dim": 16,
    "intermediate_size": 24, "ffn_dim": 24, "n_inner": 24, "d_ff": 24, "ffn_hidden_size": 24, "encoder_ffn_dim": 24,
    "decoder_ffn_dim": 24, "moe_intermediate_size": 12, "shared_expert_intermediate_size": 12, "hidden_dim": 24,
    "num_hidden_layers": 3, "n_layer": 3, "n_layers": 3, "num_layers": 3, "encoder_layers": 2, "decoder_layers": 2,
    "num_decoder_layers": 2, "num_attention_heads": 4, "n_head": 4, "n_heads": 4, "num_heads": 4, "d_kv": 4,
    "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4,
    "max_position_embeddings": 32, "n_positions": 32, "n_ctx": 32, "max_seq_len": 32, "context_length": 32,
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1,
    "topk_group": 1, "q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 4,
    "embedding_size": 16, "word_embed_proj_dim": 16, "rotary_dim": 4, "attention_hidden_size": 16, "state_size": 4,
    "time_step_rank": 4, "lru_width": 16, "n_groups": 1, "expand": 2, "image_size": 16, "patch_size": 4,
    "num_channels": 3, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32, "num_labels": CLASSES,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1, "use_cache": False,
    "sliding_window": 4, "type_vocab_size": 2, "first_k_dense_replace": 1, "n_shared_experts": 1, "chunk_size": 4,
    "attention_window": 4, "local_attention": 4, "emb_dim": 16,
}  # fmt: skip
"""Attribute -> value where a default config has it."""

MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    # name: (kind, class, what differs)
    "gpt2": ("text", "GPT2LMHeadModel", {}),
    "gpt_neo": ("text", "GPTNeoForCausalLM", {"attention_types": [[["global", "local", "global"], 1]]}),
    "gpt_neox": ("text", "GPTNeoXForCausalLM", {}),
    "gptj": ("text", "GPTJForCausalLM", {"rotary_dim": 4}),
    "gpt_bigcode": ("text", "GPTBigCodeForCausalLM", {}),
    "gpt_oss": ("text", "GptOssForCausalLM", {}),
    "openai-gpt": ("text", "OpenAIGPTLMHeadModel", {}),
    "opt": ("text", "OPTForCausalLM", {}),
    "bloom": ("text", "BloomForCausalLM", {}),
    "llama": ("text", "LlamaForCausalLM", {}),
    "mistral": ("text", "MistralForCausalLM", {}),
    "mixtral": ("text", "MixtralForCausalLM", {}),
    "qwen2": ("text", "Qwen2ForCausalLM", {}),
    "qwen3": ("text", "Qwen3ForCausalLM", {}),
    "qwen2_moe": ("text", "Qwen2MoeForCausalLM", {}),
    "qwen3_moe": ("text", "Qwen3MoeForCausalLM", {}),
    "olmo": ("text", "OlmoForCausalLM", {}),
    "olmo2": ("text", "Olmo2ForCausalLM", {}),
    "olmoe": ("text", "OlmoeForCausalLM", {}),
    "phi": ("text", "PhiForCausalLM", {}),
    "phi3": ("text", "Phi3ForCausalLM", {}),
    "gemma": ("text", "GemmaForCausalLM", {}),
    "gemma2": ("text", "Gemma2ForCausalLM", {}),
    "gemma3": ("text", "Gemma3ForCausalLM", {}),
    "falcon": ("text", "FalconForCausalLM", {"num_kv_heads": 4}),
    "mpt": ("text", "MptForCausalLM", {"expansion_ratio": 2}),
    "stablelm": ("text", "StableLmForCausalLM", {}),
    "starcoder2": ("text", "Starcoder2ForCausalLM", {}),
    "codegen": ("text", "CodeGenForCausalLM", {"rotary_dim": 4}),
    "granite": ("text", "GraniteForCausalLM", {}),
    "granitemoe": ("text", "GraniteMoeForCausalLM", {}),
    "cohere": ("text", "CohereForCausalLM", {}),
    "persimmon": ("text", "PersimmonForCausalLM", {}),
    "nemotron": ("text", "NemotronForCausalLM", {}),
    "glm": ("text", "GlmForCausalLM", {}),
    "smollm3": ("text", "SmolLM3ForCausalLM", {}),
    "deepseek_v3": ("text", "DeepseekV3ForCausalLM", {"num_key_value_heads": 4}),
    "biogpt": ("text", "BioGptForCausalLM", {}),
    "ctrl": ("text", "CTRLLMHeadModel", {"dff": 24}),
    "mamba": ("text", "MambaForCausalLM", {}),
    "mamba2": ("text", "Mamba2ForCausalLM", {"num_heads": 4, "head_dim": 8, "expand": 2}),
    "falcon_mamba": ("text", "FalconMambaForCausalLM", {}),
    "rwkv": ("text", "RwkvForCausalLM", {}),
    "recurrent_gemma": ("text", "RecurrentGemmaForCausalLM", {"attention_window_size": 4}),
    "jamba": ("text", "JambaForCausalLM", {"use_mamba_kernels": False, "num_hidden_layers": 4, "attn_layer_period": 2,
                                           "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 1}),
    "bert": ("text", "BertForMaskedLM", {}),
    "roberta": ("text", "RobertaForMaskedLM", {"pad_token_id": 1}),
    "distilbert": ("text", "DistilBertForMaskedLM", {}),
    "albert": ("text", "AlbertForMaskedLM", {}),
    "electra": ("text", "ElectraForMaskedLM", {}),
    "deberta_v2": ("text", "DebertaV2ForMaskedLM", {}),
    "mpnet": ("text", "MPNetForMaskedLM", {"pad_token_id": 1}),
    "convbert": ("text", "ConvBertForMaskedLM", {"head_ratio": 2, "num_groups": 1, "conv_kernel_size": 3}),
    "fnet": ("text", "FNetForMaskedLM", {}),
    "nystromformer": ("text", "NystromformerForMaskedLM", {"num_landmarks": 4, "segment_means_seq_len": 8}),
    "modernbert": ("text", "ModernBertForMaskedLM", {}),
    "squeezebert": ("text", "SqueezeBertForMaskedLM", {"q_groups": 2, "k_groups": 2, "v_groups": 2,
                                                       "intermediate_groups": 2, "output_groups": 2}),
    "t5": ("pair", "T5ForConditionalGeneration", {}),
    "mt5": ("pair", "MT5ForConditionalGeneration", {}),
    "bart": ("pair", "BartForConditionalGeneration", {}),
    "pegasus": ("pair", "PegasusForConditionalGeneration", {}),
    "marian": ("pair", "MarianMTModel", {}),
    "m2m_100": ("pair", "M2M100ForConditionalGeneration", {}),
    "blenderbot_small": ("pair", "BlenderbotSmallForConditionalGeneration", {}),
    "whisper": ("speech", "WhisperForConditionalGeneration", {}),
    "vit": ("image", "ViTForImageClassification", {}),
    "deit": ("image", "DeiTForImageClassification", {}),
    "beit": ("image", "BeitForImageClassification", {}),
    "dinov2": ("image", "Dinov2ForImageClassification", {}),
    "swin": ("image", "SwinForImageClassification", {"embed_dim": 8, "depths": [2, 2], "num_heads": [2, 2],
                                                     "window_size": 2, "patch_size": 2,
                                                     "num_hidden_layers": 2, "num_attention_heads": [2, 2]}),
    "convnext": ("image", "ConvNextForImageClassification", {"hidden_sizes": [6, 8], "depths": [2, 2], "num_stages": 2,
                                                             "patch_size": 2}),
    "convnextv2": ("image", "ConvNextV2ForImageClassification", {"hidden_sizes": [6, 8], "depths": [2, 2],
                                                                 "num_stages": 2, "patch_size": 2}),
    "resnet": ("image", "ResNetForImageClassification", {"embedding_size": 4, "hidden_sizes": [6, 8], "depths": [2, 2],
                                                         "layer_type": "basic"}),
    "regnet": ("image", "RegNetForImageClassification", {"embedding_size": 4, "hidden_sizes": [6, 8], "depths": [2, 2],
                                                         "groups_width": 2}),
    "mobilenet_v2": ("image", "MobileNetV2ForImageClassification", {"depth_multiplier": 0.25, "min_depth": 2,
                                                                    "depth_divisible_by": 2, "image_size": 32}),
    "poolformer": ("image", "PoolFormerForImageClassification", {
        "hidden_sizes": [6, 8], "depths": [2, 2], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2],
        "padding": [1, 1]}),
    "segformer": ("image", "SegformerForImageClassification", {
        "hidden_sizes": [8, 8], "depths": [2, 2], "num_encoder_blocks": 2, "patch_sizes": [3, 3], "strides": [2, 2],
        "num_attention_heads": [2, 2], "sr_ratios": [2, 1], "mlp_ratios": [2, 2]}),
    "wav2vec2": ("audio", "Wav2Vec2ForSequenceClassification", {
        "conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
        "classifier_proj_size": 8}),
    "hubert": ("audio", "HubertForSequenceClassification", {
        "conv_dim": [8, 8], "conv_stride": [2, 2], "conv_kernel": [3, 3], "num_feat_extract_layers": 2,
        "num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "apply_spec_augment": False,
        "classifier_proj_size": 8}),
    "audio-spectrogram-transformer": ("spectrum", "ASTForAudioClassification", {"max_length": 16, "num_mel_bins": 8}),
    "clip_text": ("features", "CLIPTextModel", {}),
    "siglip_vision": ("vision features", "SiglipVisionModel", {}),
}  # fmt: skip


def small_config(kind: type[Any], changes: dict[str, Any]) -> Any:
    default = kind()
    known = {
        key: value
        for key, value in SMALL.items()
        if hasattr(default, key) and (key == "num_labels" or not isinstance(getattr(kind, key, None), property))
    }
    for key in dir(default):
        if "drop" in key and isinstance(getattr(default, key, None), float):
            known[key] = 0.0
    return kind(**{**known, **changes})


class Called(nn.Module):
    """A model called by the names of its inputs; its scores are what it returns."""

    def __init__(self, inner: nn.Module, names: tuple[str, ...], out: str = "logits"):
        super().__init__()
        self.inner, self.names, self.out = inner, names, out

    def forward(self, *tensors: Tensor) -> Tensor:
        return getattr(self.inner(**dict(zip(self.names, tensors, strict=True)), return_dict=True), self.out)


def make(name: str) -> Made:
    import transformers

    kind, class_name, changes = MODELS[name]
    model_class = getattr(transformers, class_name)
    config = small_config(model_class.config_class, changes)
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "eager"  # the others know no float64
    module = model_class(config)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1 and float(parameter.std()) < 0.05:
                parameter.mul_(4.0)
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    size = int(changes.get("image_size", 16))
    text = ([LENGTH], VOCAB)
    if kind == "text":
        return module, None, [text], text
    if kind == "pair":
        return Called(module, ("input_ids", "decoder_input_ids")), None, [text, text], text
    if kind == "speech":
        names = ("input_features", "decoder_input_ids")
        return Called(module, names), None, [([config.num_mel_bins, 2 * config.max_source_positions], 0), text], text
    if kind == "image":
        return Called(module, ("pixel_values",)), None, [([3, size, size], 0)], ([], CLASSES)
    if kind == "audio":
        return Called(module, ("input_values",)), None, [([80], 0)], ([], CLASSES)
    if kind == "spectrum":
        names = ("input_values",)
        return Called(module, names), None, [([config.max_length, config.num_mel_bins], 0)], ([], CLASSES)
    if kind == "features":
        return Called(module, ("input_ids",), "last_hidden_state"), None, [text], ([LENGTH, 16], 0)
    shape = [(size // 4) ** 2, 16]
    return Called(module, ("pixel_values",), "last_hidden_state"), None, [([3, size, size], 0)], (shape, 0)
