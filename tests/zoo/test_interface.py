"""What every model promises a plan: stages that compose, shapes between them, a start for every tensor."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from model_families import MODELS, filled, microbatch

from meshwright.models.presets import config_kind, profile_of
from meshwright.ops.model_interface import Inside
from meshwright.ops.recompute import recomputed
from meshwright.zoo import module_of

STAGED = [name for name in MODELS if "stages" not in profile_of(MODELS[name], name).uncut]


def step(model: Any, batch: tuple[Any, ...]) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.loss_scale = 0.5
    loss = model(*batch)
    (loss * 0.5).backward()
    return loss.detach(), gradients(model)


def gradients(*stages: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for stage in stages for name, p in stage.named_parameters()}


@pytest.mark.parametrize("name", STAGED)
def test_stages_in_a_row_are_the_whole(name: str) -> None:
    """Wherever it is cut: the same loss, the same gradients, and between them the shapes the profile promises."""
    config, batch = MODELS[name], microbatch(MODELS[name], 3)
    profile = profile_of(config, name)
    tied = {f"{layer.name}.{p.name}": p.tied for layer in profile.layers for p in layer.params if p.tied}
    loss, expected = step(filled(config), batch)
    handed_on = [layer.boundary(3, 12) for layer in profile.layers for _ in range(layer.repeat)]
    for cut in range(1, profile.num_blocks):
        first, last = filled(config), filled(config)
        first.keep(((0, cut),))
        last.keep(((cut, profile.num_blocks),))
        sent = first(batch[0])
        assert tuple(sent.shape) == last.boundary(batch[0], cut)
        assert sent.numel() == handed_on[cut]  # by the block before, the first layer being no block
        received = sent.detach().requires_grad_()
        first.loss_scale = last.loss_scale = 0.5
        found = last(*batch, received=received)
        (found * 0.5).backward()
        sent.backward(received.grad)
        torch.testing.assert_close(found, loss, rtol=1e-12, atol=0)
        together: dict[str, torch.Tensor] = {}
        for stage in (first, last):
            for where, gradient in gradients(stage).items():
                whole = tied.get(where, where)
                together[whole] = together[whole] + gradient if whole in together else gradient
        assert together.keys() == expected.keys()
        for where, gradient in together.items():
            torch.testing.assert_close(gradient, expected[where], rtol=1e-9, atol=1e-12, msg=where)


@pytest.mark.parametrize("name", STAGED)
def test_blocks_computed_again_are_the_same(name: str) -> None:
    config, batch = MODELS[name], microbatch(MODELS[name], 3)
    plain, again = filled(config), filled(config)
    for block in again.block_modules():
        block.forward = recomputed(block.forward)
    _, expected = step(plain, batch)
    _, found = step(again, batch)
    assert all(torch.equal(found[where], gradient) for where, gradient in expected.items())
    assert all(torch.equal(a, b) for a, b in zip(plain.buffers(), again.buffers(), strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_has_a_start_and_the_start_trains(name: str) -> None:
    model, batch = filled(MODELS[name]), microbatch(MODELS[name], 4)
    tensors = (*model.named_parameters(), *model.named_buffers())
    for where, tensor in tensors:
        tensor, value = tensor.detach(), model.init_value(where)
        assert (tensor == value).all() if isinstance(value, float) else abs(float(tensor.mean())) < 5 * value[1]
    loss, found = step(model, batch)
    assert math.isfinite(loss)
    assert all(gradient is not None and gradient.isfinite().all() for gradient in found.values())
    with torch.no_grad():
        norm = sum(float(each.square().sum()) for each in found.values()) ** 0.5
        for where, parameter in model.named_parameters():
            parameter -= 1e-3 / norm * found[where]
    assert model(*batch) < loss


@pytest.mark.parametrize("name", MODELS)
def test_weights_weigh_samples(name: str) -> None:
    model = filled(MODELS[name]).eval()  # a batch norm would let samples see each other
    inputs, targets, weights = microbatch(MODELS[name], 4)
    weights = weights * torch.tensor([1.0, 0.0, 2.0, 0.5], dtype=weights.dtype).view(-1, *[1] * (weights.dim() - 1))
    total = 0.0
    for i, weight in enumerate((1.0, 0.0, 2.0, 0.5)):
        one = tuple(each[i : i + 1] for each in inputs) if isinstance(inputs, tuple) else inputs[i : i + 1]
        total += weight * model(one, targets[i : i + 1], torch.ones_like(weights[i : i + 1]))
    torch.testing.assert_close(model(inputs, targets, weights), total, rtol=1e-10, atol=0)


@pytest.mark.parametrize("name", [name for name in MODELS if "inside" not in profile_of(MODELS[name], name).uncut])
def test_regions_in_pieces_add_up(name: str) -> None:
    """Two copies with half of each cut parameter: a region's outputs before its bias add up to the whole's."""
    config, batch = MODELS[name], microbatch(MODELS[name], 3)
    params = {
        (part.name, param.name): param
        for part in module_of(config).parts()
        for layer in profile_of(config, name).layers
        if layer.name == part.kind and layer.is_block
        for param in layer.params
    }
    halves = [filled(config), filled(config)]
    for index, model in enumerate(halves):
        model.set_split(index, 2)
        for (part, own), param in params.items():
            if param.cut is not None:
                holder, _, leaf = f"{part}.{own}".rpartition(".")
                whole = getattr(model.get_submodule(holder), leaf)
                piece = torch.nn.Parameter(whole.detach().chunk(2, param.cut)[index].clone())
                setattr(model.get_submodule(holder), leaf, piece)
    model = filled(config)
    seen: dict[int, tuple[Any, ...]] = {}
    regions = list(model.regions())
    assert regions
    for place, region in enumerate(regions):
        (entry,) = region.entries
        entry.register_forward_hook(lambda _, args, out, place=place: seen.update({place: (args, out)}))
    model(*batch)
    for place, region in enumerate(regions):
        args, expected = seen[place]
        outputs = [part_of(list(half.regions())[place], args) for half in halves]
        bias = getattr(region.row, "bias", None)
        whole = outputs[0] + outputs[1] - (0 if bias is None else bias)
        torch.testing.assert_close(whole, expected, rtol=1e-10, atol=1e-12)


def part_of(region: Inside, args: tuple[Any, ...]) -> torch.Tensor:
    (entry,) = region.entries
    return entry(*args)


@pytest.mark.parametrize("name", STAGED)
def test_lower_precision_inside_and_the_promised_dtype_between(name: str) -> None:
    with torch.backends.mkldnn.flags(enabled=False):  # some machines refuse the bf16 instructions they advertise
        _check_lower_precision(name)


def _check_lower_precision(name: str) -> None:
    config = MODELS[name]
    first, last = filled(config, torch.float32), filled(config, torch.float32)
    for model in (first, last):
        model.set_compute_dtype(torch.bfloat16)
    first.keep(((0, 1),))
    last.keep(((1, profile_of(config, name).num_blocks),))
    batch = microbatch(config, 3, dtype=torch.float32)
    sent = first(batch[0])
    promised = torch.bfloat16 if config_kind(config) == "decoder" else torch.float32
    assert sent.dtype == first.boundary_dtype(torch.float32) == promised
    loss = last(*batch, received=sent)
    assert loss.dtype == torch.float32
    loss.backward()
    loss = loss.detach()
    assert {p.grad.dtype for p in last.parameters()} == {torch.float32}
    exact = filled(config, torch.float32)(*batch).detach()
    assert float(loss) == pytest.approx(float(exact), rel=0.03)
    assert float(loss) != float(exact)


@pytest.mark.parametrize("name", [name for name in MODELS if config_kind(MODELS[name]) in ("vit", "conv")])
def test_hits_are_counted_while_evaluating_and_taken_once(name: str) -> None:
    model = filled(MODELS[name])
    inputs, _, weights = microbatch(MODELS[name], 5)
    model(inputs, torch.zeros(5, dtype=torch.int64), weights)
    assert float(model.take_hits()) == 0.0  # training counts nothing
    model.eval()
    best = model(inputs).argmax(-1)
    best[1] = (best[1] + 1) % 100
    model(inputs, best, weights * 0.5)
    model(inputs, best, weights)
    assert float(model.take_hits()) == pytest.approx(6.0)
    assert float(model.take_hits()) == 0.0
