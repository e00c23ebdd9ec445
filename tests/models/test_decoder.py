"""The decoder itself: causal, tied where it says so, and its stages in a row are the whole."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from model_families import FAMILIES

from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError
from meshwright.models.config import PRESETS, DecoderConfig, preset
from meshwright.models.decoder import Decoder
from meshwright.runtime.init import seeded


def decoder(config: DecoderConfig) -> Decoder:
    """Seeded weights, large enough that everything matters."""
    model = Decoder(replace(config, init_std=0.2)).double()
    source = seeded(model.init_value, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(source(name, Box.whole(tuple(parameter.shape)), torch.float64))
    return model


def tokens_of(config: DecoderConfig, sequence: int = 12) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, sequence), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_changes_its_own_and_later_logits_only(family: str) -> None:
    model, tokens = decoder(FAMILIES[family]), tokens_of(FAMILIES[family])
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % FAMILIES[family].vocab_size
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, FAMILIES[family].vocab_size)
    assert torch.equal(before[:, :7], after[:, :7])
    assert all((before[:, place] - after[:, place]).abs().max() > 1e-4 for place in range(7, 12))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_matter(family: str) -> None:
    """Without positions, attention over the same two tokens in another order would give the same last logits."""
    model, tokens = decoder(FAMILIES[family]), tokens_of(FAMILIES[family])
    swapped = tokens[:, [1, 0, *range(2, 12)]]
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sum_of_losses_is_cross_entropy_by_weight(family: str) -> None:
    model, tokens = decoder(FAMILIES[family]), tokens_of(FAMILIES[family])
    targets = tokens.roll(-1, dims=1)
    weights = (torch.arange(24).view(2, 12) % 3 > 0).double()
    each = -model(tokens).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model(tokens, targets, weights), (each * weights).sum(), rtol=1e-12, atol=0)


@pytest.mark.parametrize("family", FAMILIES)
def test_stages_in_a_row_are_the_whole(family: str) -> None:
    config = FAMILIES[family]
    whole, first, last = (decoder(config) for _ in range(3))
    first.keep(0, 1)
    last.keep(1, config.num_layers)
    names = [name for part in (first, last) for name, _ in part.named_parameters(remove_duplicate=False)]
    assert sorted(names) == sorted(name for name, _ in whole.named_parameters(remove_duplicate=False))
    tokens = tokens_of(config)
    if config.tied:
        last.head.output.weight = first.embed.tokens.weight
    assert torch.equal(last(first(tokens)), whole(tokens))


def test_a_tied_head_is_the_embedding() -> None:
    for family, config in FAMILIES.items():
        model = Decoder(config)
        assert (model.head.output.weight is model.embed.tokens.weight) == config.tied, family


def test_grouped_heads_equal_whole_heads_with_repeated_keys_and_values() -> None:
    config = FAMILIES["llama"]
    assert config.num_kv_heads < config.num_heads
    grouped = decoder(config)
    whole = decoder(replace(config, num_kv_heads=config.num_heads))
    shared = config.num_heads // config.num_kv_heads
    weights = grouped.state_dict()
    for name, value in weights.items():
        if ".key." in name or ".value." in name:
            heads = value.unflatten(0, (config.num_kv_heads, config.size_of_head))
            weights[name] = heads.repeat_interleave(shared, dim=0).flatten(0, 1)
    whole.load_state_dict(weights)
    tokens = tokens_of(config)
    torch.testing.assert_close(grouped(tokens), whole(tokens), rtol=1e-10, atol=1e-12)


def test_presets_are_found_by_name_and_a_wrong_name_is_told_the_nearest() -> None:
    assert all(preset(name) is PRESETS[name] for name in PRESETS)
    with pytest.raises(MeshwrightError, match='Did you mean "llama3-8b"'):
        preset("llama3-8")


@pytest.mark.parametrize(
    ("changes", "where"),
    [
        ({"num_kv_heads": 3}, "num_kv_heads"),
        ({"hidden_size": 30}, "hidden_size"),
        ({"head_size": 7}, "head_size"),
        ({"num_layers": 0}, "num_layers"),
    ],
)
def test_impossible_dimensions_are_refused(changes: dict[str, int], where: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        replace(FAMILIES["llama"], **changes)
    assert [problem.where for problem in caught.value.problems] == [where]
