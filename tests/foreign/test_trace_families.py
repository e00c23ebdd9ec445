"""Other people's models: what the tracer counts of products is what torch counts when they really run.

Tests of `foreign/trace_ops.py`, `foreign/trace_record.py`, `hf/weights_module.py`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from meshwright.core.profile import Profile
from meshwright.foreign.trace import trace_module
from meshwright.hf.weights_module import parameters_on_meta
from meshwright.models.presets import PRESETS, profile_of

transformers = pytest.importorskip("transformers")

WORDS, SEQUENCE = 96, 48
DIMENSIONS = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 2, "num_attention_heads": 4}


class Two(nn.Module):
    """A model that reads two things."""

    def __init__(self, inner: nn.Module, first: str):
        super().__init__()
        self.inner, self.first = inner, first

    def forward(self, given: Tensor, tokens: Tensor) -> Tensor:
        return self.inner(**{self.first: given}, decoder_input_ids=tokens, use_cache=False).logits


def plain(kind: str, **settings: Any) -> nn.Module:
    config = getattr(transformers, f"{kind}Config")(vocab_size=WORDS, **settings)
    config.use_cache = False
    name = {"GPT2": "GPT2LMHeadModel", "Bert": "BertForMaskedLM"}.get(kind, f"{kind}ForCausalLM")
    return getattr(transformers, name)(config)


def t5() -> nn.Module:
    config = transformers.T5Config(vocab_size=WORDS, d_model=64, d_ff=160, num_layers=1, num_heads=4, d_kv=16)
    return Two(transformers.T5ForConditionalGeneration(config), "input_ids")


def whisper() -> nn.Module:
    sizes = {"encoder_layers": 1, "decoder_layers": 1, "encoder_ffn_dim": 160, "decoder_ffn_dim": 160}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4}
    words = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    config = transformers.WhisperConfig(vocab_size=WORDS, d_model=64, **sizes, **heads, **words)
    return Two(transformers.WhisperForConditionalGeneration(config), "input_features")


TOKENS = torch.zeros(1, SEQUENCE, dtype=torch.int64)
FAMILIES: dict[str, tuple[Callable[[], nn.Module], Any]] = {
    "gpt2": (functools.partial(plain, "GPT2", n_embd=64, n_layer=2, n_head=4), TOKENS),
    "llama": (functools.partial(plain, "Llama", **DIMENSIONS, num_key_value_heads=2), TOKENS),
    "qwen3": (functools.partial(plain, "Qwen3", **DIMENSIONS, num_key_value_heads=2, head_dim=16), TOKENS),
    "bert": (functools.partial(plain, "Bert", **DIMENSIONS), TOKENS),
    "mamba": (functools.partial(plain, "Mamba", hidden_size=64, num_hidden_layers=2, state_size=6), TOKENS),
    "t5": (t5, (TOKENS, TOKENS)),
    "whisper": (whisper, (torch.zeros(1, 80, 3000), TOKENS)),
}
UNCOUNTED = {"attention", "scaled_dot_product", "flash"}


def products(profile: Profile, samples: int, sequence: int) -> float:
    ops = [(layer.repeat, op) for layer in profile.layers for op in layer.ops if op.kind == "matmul"]
    return sum(times * (op.flops(samples, sequence) + op.backward_flops(samples, sequence)) for times, op in ops)


def really(module: nn.Module, inputs: Any) -> float:
    counter = FlopCounterMode(display=False)
    given = inputs if isinstance(inputs, tuple) else (inputs,)
    module.eval()  # dropout would make torch multiply attention out here
    with counter:
        output = module(*given)
        (output if isinstance(output, Tensor) else output.logits).sum().backward()
    found = counter.get_flop_counts()["Global"].items()
    return float(sum(flops for op, flops in found if not any(part in str(op) for part in UNCOUNTED)))


@pytest.mark.parametrize("name", [name for name in FAMILIES if name != "mamba"])
def test_products_are_those_torch_counts(name: str) -> None:
    make, example = FAMILIES[name]
    module = make()
    profile = trace_module(module, example, name=name)
    sequence = SEQUENCE if profile.counts == "tokens" else 1
    attention = [(layer.repeat, op) for layer in profile.layers for op in layer.ops if op.kind == "attention"]
    assert attention
    # With a bias that is learned, a CPU multiplies attention out: two products forward, four back.
    biased = [(times, op) for times, op in attention if name == "t5" and "SelfAttention" in op.name]
    apart = sum(3 * times * op.flops(1, sequence) for times, op in biased)
    assert products(profile, 1, sequence) + apart == pytest.approx(really(module, example), rel=1e-6)
    assert profile.unpriced == () or name == "t5"  # whose bias of all pairs is kept once, whatever the samples
    assert all(op.saved.bss == 0 for layer in profile.layers for op in layer.ops if name != "t5")


def test_a_causal_model_is_traced_as_one() -> None:
    """Without values transformers takes any text for several packed ones, and makes a mask of all pairs."""
    make, example = FAMILIES["llama"]
    (op,) = [op for op in trace_module(make(), example, name="llama").layers[1].ops if op.kind == "attention"]
    assert op.flops.bss == 0.5 * 4 * 64


def test_a_state_space_model_says_that_it_goes_token_by_token() -> None:
    make, example = FAMILIES["mamba"]
    profile = trace_module(make(), example, name="mamba")
    assert any("grows with the sequence" in each for each in profile.unpriced)
    linears = [op for layer in profile.block_layers for op in layer.ops if op.name.endswith("proj.matmul")]
    assert {op.shape for op in linears} >= {(256, 64), (64, 128)}
    assert all(op.backward_flops.bs == 2 * op.flops.bs for op in linears)


def test_experts_are_one_grouped_product() -> None:
    sizes = {**DIMENSIONS, "num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    profile = trace_module(plain("Mixtral", **sizes), TOKENS, name="mixtral")
    experts = [op for op in profile.block_layers[0].ops if op.kind == "matmul" and op.matrices.one == 4]
    assert sorted(op.flops.bs for op in experts) == [2 * 2 * 64 * 160, 2 * 2 * 64 * 320]


def test_seventy_billion_parameters_are_traced_without_any() -> None:
    """And their blocks' products are those of our own model of these dimensions."""
    sizes = {"hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80, "num_attention_heads": 64}
    config = transformers.LlamaConfig(vocab_size=128256, num_key_value_heads=8, max_position_embeddings=8192, **sizes)
    config.use_cache = False
    with parameters_on_meta(), torch.device("meta"):
        module = transformers.LlamaForCausalLM(config)
    found = trace_module(module, torch.zeros(1, 4096, dtype=torch.int64), name="llama")
    ours = profile_of(PRESETS["llama3-70b"], "llama3-70b")
    assert (found.num_params, found.num_blocks) == (ours.num_params, 80)
    for kind in ("matmul", "attention"):
        mine, theirs = (
            [
                (op.flops.bs, op.flops.bss, op.backward_flops.bs, op.shape)
                for op in each.layers[1].ops
                if op.kind == kind
            ]
            for each in (ours, found)
        )
        assert sorted(mine) == sorted(theirs)
