"""Three small decoders that use every switch between them."""

from __future__ import annotations

from dataclasses import replace

from meshwright.models.config import DecoderConfig

LLAMA = DecoderConfig(
    num_layers=3, hidden_size=64, num_heads=4, num_kv_heads=2, ffn_size=160, vocab_size=96, max_sequence=64
)
QWEN = replace(LLAMA, qk_norm=True, tied=True, qkv_bias=True)
GPT = replace(
    LLAMA,
    positions="learned",
    norm="layer",
    mlp="gelu",
    bias=True,
    qkv_bias=True,
    tied=True,
    num_kv_heads=4,
    ffn_size=256,
)
FAMILIES = {"llama": LLAMA, "qwen": QWEN, "gpt": GPT}
