"""Flops of a model, by the convention MFU is published in and by what must be computed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from meshwright.core.profile import Profile
from meshwright.models.frozen_parameters import freeze, frozen_by
from meshwright.models.presets import preset, profile, profile_of

SEQUENCE = 4096


def published(model: Profile, sequence: int = SEQUENCE) -> float:
    return model.model_flops(1, sequence).published


@pytest.mark.parametrize("name", ["llama3-8b", "llama3.2-1b", "gpt3-175b"])
def test_the_published_convention_is_6_n_and_12_l_h_s(name: str) -> None:
    model, config = profile(name), preset(name)
    attention = 12 * config.num_layers * config.hidden_size * SEQUENCE
    assert published(model) == pytest.approx(6 * model.num_params + attention, rel=1e-12)


def test_heads_that_are_wider_than_the_stream_count_as_they_are() -> None:
    model, config = profile("qwen3-0.6b"), preset("qwen3-0.6b")
    heads = config.num_heads * config.head_size
    assert heads == 2 * config.hidden_size
    expected = 6 * model.num_params + 12 * config.num_layers * heads * SEQUENCE
    assert published(model) == pytest.approx(expected, rel=1e-12)


def test_of_experts_only_those_that_a_token_is_sent_to_count() -> None:
    config = preset("mixtral-8x7b")
    few = replace(config, num_experts=config.experts_per_token)
    both = [published(profile_of(each, "m")) for each in (config, few)]
    routers = 6 * config.num_layers * config.hidden_size * (config.num_experts - few.num_experts)
    assert both[0] == pytest.approx(both[1] + routers, rel=1e-12)


def test_what_is_needed_has_half_the_attention_and_no_product_for_the_embedding() -> None:
    model, config = profile("llama3-8b"), preset("llama3-8b")
    flops = model.model_flops(1, SEQUENCE)
    embedding = 6 * config.vocab_size * config.hidden_size
    half = 6 * config.num_layers * config.hidden_size * SEQUENCE
    assert flops.published - flops.needed == pytest.approx(embedding + half, rel=1e-9)
    tied = profile("llama3.2-1b").model_flops(1, SEQUENCE)  # its table multiplies once, as the head
    config = preset("llama3.2-1b")
    assert tied.published - tied.needed == pytest.approx(
        6 * config.num_layers * config.hidden_size * SEQUENCE, rel=1e-9
    )


def test_both_are_proportional_to_tokens_and_equal_for_samples() -> None:
    model = profile("llama3-8b")
    assert model.model_flops(10, SEQUENCE).needed == pytest.approx(10 * model.model_flops(1, SEQUENCE).needed)
    images = profile("resnet50").model_flops(1, 1)
    assert images.published == images.needed > 0


def test_frozen_parameters_have_no_weight_gradient_and_nothing_before_the_first_trained_one_goes_back() -> None:
    whole = profile("llama3.2-1b")
    last = freeze(whole, frozen_by((), ("blocks.15.*",)))
    first = freeze(whole, frozen_by((), ("blocks.0.*",)))
    config = preset("llama3.2-1b")
    block = whole.block_layers[0].num_params()
    attention = 4 * config.hidden_size * SEQUENCE
    # Trained last: 15 blocks and the embedding forward only.
    layers = config.num_layers - 1
    forward = 2 * (whole.num_params - block) + layers * attention
    head_gone_back = 0  # N counts the tied table once, where rows are looked up
    norm_after = 2 * config.hidden_size  # behind the trained block: its input's gradient
    assert published(last) == pytest.approx(forward + norm_after + head_gone_back + 6 * block + 3 * attention, rel=1e-9)
    embedding = config.vocab_size * config.hidden_size
    expected = 6 * block + 4 * (whole.num_params - block - embedding) + 2 * embedding
    assert published(first) == pytest.approx(expected + 3 * config.num_layers * attention, rel=1e-9)
