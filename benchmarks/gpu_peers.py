"""What a user would run instead, each as its own loop: fused AdamW, clipping, bf16 autocast, torch.compile.

Packages come from the folder that the environment variable PEERS names, or are installed; none is part of this project.
nanoGPT and torchtitan's packages are not needed to read this file: a peer whose package is missing is left out.

    titan        torchtitan's Llama 3 and its compile and checkpoint wrappers; with torchao also fp8 (tensorwise)
    nanogpt      a plain GPT-2 and the training loop of nanoGPT, written again: what its train.py does on one GPU
    hf_llama     transformers' Llama, compiled, or patched by Liger
    hf_mixtral   transformers' Mixtral, compiled, experts by grouped matmuls
    vision       torchvision's, timm's or transformers' image models, channels last where that helps
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Step = Callable[[], Any]
Make = Callable[[], Step]
"""Puts a model on the device; its step."""

LLAMA = {  # layers, hidden, heads, key and value heads, vocabulary, sequence; the MLP has 8192
    "llama-1b": (16, 2048, 32, 8, 128256, 4096),
    "llama-3b": (28, 3072, 24, 8, 128256, 4096),
}


def prepare(name: str, arguments: Mapping[str, Any], device: torch.device) -> Make:
    """Import what the peer needs; ImportError where it is not there."""
    if folder := os.environ.get("PEERS"):
        sys.path.insert(0, folder)
    if name not in PEERS:
        raise ImportError(f"no peer is called {name}; there are {', '.join(PEERS)}")
    torch.set_float32_matmul_precision("high")
    return PEERS[name](device=device, **arguments)


def loop(model: nn.Module, loss_of: Callable[[], Tensor], device: torch.device, decay: float = 0.01) -> Step:
    """Autocast forward, backward, clipping and fused AdamW; matrices decay, as in nanoGPT."""
    trained = [each for each in model.parameters() if each.requires_grad]
    groups = [
        {"params": [each for each in trained if each.dim() >= 2], "weight_decay": decay},
        {"params": [each for each in trained if each.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-4, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16):
            loss = loss_of()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step


class Block(nn.Module):
    """Of GPT-2, without biases in its matrices."""

    def __init__(self, hidden: int, heads: int):
        super().__init__()
        self.heads = heads
        self.norm_1, self.norm_2 = nn.LayerNorm(hidden, bias=False), nn.LayerNorm(hidden, bias=False)
        self.qkv = nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = nn.Linear(hidden, hidden, bias=False)
        self.up = nn.Linear(hidden, 4 * hidden, bias=False)
        self.down = nn.Linear(4 * hidden, hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, hidden = x.shape
        shape = (batch, sequence, self.heads, hidden // self.heads)
        query, key, value = (part.view(shape).transpose(1, 2) for part in self.qkv(self.norm_1(x)).split(hidden, dim=2))
        seen = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(seen.transpose(1, 2).reshape(batch, sequence, hidden))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class GPT2(nn.Module):
    """Learned positions, a head tied to the embedding, and the loss inside, so that all is compiled together."""

    def __init__(self, layers: int, hidden: int, heads: int, vocab: int, sequence: int):
        super().__init__()
        self.tokens, self.places = nn.Embedding(vocab, hidden), nn.Embedding(sequence, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(hidden, bias=False)
        for each in self.parameters():
            if each.dim() > 1:
                nn.init.normal_(each, std=0.02)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.tokens(tokens) + self.places(places)
        for block in self.blocks:
            x = block(x)
        scores = F.linear(self.norm(x), self.tokens.weight)
        return F.cross_entropy(scores.view(-1, scores.shape[-1]), targets.view(-1), ignore_index=-1)


def nanogpt(
    device: torch.device,
    layers: int,
    hidden: int,
    heads: int,
    batch: int,
    sequence: int = 1024,
    vocab: int = 50304,
) -> Make:
    def make() -> Step:
        with device:
            model = GPT2(layers, hidden, heads, vocab, sequence)
            tokens = torch.randint(vocab, (batch, sequence + 1))
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()
        run = torch.compile(model) if device.type == "cuda" else model
        return loop(model, lambda: run(inputs, targets), device, decay=0.1)

    return make


def titan(device: torch.device, shape: str, batch: int, checkpoints: str = "none", fp8: bool = False) -> Make:
    from torchtitan.components.loss import cross_entropy_loss
    from torchtitan.config import JobConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.distributed import utils as titan_utils
    from torchtitan.models.llama3 import Transformer, TransformerModelArgs, parallelize_llama

    if fp8:
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training
    layers, hidden, heads, kv_heads, vocab, sequence = LLAMA[shape]

    def make() -> Step:
        port = "29599"
        alone = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        os.environ.update(alone)
        job = JobConfig()
        job.compile.enable = True
        job.activation_checkpoint.mode = checkpoints
        if checkpoints == "selective":
            job.activation_checkpoint.selective_ac_option = "op"
        job.training.seq_len, job.training.local_batch_size = sequence, batch
        settings = TransformerModelArgs(
            dim=hidden,
            n_layers=layers,
            n_heads=heads,
            n_kv_heads=kv_heads,
            vocab_size=vocab,
            ffn_dim_multiplier={2048: 1.5, 3072: 1.0}[hidden],
            multiple_of=1024,
            rope_theta=500000,
            max_seq_len=sequence,
        )
        torch.cuda.set_device(0)
        torch.distributed.init_process_group("nccl")
        one = dict.fromkeys(("dp_replicate", "dp_shard", "cp", "tp", "pp", "ep", "etp", "world_size"), 1)
        dims = ParallelDims(**one)
        with torch.device("meta"):
            model = Transformer(settings)
        if fp8:
            recipe = Float8LinearConfig.from_recipe_name("tensorwise")
            convert_to_float8_training(model, config=recipe, module_filter_fn=lambda module, name: name != "output")
        model = parallelize_llama(model, dims, job)
        model.to_empty(device="cuda")
        with torch.no_grad():
            model.init_weights(buffer_device=None)
        model.train()
        assert model.layers["0"].feed_forward.w1.weight.shape[0] == 8192, "torchtitan sizes its MLP in another way"
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        loss_of = torch.compile(cross_entropy_loss)
        tokens = torch.randint(vocab, (batch, sequence), device="cuda")

        def step() -> None:
            with titan_utils.maybe_enable_amp(dims, "bfloat16", "cuda"):
                loss = loss_of(model(tokens), tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
            optimizer.step()
            optimizer.zero_grad()

        return step

    return make


def hf_llama(device: torch.device, shape: str, batch: int, liger: bool = False) -> Make:
    from transformers import LlamaConfig, LlamaForCausalLM

    if liger:
        from liger_kernel.transformers import apply_liger_kernel_to_llama

        apply_liger_kernel_to_llama()
    layers, hidden, heads, kv_heads, vocab, sequence = LLAMA[shape]
    config = LlamaConfig(
        hidden_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=kv_heads,
        intermediate_size=8192,
        vocab_size=vocab,
        max_position_embeddings=sequence,
        use_cache=False,
        attn_implementation="sdpa",
    )
    return _causal(LlamaForCausalLM, config, batch, sequence, device, compiled=not liger)


def hf_mixtral(
    device: torch.device,
    num_layers: int,
    hidden_size: int,
    num_heads: int,
    num_kv_heads: int,
    expert_ffn_size: int,
    batch: int,
    sequence: int,
) -> Make:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        hidden_size=hidden_size,
        num_hidden_layers=num_layers,
        num_attention_heads=num_heads,
        num_key_value_heads=num_kv_heads,
        intermediate_size=expert_ffn_size,
        vocab_size=32000,
        num_local_experts=8,
        num_experts_per_tok=2,
        max_position_embeddings=sequence,
        use_cache=False,
        attn_implementation="sdpa",
    )
    if hasattr(config, "_experts_implementation"):
        config._experts_implementation = "grouped_mm"
    return _causal(MixtralForCausalLM, config, batch, sequence, device, compiled=True)


def _causal(model_class: Any, config: Any, batch: int, sequence: int, device: torch.device, compiled: bool) -> Make:
    def make() -> Step:
        with device:
            model = model_class(config)
            tokens = torch.randint(config.vocab_size, (batch, sequence))
        model.train()
        run = torch.compile(model) if compiled and device.type == "cuda" else model
        return loop(model, lambda: run(input_ids=tokens, labels=tokens).loss, device)

    return make


def vision(device: torch.device, name: str, batch: int) -> Make:
    """`name`: the package, and its model."""
    package, _, kind = name.partition(" ")
    build: Callable[[], nn.Module]
    if package == "torchvision":
        import torchvision

        build = getattr(torchvision.models, kind)
    elif package == "timm":
        import timm

        def build() -> nn.Module:
            return timm.create_model(kind, pretrained=False)

    else:
        import transformers

        if kind == "ViT-L":
            sizes = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
            drop = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            settings = transformers.ViTConfig(**sizes, **drop, num_labels=1000)
            model_class = transformers.ViTForImageClassification
        else:
            settings = transformers.ResNetConfig(num_labels=1000)  # its defaults are ResNet-50
            model_class = transformers.ResNetForImageClassification

        def build() -> nn.Module:
            return model_class(settings)

    def make() -> Step:
        with device:
            model = build()
            images = torch.randn(batch, 3, 224, 224)
            targets = torch.randint(1000, (batch,))
        model.train()
        if "resnet" in kind.lower():
            model, images = model.to(memory_format=torch.channels_last), images.to(memory_format=torch.channels_last)
        run = torch.compile(model) if device.type == "cuda" else model

        def loss_of() -> Tensor:
            scores = run(images)
            return F.cross_entropy(getattr(scores, "logits", scores), targets)

        return loop(model, loss_of, device)

    return make


PEERS: dict[str, Callable[..., Make]] = {
    "nanogpt": nanogpt,
    "titan": titan,
    "hf_llama": hf_llama,
    "hf_mixtral": hf_mixtral,
    "vision": vision,
}
