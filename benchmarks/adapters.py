"""Claim: adapters of rank 16 on llama3-8b in NF4 (sequence 2048, batch 8) train within 12 GiB, no slower than a peer.

Measured: tokens per second and the peak that torch's allocator counts, of our plan and then of transformers' model with
the same dimensions, microbatches and recomputation of blocks. Its 4-bit layers are those of peft + bitsandbytes where
both can be imported, else torchao's NF4 product beside adapters written by hand, else bf16 weights beside such
adapters. Weights are random and made on the GPU. Without one, a tiny model runs on the CPU, to see that all works.

Run: python -m benchmarks.adapters [ours] [peer] [--plan FILE]
"""

from __future__ import annotations

import functools
import gc
import importlib
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.box import Box
from meshwright.core.codec import load_artefact
from meshwright.core.plan import Plan
from meshwright.core.technique import technique_named
from meshwright.hf.config_json import config_for
from meshwright.machine.named_clusters import cluster
from meshwright.models.dimensions import Adapter, DecoderConfig
from meshwright.models.presets import preset
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.runtime.loop import Samples
from meshwright.simulator.forecast import forecast
from meshwright.verify import parity

HAS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if HAS_GPU else "cpu")
SEQUENCE, BATCH, MICROBATCH, RANK, STD = (2048, 8, 2, 16, 0.02) if HAS_GPU else (32, 4, 2, 4, 0.02)
WARM_UP, ROUNDS = (2, 5) if HAS_GPU else (1, 1)
GOAL_GIB, GOAL_RATIO = 12.0, 1.0


def dimensions() -> DecoderConfig:
    named = preset("llama3-8b")
    assert isinstance(named, DecoderConfig)
    small = {"num_layers": 2, "hidden_size": 256, "num_heads": 4, "num_kv_heads": 2, "ffn_size": 256, "vocab_size": 512}
    return named if HAS_GPU else replace(named, **small)


def samples(step: int) -> Samples:
    generator = torch.Generator().manual_seed(step)
    tokens = torch.randint(dimensions().vocab_size, (BATCH, SEQUENCE + 1), generator=generator).to(DEVICE)
    weights = torch.ones(BATCH, SEQUENCE, device=DEVICE)
    return Samples(
        inputs=tokens[:, :-1].contiguous(),
        targets=tokens[:, 1:].contiguous(),
        weights=weights,
        num_tokens=float(weights.numel()),
    )


def measured(step: Callable[[int], Any]) -> tuple[float, float]:
    """Tokens per second, and GiB allocated at most."""
    for number in range(WARM_UP):
        step(number)
    if HAS_GPU:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    start = time.perf_counter()
    for number in range(ROUNDS):
        step(WARM_UP + number)
    if HAS_GPU:
        torch.cuda.synchronize()
    rate = ROUNDS * BATCH * SEQUENCE / (time.perf_counter() - start)
    return rate, torch.cuda.max_memory_allocated() / 2**30 if HAS_GPU else 0.0


def drawn(name: str, box: Box, dtype: torch.dtype) -> Tensor:
    """Weights made where they are used: codes are any bytes, scales one number."""
    if dtype == torch.uint8:
        codes = torch.randint(256, (*box.size[:2], box.size[2] - 4), dtype=torch.uint8, device=DEVICE)
        scales = torch.full((*box.size[:2], 1), 2 * STD, device=DEVICE).view(torch.uint8)
        return torch.cat([codes, scales], dim=-1)
    if name.endswith("norm.weight"):
        return torch.ones(box.size, dtype=dtype, device=DEVICE)
    return torch.randn(box.size, dtype=dtype, device=DEVICE) * (0.0 if name.endswith("lora_B") else STD)


def our_plan() -> Plan:
    kept = {"layers": "none", "attention": "all"}
    settings: dict[str, dict[str, Any]] = {"precision": {}, "chunked_loss": {}, "recompute": kept, "compile": {}}
    if not HAS_GPU:
        settings.pop("compile")
    techniques = tuple(technique_named(name)(**given) for name, given in settings.items())
    return Plan(techniques=techniques, batch=BATCH, microbatch=MICROBATCH)


def ours(plan: Plan) -> tuple[float, float]:
    config = replace(dimensions(), adapter=Adapter(rank=RANK, base="nf4"))
    opened, optimizer = open_config(config, "llama3-8b", 0), OptimizerConfig(lr=1e-4)
    opened.source = drawn
    told = forecast(opened.profile, plan, cluster("h200"), sequence=SEQUENCE, optimizer=optimizer)
    expected = f"{BATCH * SEQUENCE / told.step_seconds:,.0f} tokens/s"
    print(f"forecast for an H200: {expected}, {told.peak_bytes / 2**30:.2f} GiB with what torch does not count")
    session = parity.open_session(plan, opened, optimizer, dtype="float32", device=DEVICE)
    return measured(lambda number: session.loop.step(samples(number), 1e-4))


