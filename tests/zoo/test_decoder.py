"""The decoder itself: causal, tied where it says so, and blind to other documents."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from model_families import FAMILIES, filled

from meshwright.core.errors import MeshwrightError
from meshwright.models.presets import PRESETS, DecoderConfig, preset
from meshwright.zoo.decoder import Decoder
from meshwright.zoo.layers import rope_frequencies, rope_table


def tokens_of(config: DecoderConfig, sequence: int = 12) -> torch.Tensor:
    return torch.randint(config.vocab_size, (2, sequence), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_changes_its_own_and_later_logits_only(family: str) -> None:
    model, tokens = filled(FAMILIES[family]), tokens_of(FAMILIES[family])
    changed = tokens.clone()
    changed[:, 7] = (changed[:, 7] + 1) % FAMILIES[family].vocab_size
    before, after = model(tokens), model(changed)
    assert before.shape == (2, 12, FAMILIES[family].vocab_size)
    # Close, not equal: experts get other rows beside the same ones, and kernels sum by the number of rows.
    torch.testing.assert_close(before[:, :7], after[:, :7], rtol=1e-12, atol=1e-12)
    assert all((before[:, place] - after[:, place]).abs().max() > 1e-4 for place in range(7, 12))


@pytest.mark.parametrize("family", FAMILIES)
def test_positions_matter(family: str) -> None:
    """Without positions, attention over the same two tokens in another order would give the same last logits."""
    model, tokens = filled(FAMILIES[family]), tokens_of(FAMILIES[family])
    swapped = tokens[:, [1, 0, *range(2, 12)]]
    assert (model(tokens)[:, -1] - model(swapped)[:, -1]).abs().max() > 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_the_sum_of_losses_is_cross_entropy_by_weight(family: str) -> None:
    model, tokens = filled(FAMILIES[family]), tokens_of(FAMILIES[family])
    targets = tokens.roll(-1, dims=1)
    weights = (torch.arange(24).view(2, 12) % 3 > 0).double()
    each = -model(tokens).log_softmax(-1).gather(-1, targets.unsqueeze(-1)).squeeze(-1)
    torch.testing.assert_close(model(tokens, targets, weights), (each * weights).sum(), rtol=1e-12, atol=0)


def documents_of(*lengths: int) -> torch.Tensor:
    return torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths)).int()


@pytest.mark.parametrize("family", FAMILIES)
def test_documents_side_by_side_are_documents_alone(family: str) -> None:
    model, tokens = filled(FAMILIES[family]), tokens_of(FAMILIES[family])
    lengths = ((5, 4, 3), (1, 11))
    documents = torch.stack([documents_of(*each) for each in lengths])
    packed = model((tokens, documents))
    for row, each in enumerate(lengths):
        alone = [model(piece.unsqueeze(0))[0] for piece in tokens[row].split(each)]
        torch.testing.assert_close(packed[row], torch.cat(alone), rtol=1e-11, atol=1e-12)


def test_one_document_is_no_documents() -> None:
    model, tokens = filled(FAMILIES["llama"]), tokens_of(FAMILIES["llama"])
    one = torch.zeros_like(tokens, dtype=torch.int32)
    torch.testing.assert_close(model((tokens, one)), model(tokens), rtol=1e-11, atol=1e-12)


def test_a_window_ends_what_a_token_sees() -> None:
    config = replace(FAMILIES["llama"], num_layers=1, sliding_window=4)
    model, tokens = filled(config), tokens_of(config)
    changed = tokens.clone()
    changed[:, 3] = (changed[:, 3] + 1) % config.vocab_size
    differs = (model(tokens) - model(changed)).abs().amax((0, 2)) > 1e-9
    assert differs.nonzero().flatten().tolist() == [3, 4, 5, 6]
    wide = filled(replace(config, sliding_window=12))
    assert torch.equal(wide(tokens), filled(replace(config, sliding_window=0))(tokens))


@pytest.mark.parametrize("name", ["llama3.2-1b", "llama3.1-8b", "llama3.1-70b", "llama3.1-405b"])
def test_stretched_rotary_positions_are_those_of_transformers(name: str) -> None:
    pytest.importorskip("transformers")
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = preset(name)
    assert (config.rope_scaling, config.max_sequence) == ("llama3", 131072)
    scaling = {
        "rope_type": "llama3",
        "rope_theta": config.rope_theta,
        "factor": config.rope_factor,
        "low_freq_factor": config.rope_low_frequency,
        "high_freq_factor": config.rope_high_frequency,
        "original_max_position_embeddings": config.rope_original_sequence,
    }
    their_config = LlamaConfig(
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_heads,
        head_dim=config.size_of_head,
        max_position_embeddings=config.max_sequence,
        rope_parameters=scaling,
    )
    module, x = LlamaRotaryEmbedding(their_config), torch.zeros(1)
    ours = rope_frequencies(config, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(ours, module.inv_freq, rtol=1e-6, atol=0)
    # As far as positions go, one unit of float32 in a frequency is this much of an angle.
    places = torch.tensor([0, 1, 8191, 8192, 65535, 131071])
    for mine, theirs in zip(rope_table(config, places, x), module(x, places[None]), strict=True):
        torch.testing.assert_close(mine, theirs[0, :, : config.size_of_head // 2], rtol=0, atol=131072 * 2**-23)
    plain = rope_frequencies(replace(config, rope_scaling="none"), torch.device("cpu"), torch.float32)
    assert not torch.allclose(ours, plain, rtol=0.1)


def test_a_tied_head_is_the_embedding() -> None:
    for family, config in FAMILIES.items():
        model = Decoder(config)
        assert (model.head.output.weight is model.embed.tokens.weight) == config.tied, family


def test_grouped_heads_equal_whole_heads_with_repeated_keys_and_values() -> None:
    config = FAMILIES["llama"]
    assert config.num_kv_heads < config.num_heads
    grouped = filled(config)
    whole = filled(replace(config, num_kv_heads=config.num_heads))
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
        ({"sliding_window": -1}, "sliding_window"),
        ({"rope_scaling": "llama3", "rope_low_frequency": 4.0}, "rope_low_frequency"),
        ({"rope_scaling": "llama3", "positions": "learned"}, "rope_scaling"),
        ({"balance": 0.1}, "balance"),
        ({"num_experts": 4, "expert_ffn_size": 8}, "experts_per_token"),
        ({"num_experts": 4, "experts_per_token": 5, "expert_ffn_size": 8}, "experts_per_token"),
        ({"num_experts": 4, "experts_per_token": 2}, "expert_ffn_size"),
        ({"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8, "num_dense_layers": 3}, "num_dense_layers"),
        ({"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8, "mlp": "gelu"}, "num_experts"),
        ({"num_experts": 4, "experts_per_token": 2, "expert_ffn_size": 8, "capacity_factor": -1.0}, "capacity_factor"),
    ],
)
def test_impossible_dimensions_are_refused(changes: dict[str, Any], where: str) -> None:
    with pytest.raises(MeshwrightError) as caught:
        replace(FAMILIES["llama"], **changes)
    assert [problem.where for problem in caught.value.problems] == [where]


@pytest.mark.parametrize(
    ("name", "changes", "places"),
    [
        ("vit-digits", {"patch_size": 3}, ["patch_size"]),
        ("vit-digits", {"num_heads": 5}, ["hidden_size"]),
        ("vgg-tiny", {"image_size": 6}, ["image_size"]),
        ("vgg-tiny", {"stages": (), "fc_size": 0}, ["stages", "fc_size", "widths"]),
        ("resnet-tiny", {"widths": (8, 0, 2)}, ["widths", "widths"]),
        ("dlrm-tiny", {"tables": (3, 0), "num_dense": -1}, ["tables", "num_dense"]),
    ],
)
def test_impossible_dimensions_of_other_models_are_refused_all_at_once(
    name: str, changes: dict[str, Any], places: list[str]
) -> None:
    with pytest.raises(MeshwrightError) as caught:
        replace(PRESETS[name], **changes)
    assert [problem.where for problem in caught.value.problems] == places


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_the_trunk_as_one_function_with_documents_too(family: str) -> None:
    model, tokens = filled(FAMILIES[family]), tokens_of(FAMILIES[family])
    documents = torch.arange(12).expand(2, 12) // 5
    before = [model(tokens), model((tokens, documents))]
    calls = []

    def counted(function: Any) -> Any:
        return lambda *given: calls.append(len(given)) or function(*given)

    model.compile_trunk(counted)
    after = [model(tokens), model((tokens, documents))]
    assert calls == [4, 4]
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
