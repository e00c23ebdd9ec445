"""The architectures of the zoo by name. No torch."""

PLAIN = (
    "rnn", "lstm", "gru", "lstm_stack", "gru_stack", "lstm_cell", "gru_classifier", "transformer_encoder",
    "transformer_encoder_post_norm", "transformer_causal", "transformer", "multihead", "nano_gpt",
    "universal_transformer", "mlp_mixer", "patch_transformer", "torchvision_vit", "torchvision_resnet",
    "group_norm_resnet", "torchvision_vgg", "torchvision_vgg_bn", "densenet", "inception", "timm_convnext",
    "timm_efficientnet", "u_net", "autoencoder", "tied_autoencoder", "graph_network", "wavenet",
    "temporal_convolutions", "experts_by_hand", "recommender", "deep_sets", "siamese", "dict_of_logits", "highway",
    "perceptron_batch_norm", "long_convolutions",
)  # fmt: skip
TRANSFORMERS = (
    "gpt2", "gpt_neo", "gpt_neox", "gptj", "gpt_bigcode", "gpt_oss", "openai-gpt", "opt", "bloom", "llama", "mistral",
    "mixtral", "qwen2", "qwen3", "qwen2_moe", "qwen3_moe", "olmo", "olmo2", "olmoe", "phi", "phi3", "gemma", "gemma2",
    "gemma3", "falcon", "mpt", "stablelm", "starcoder2", "codegen", "granite", "granitemoe", "cohere", "persimmon",
    "nemotron", "glm", "smollm3", "deepseek_v3", "biogpt", "ctrl", "mamba", "mamba2", "falcon_mamba", "rwkv",
    "recurrent_gemma", "jamba", "bert", "roberta", "distilbert", "albert", "electra", "deberta_v2", "mpnet",
    "convbert", "fnet", "nystromformer", "modernbert", "squeezebert", "t5", "mt5", "bart", "pegasus", "marian",
    "m2m_100", "blenderbot_small", "whisper", "vit", "deit", "beit", "dinov2", "swin", "convnext", "convnextv2",
    "resnet", "regnet", "mobilenet_v2", "poolformer", "segformer", "wav2vec2", "hubert",
    "audio-spectrogram-transformer", "clip_text", "siglip_vision",
)  # fmt: skip
TORCHVISION = (
    "vit_b_16", "resnet18", "mobilenet_v3_small", "convnext_tiny", "densenet121", "efficientnet_b0", "swin_t",
    "vgg11", "squeezenet1_0", "shufflenet_v2_x0_5", "regnet_y_400mf", "googlenet",
)  # fmt: skip
TIMM = (
    "vit_tiny_patch16_224", "deit_tiny_patch16_224", "convnext_atto", "resnet18", "efficientnet_b0", "mixer_s32_224",
    "poolformer_s12", "mobilevitv2_050", "swin_tiny_patch4_window7_224", "eva02_tiny_patch14_224",
)  # fmt: skip