class HandWritten(nn.Module):
    """A linear layer with an adapter, as torchtune has it; the weight a bf16 tensor, or torchao's in NF4."""

    def __init__(self, n: int, k: int, multiply: Callable[[Tensor, Any], Tensor], pack: Callable[[Tensor], Any]):
        super().__init__()
        self.multiply, self.packed = multiply, pack(torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE) * STD)
        self.first = nn.Parameter(torch.randn(RANK, k, dtype=torch.bfloat16, device=DEVICE) * STD)
        self.second = nn.Parameter(torch.zeros(n, RANK, dtype=torch.bfloat16, device=DEVICE))

    def forward(self, x: Tensor) -> Tensor:
        return self.multiply(x, self.packed) + 2.0 * F.linear(F.linear(x, self.first), self.second)


def peer_layers() -> tuple[str, Callable[[int, int], nn.Module]]:
    """What makes the peer's linear layers, by what can be imported."""
    if HAS_GPU and all(importlib.util.find_spec(name) for name in ("peft", "bitsandbytes")):
        import bitsandbytes as bnb

        def make(n: int, k: int) -> nn.Module:
            layer = bnb.nn.Linear4bit(k, n, bias=False, compute_dtype=torch.bfloat16, quant_type="nf4", device="meta")
            value = torch.randn(n, k, dtype=torch.bfloat16, device=DEVICE) * STD
            layer.weight = bnb.nn.Params4bit(value.cpu(), requires_grad=False, quant_type="nf4").to(DEVICE)
            return layer

        return "peft + bitsandbytes", make
    for path in ("torchao.dtypes.nf4tensor", "torchao.quantization.quantize_.workflows.nf4.nf4_tensor"):
        try:
            found = importlib.import_module(path)
        except ImportError:
            continue
        settings = {"multiply": found.linear_nf4, "pack": found.to_nf4}
        return "transformers + torchao's linear_nf4", functools.partial(HandWritten, **settings)
    return "transformers, bf16 weights", lambda n, k: HandWritten(n, k, F.linear, lambda weight: weight)


def peer() -> tuple[str, tuple[float, float]]:
    import transformers

    settings = {key: value for key, value in config_for(dimensions()).items() if key != "architectures"}
    with torch.device("meta"):
        model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**settings, attn_implementation="sdpa"))
    name, make = peer_layers()
    for block in model.model.layers:
        for holder in (block.self_attn, block.mlp):
            for own, module in list(holder.named_children()):
                if isinstance(module, nn.Linear):
                    setattr(holder, own, make(*module.weight.shape))
    for holder in model.modules():
        for own, value in list(holder._parameters.items()):
            if value is not None and value.device.type == "meta":
                made = torch.full(value.shape, STD, dtype=torch.bfloat16, device=DEVICE).uniform_(-STD, STD)
                holder._parameters[own] = nn.Parameter(made + (value.dim() == 1), requires_grad=False)
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config).to(DEVICE)
    model.config.use_cache = False
    if "peft" in name:
        import peft

        model = peft.get_peft_model(model, peft.LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules="all-linear"))
    model.train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    trained = [each for each in model.parameters() if each.requires_grad]
    update = torch.optim.AdamW(trained, lr=1e-4, fused=HAS_GPU)

    def step(number: int) -> None:
        batch = samples(number)
        for tokens, targets in zip(batch.inputs.split(MICROBATCH), batch.targets.split(MICROBATCH), strict=True):
            scores = model(input_ids=tokens).logits
            loss = F.cross_entropy(scores.flatten(0, 1).float(), targets.flatten(), reduction="sum")
            (loss / batch.num_tokens).backward()
        torch.nn.utils.clip_grad_norm_(trained, 1.0)
        update.step()
        update.zero_grad()

    return name, measured(step)


def main() -> None:
    words = sys.argv[1:]
    plan = load_artefact(Plan, words[words.index("--plan") + 1]) if "--plan" in words else our_plan()
    rows: dict[str, tuple[float, float]] = {}
    if "ours" in words or "peer" not in words:
        rows["ours"] = ours(plan)
        gc.collect()
        torch.cuda.empty_cache()
    if "peer" in words or "ours" not in words:
        name, rows["peer"] = peer()
        print(f"peer: {name}")
    for name, (rate, most) in rows.items():
        print(f"{name:5}  {rate:10,.0f} tokens/s  {most:6.2f} GiB allocated")
    if len(rows) == 2:
        ratio = rows["ours"][0] / rows["peer"][0]
        print(f"ratio {ratio:.2f} (goal {GOAL_RATIO:g}), {rows['ours'][1]:.2f} GiB (goal {GOAL_GIB:g})")


if __name__ == "__main__":
    main()
