"""Modules that know nothing of us: transformers' own, tiny and random, and one written by hand."""

from __future__ import annotations

from collections import OrderedDict
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
    config._experts_implementation = "eager"  # which looks at values
    return _larger(MixtralForCausalLM(config))


def qwen3_moe() -> nn.Module:
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(**_GROUPED, head_dim=4, moe_intermediate_size=12, num_experts=4, num_experts_per_tok=2)
    return _larger(Qwen3MoeForCausalLM(config))


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


class Encoder(nn.Module):
    """torch's own encoder, which looks at its first layer before it runs any, in a module that returns a dict."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(VOCAB, 16)
        layer = nn.TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 3, norm=nn.LayerNorm(16))
        self.out = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> dict[str, Any]:
        future = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], device=tokens.device)
        hidden = self.encoder(self.words(tokens), mask=future.to(self.words.weight.dtype), is_causal=True)
        return {"hidden": hidden, "logits": self.out(hidden)}


def encoder() -> nn.Module:
    return _larger(Encoder())


def opt() -> nn.Module:
    """Draws a number for each layer, to drop it or not."""
    from transformers import OPTConfig, OPTForCausalLM

    sizes = {**_SIZES, "ffn_dim": 24, "word_embed_proj_dim": 16}
    return _larger(OPTForCausalLM(OPTConfig(**sizes, dropout=0.0, attention_dropout=0.0)))


def swin() -> tuple[nn.Module, Any, Tensor]:
    """Stages hand on numbers beside the tensor: height and width."""
    from transformers import SwinConfig, SwinForImageClassification

    config = SwinConfig(
        image_size=16, patch_size=2, num_channels=1, embed_dim=8, depths=[1, 1, 1], num_heads=[2, 2, 2], window_size=2,
        num_labels=10, drop_path_rate=0.0,
    )  # fmt: skip
    return _larger(SwinForImageClassification(config)), None, torch.zeros(1, 1, 16, 16)


class Recurrent(nn.Module):
    """Layers that return their states too, and something between one and the next."""

    def __init__(self, kind: type[nn.Module]):
        super().__init__()
        self.words = nn.Embedding(VOCAB, 16)
        self.layers = nn.ModuleList(kind(16, 16, batch_first=True) for _ in range(3))
        self.out = nn.Linear(16, VOCAB)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.words(tokens)
        for layer in self.layers:
            x, _ = layer(x)
            x = torch.nn.functional.dropout(2.0 * x, 0.0, self.training)
        return self.out(x)


def lstm() -> nn.Module:
    return _larger(Recurrent(nn.LSTM))


def gru() -> nn.Module:
    return _larger(Recurrent(nn.GRU))


def deep_lstm() -> nn.Module:
    """All layers in one module, both ways."""

    class Deep(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.words, self.out = nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB)
            self.layers = nn.LSTM(16, 8, num_layers=2, bidirectional=True, batch_first=True)

        def forward(self, tokens: Tensor) -> Tensor:
            x, (hidden, _) = self.layers(self.words(tokens))
            return self.out(x + hidden.sum(0).repeat(1, 2).unsqueeze(1))

    return _larger(Deep())


class VisionBlock(nn.Module):
    def __init__(self, size: int):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(size), nn.LayerNorm(size)
        self.self_attention = nn.MultiheadAttention(size, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(size, 24), nn.GELU(), nn.Dropout(0.0), nn.Linear(24, size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.ln_1(x)
        y, _ = self.self_attention(y, y, y, need_weights=False)
        x = x + y
        return x + self.mlp(self.ln_2(x))


class VisionEncoder(nn.Module):
    def __init__(self, size: int, length: int):
        super().__init__()
        self.pos_embedding = nn.Parameter(torch.randn(1, length, size) * 0.1)
        named = OrderedDict((f"encoder_layer_{i}", VisionBlock(size)) for i in range(3))
        self.layers, self.ln = nn.Sequential(named), nn.LayerNorm(size)

    def forward(self, x: Tensor) -> Tensor:
        torch._assert(x.dim() == 3, "samples, places, numbers")
        return self.ln(self.layers(x + self.pos_embedding))


class VisionTransformer(nn.Module):
    """With the structure of torchvision's: a class token, blocks by name, heads."""

    def __init__(self) -> None:
        super().__init__()
        self.conv_proj = nn.Conv2d(1, 8, 4, 4)
        self.class_token = nn.Parameter(torch.zeros(1, 1, 8))
        self.encoder = VisionEncoder(8, 5)
        self.heads = nn.Sequential(OrderedDict(head=nn.Linear(8, 10)))

    def forward(self, images: Tensor) -> Tensor:
        patches = self.conv_proj(images).flatten(2).permute(0, 2, 1)
        x = torch.cat([self.class_token.expand(images.shape[0], -1, -1), patches], dim=1)
        return self.heads(self.encoder(x)[:, 0])


def vision_transformer() -> tuple[nn.Module, Any, Tensor]:
    return _larger(VisionTransformer()), None, torch.zeros(1, 1, 8, 8)


class Basic(nn.Module):
    def __init__(self, before: int, size: int, stride: int):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(before, size, 3, stride, 1, bias=False), nn.BatchNorm2d(size)
        self.conv2, self.bn2 = nn.Conv2d(size, size, 3, 1, 1, bias=False), nn.BatchNorm2d(size)
        self.downsample = None
        if stride > 1:
            self.downsample = nn.Sequential(nn.Conv2d(before, size, 1, stride, bias=False), nn.BatchNorm2d(size))

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
        return torch.relu(y + (x if self.downsample is None else self.downsample(x)))


class ResidualNetwork(nn.Module):
    """With the structure of torchvision's ResNet: four lists of blocks side by side, flattened at the end."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(1, 4, 3, 2, 1, bias=False), nn.BatchNorm2d(4)
        self.maxpool = nn.MaxPool2d(3, 1, 1)
        self.layer1 = nn.Sequential(Basic(4, 4, 1), Basic(4, 4, 1))
        self.layer2 = nn.Sequential(Basic(4, 6, 2), Basic(6, 6, 1))
        self.layer3 = nn.Sequential(Basic(6, 8, 2))
        self.layer4 = nn.Sequential(Basic(8, 12, 2))
        self.avgpool, self.fc = nn.AdaptiveAvgPool2d((1, 1)), nn.Linear(12, 10)

    def forward(self, images: Tensor) -> Tensor:
        x = self.maxpool(torch.relu(self.bn1(self.conv1(images))))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def residual_network() -> tuple[nn.Module, Any, Tensor]:
    torch.manual_seed(0)
    return ResidualNetwork(), None, torch.zeros(1, 1, 16, 16)
