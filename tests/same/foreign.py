"""Modules that know nothing of us: transformers' own, tiny and random, and one written by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 36
SEQUENCE = 16
_SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "max_position_embeddings": 32,
}
_GROUPED = {**_SIZES, "num_key_value_heads": 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1}


def _larger(module: nn.Module) -> nn.Module:
    """Weights large enough that every part moves the loss."""
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.mul_(5.0)
    for each in module.modules():
        if isinstance(each, nn.Dropout):
            each.p = 0.0
    return module.float()


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    off = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "bos_token_id": 1, "eos_token_id": 1}
    return _larger(GPT2LMHeadModel(GPT2Config(vocab_size=VOCAB, n_embd=16, n_layer=3, n_head=4, n_positions=32, **off)))


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _larger(LlamaForCausalLM(LlamaConfig(**_GROUPED)))


def qwen3() -> nn.Module:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return _larger(Qwen3ForCausalLM(Qwen3Config(**_GROUPED, head_dim=4, tie_word_embeddings=True)))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(**_GROUPED, num_local_experts=4, num_experts_per_tok=2)
    config._experts_implementation = "eager"  # the others know no float64
    return _larger(MixtralForCausalLM(config))


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return _larger(BertForMaskedLM(BertConfig(**_SIZES, **off)))


def t5() -> Any:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCAB, d_model=16, d_ff=24, d_kv=4, num_layers=2, num_heads=4, dropout_rate=0.0,
        decoder_start_token_id=0,
    )  # fmt: skip

    class Copying(nn.Module):
        """Reads a text and writes it again."""

        def __init__(self) -> None:
            super().__init__()
            self.t5 = T5ForConditionalGeneration(config)

        def forward(self, tokens: Tensor) -> Tensor:
            return self.t5(input_ids=tokens, decoder_input_ids=tokens).logits

    return _larger(Copying())


def _experts(family: str, **more: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{family}Config")(**_GROUPED, num_experts=4, num_experts_per_tok=2, **more)
    config._experts_implementation = "eager"  # the others know no float64
    return _larger(getattr(transformers, f"{family}ForCausalLM")(config))


def olmoe() -> nn.Module:
    """Its norms of queries and keys are over all heads: only the experts can be split."""
    return _experts("Olmoe")


def qwen2_moe() -> nn.Module:
    return _experts("Qwen2Moe", moe_intermediate_size=8, shared_expert_intermediate_size=12)


def phi3() -> nn.Module:
    from transformers import Phi3Config, Phi3ForCausalLM

    return _larger(Phi3ForCausalLM(Phi3Config(**_GROUPED)))


def mpt() -> nn.Module:
    from transformers import MptConfig, MptForCausalLM

    return _larger(MptForCausalLM(MptConfig(vocab_size=VOCAB, d_model=16, n_heads=4, n_layers=3, max_seq_len=32)))


def neox() -> nn.Module:
    from transformers import GPTNeoXConfig, GPTNeoXForCausalLM

    return _larger(GPTNeoXForCausalLM(GPTNeoXConfig(**_SIZES)))


def bloom() -> nn.Module:
    from transformers import BloomConfig, BloomForCausalLM

    return _larger(BloomForCausalLM(BloomConfig(vocab_size=VOCAB, hidden_size=16, n_layer=3, n_head=4)))


def falcon() -> nn.Module:
    from transformers import FalconConfig, FalconForCausalLM

    sizes = {"hidden_size": 16, "num_hidden_layers": 3, "num_attention_heads": 4, "num_kv_heads": 2}
    return _larger(FalconForCausalLM(FalconConfig(vocab_size=VOCAB, **sizes, new_decoder_architecture=True)))


_TWO_STACKS: dict[str, Any] = {
    "vocab_size": VOCAB, "d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
    "decoder_attention_heads": 4, "encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "dropout": 0.0, "pad_token_id": 0,
    "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 1,
}  # fmt: skip


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    class Copying(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bart = BartForConditionalGeneration(BartConfig(**_TWO_STACKS, max_position_embeddings=32))

        def forward(self, tokens: Tensor) -> Tensor:
            return self.bart(input_ids=tokens, decoder_input_ids=tokens).logits

    return _larger(Copying())


def whisper() -> tuple[nn.Module, Any, Any]:
    """Listens to sounds of a fixed length, and says of which kind they are."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    sounds = {"max_source_positions": 8, "max_target_positions": 8, "num_mel_bins": 4}
    config = WhisperConfig(**_TWO_STACKS, **sounds, suppress_tokens=None, begin_suppress_tokens=None)

    class Listening(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.whisper = WhisperForConditionalGeneration(config)

        def forward(self, sounds: Tensor) -> Tensor:
            words = torch.arange(5, device=sounds.device).expand(len(sounds), 5)
            return self.whisper(input_features=sounds, decoder_input_ids=words).logits[:, -1, :10]

    return _larger(Listening()), None, torch.zeros(1, 4, 16)


class Mixer(nn.Module):
    """Attention by hand, with its linears right in the block, heads counted by an attribute, and a gate."""

    def __init__(self, size: int, num_heads: int):
        super().__init__()
        self.num_heads = num_heads
        self.before, self.between = nn.LayerNorm(size), nn.LayerNorm(size)
        self.q, self.k, self.v = (nn.Linear(size, size, bias=False) for _ in range(3))
        self.scale = nn.Parameter(torch.ones(size // num_heads))
        self.back = nn.Linear(size, size)
        self.wide, self.gate, self.narrow = nn.Linear(size, 24), nn.Linear(size, 24), nn.Linear(24, size)

    def forward(self, x: Tensor) -> Tensor:
        batch, length, _ = x.shape
        normal = self.before(x)
        q, k, v = (
            linear(normal).view(batch, length, self.num_heads, -1).transpose(1, 2)
            for linear in (self.q, self.k, self.v)
        )
        scores = (q * self.scale) @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        future = torch.ones(length, length, dtype=torch.bool, device=x.device).triu(1)
        mixed = scores.masked_fill(future, -1e9).softmax(-1) @ v
        x = x + self.back(mixed.transpose(1, 2).reshape(batch, length, -1))
        normal = self.between(x)
        return x + self.narrow(self.wide(normal) * torch.sigmoid(self.gate(normal)))


class ByHand(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(VOCAB, 16), nn.Embedding(32, 16)
        self.mixers = nn.ModuleList(Mixer(16, 4) for _ in range(3))
        self.norm, self.out = nn.LayerNorm(16), nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for mixer in self.mixers:
            x = mixer(x)
        return self.out(self.norm(x))


def by_hand() -> nn.Module:
    return _larger(ByHand())


def convolutions() -> tuple[nn.Module, Any, Tensor]:
    """Images through a plain Sequential with torch's own batch norms."""
    module = nn.Sequential(
        nn.Sequential(nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU()),
        nn.Sequential(nn.Conv2d(4, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.AvgPool2d(2)),
        nn.Sequential(nn.Flatten(), nn.Linear(8 * 16, 10)),
    )
    return _larger(module), None, torch.zeros(1, 1, 8, 8)


def deep_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return _larger(LlamaForCausalLM(LlamaConfig(**_GROUPED | {"num_hidden_layers": 5})))
