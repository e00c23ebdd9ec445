"""The model of a run for the independent reference (`verify/reference.py`): scores as a function of the parameters.

- A decoder of ours that a Hugging Face family computes too: transformers' own module, with our weights as its own.
- A factory's or a folder's module: the module itself, before anything of ours has examined or changed it.
- Any other model of ours: its layers, with torch's batch norms, and without its loss.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from meshwright.core.box import Box
from meshwright.core.errors import MeshwrightError
from meshwright.foreign.factory import call_factory
from meshwright.hf.config_json import config_for, family_of
from meshwright.hf.weights_module import parameters_on_meta, transformers_module
from meshwright.hf.weights_read import parts_of_decoder, source_of_named
from meshwright.models.presets import DecoderConfig, DLRMConfig
from meshwright.ops.batch_norm import BatchNorm
from meshwright.run.model import ModelDescription, OpenedModel, open_model
from meshwright.verify.reference import Plain, Tensors, WideCasts, merged, unpacked
from meshwright.zoo.layers import MoE

LONGEST_EAGER = 512
"""Tokens up to which transformers' attention is the plain softmax of scores."""


def without_dropout(module: nn.Module) -> None:
    for each in module.modules():
        if isinstance(each, nn.modules.dropout._DropoutNd):
            each.p = 0.0


def plain_model(description: ModelDescription, *, seed: int, dtype: torch.dtype, dropout: bool = True) -> Plain:
    """The model of a run, filled as its ranks fill theirs."""
    section, sequence = description.section, description.sequence
    opened = open_model(description, seed)
    if section is None or description.config is not None:
        return plain_of(opened, sequence=sequence, dtype=dtype)
    loss = None
    if section.factory:
        torch.manual_seed(seed)
        module, loss, _ = call_factory(section.factory, section.arguments, sequence)
        values = {name: each.detach().to(dtype) for name, each in module.named_parameters()}
    else:
        module, _ = transformers_module(section.hf, sequence)
        values = _values(opened, dtype)
        source_of_named(section.hf, module)  # fills its buffers
    for each in module.modules():
        settings: Any = getattr(each, "config", None)
        if hasattr(settings, "use_cache"):
            settings.use_cache = False
        if getattr(settings, "_experts_implementation", "") == "grouped_mm":  # which knows no float64
            settings._experts_implementation_internal = "eager"
    if not dropout:
        without_dropout(module)
    made = _of_module(module, opened, values, dtype)
    if loss is not None:
        made.losses = loss
    return made


def plain_of(opened: OpenedModel, *, sequence: int, dtype: torch.dtype, foreign: bool = True) -> Plain:
    """A model of ours by its dimensions. `foreign`: as transformers computes it, where it does."""
    config = opened.model.config
    if isinstance(config, DecoderConfig) and foreign:
        made = _of_transformers(config, opened, sequence, dtype)
        if made is not None:
            return made
    model = opened.model
    for path, each in list(model.named_modules()):
        if isinstance(each, BatchNorm):  # torch's own in its place, under the same names
            plain = nn.BatchNorm2d(len(each.weight), each.epsilon, each.momentum, device=each.weight.device)
            plain.num_batches_tracked = None
            parent, _, name = path.rpartition(".")
            setattr(model.get_submodule(parent), name, plain)
    extra: list[_Balance | _LocalHeads] = []
    if isinstance(config, DecoderConfig) and config.num_experts and config.balance:
        extra.append(_Balance(model))
    made = _of_module(model, opened, _values(opened, dtype), dtype)
    if isinstance(config, DecoderConfig) and config.local_heads:
        extra.append(_LocalHeads(model, config, made.parameters))
    made.packs_documents = isinstance(config, DecoderConfig) and not config.capacity_factor
    if extra:
        made.extra_loss = lambda *asked: sum(each.take(*asked) for each in extra)
    if isinstance(config, DLRMConfig):
        made.losses = lambda scores, targets: F.binary_cross_entropy_with_logits(
            scores, targets.to(scores.dtype), reduction="none"
        )
    return made


def _values(opened: OpenedModel, dtype: torch.dtype) -> Tensors:
    result = {}
    for name, each in opened.model.named_parameters():
        name = opened.model.public_name(name)
        result[name] = opened.source(name, Box.whole(tuple(each.shape)), dtype).contiguous()
    return result


def _leaves(opened: OpenedModel, values: Tensors) -> Tensors:
    trained = {opened.model.public_name(name): each.requires_grad for name, each in opened.model.named_parameters()}
    return {name: value.clone().requires_grad_(trained[name]) for name, value in values.items()}


def _blocks(opened: OpenedModel) -> tuple[str, ...]:
    model = opened.model
    return tuple(model.public_name(f"{part.name}.") for part in model.parts() if part.is_block)


def _of_module(module: nn.Module, opened: OpenedModel, values: Tensors, dtype: torch.dtype) -> Plain:
    module.train()
    leaves, persistent = _leaves(opened, values), set(module.state_dict(keep_vars=True))
    buffers = {}
    for name, each in module.named_buffers():
        if each.device.type == "meta":
            each = opened.source(name, Box.whole(tuple(each.shape)), each.dtype)
        is_learnt = each.is_floating_point() and name in persistent
        buffers[name] = each.to(dtype, copy=True) if is_learnt else each.clone()

    def forward(inputs: Any) -> Any:
        given = inputs if isinstance(inputs, tuple) and not hasattr(module, "own_tokens") else (inputs,)
        return torch.func.functional_call(module, {**leaves, **buffers}, given)

    learnt = {name: each for name, each in buffers.items() if name in persistent and each.is_floating_point()}
    return Plain(parameters=leaves, forward=forward, buffers=learnt, blocks=_blocks(opened))


def _of_transformers(config: DecoderConfig, opened: OpenedModel, sequence: int, dtype: torch.dtype) -> Plain | None:
    """transformers' module of the family; None where no family computes this, or transformers is not there."""
    # Its balancing loss is another one.
    if importlib.util.find_spec("transformers") is None or config.balance or config.local_heads:
        return None
    try:
        family = family_of(config)
    except MeshwrightError:
        return None
    import transformers

    scale = 1.0 if config.adapter is None else config.adapter.scale
    config = replace(config, adapter=None)
    wide: Callable[[], Any] = WideCasts if dtype == torch.float64 else nullcontext
    kind: Any = getattr(transformers, family)
    with wide(), parameters_on_meta():
        settings = kind.config_class(**{k: v for k, v in config_for(config).items() if k != "architectures"})
        settings._attn_implementation = "eager" if sequence <= LONGEST_EAGER else "sdpa"
        settings._experts_implementation = "eager"  # the others know no float64
        settings.use_cache = False
        module = kind(settings)
    module.eval()  # without dropout, as our decoder
    names = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    parts = parts_of_decoder(config, names)
    leaves = _leaves(opened, _values(opened, dtype))
    decoded = {name: unpacked(each).to(dtype) for name, each in leaves.items() if each.dtype == torch.uint8}

    def forward(inputs: Any) -> Any:
        assert isinstance(inputs, Tensor)
        theirs: Tensors = {}  # made of ours so that gradients flow back
        with wide():
            for name, value in merged(leaves | decoded, scale).items():
                for part in parts[name]:
                    piece = part.as_stored(value[part.at.slices])
                    if piece.shape == part.shape:
                        theirs[part.name] = piece
                        continue
                    whole = theirs.setdefault(part.name, torch.zeros(part.shape, dtype=value.dtype))
                    whole[part.stored_box(part.at).slices] = piece
            return torch.func.functional_call(module, theirs, (inputs,)).logits

    return Plain(parameters=leaves, forward=forward, blocks=_blocks(opened), packs_documents=True)


class _Balance:
    """The balancing loss of experts, computed from what the routers returned; the layers' own is switched off."""

    def __init__(self, model: nn.Module):
        def note(router: nn.Module, _: Any, returned: tuple[Tensor, Tensor, Tensor]) -> None:
            chosen, _, scores = returned
            self.seen.setdefault(router, []).append((chosen, scores))

        self.seen: dict[nn.Module, list[tuple[Tensor, Tensor]]] = {}
        self.factors: dict[nn.Module, float] = {}
        for module in model.modules():
            if isinstance(module, MoE):
                self.factors[module.router], module.balance = module.balance, 0.0
                module.router.register_forward_hook(note)

    def take(self, *asked: Tensor) -> Tensor | float:
        total: Tensor | float = 0.0
        for router, calls in self.seen.items():
            chosen, scores = (torch.cat(each, dim=1) for each in zip(*calls, strict=True))
            chances = scores.softmax(-1) if router.kind == "softmax" else scores / scores.sum(-1, keepdim=True)
            for sample in range(len(chosen)):
                share = F.one_hot(chosen[sample].flatten(), scores.shape[-1]).to(scores.dtype).mean(0)
                even = share @ chances[sample].sum(0) * scores.shape[-1]
                total = total + self.factors[router] * even
        self.seen.clear()
        return total


class _LocalHeads:
    """The losses of heads between blocks, in plain torch, of what the blocks before them returned."""

    def __init__(self, model: Any, config: DecoderConfig, parameters: Tensors):
        def note(block: nn.Module, _: Any, returned: Tensor) -> None:
            self.seen.setdefault(block, []).append(returned)

        self.config, self.parameters = config, parameters
        self.names = {model.blocks[str(at - 1)]: f"local_heads.{at - 1}" for at in config.group_borders}
        self.seen: dict[nn.Module, list[Tensor]] = {}
        for block in self.names:
            block.register_forward_hook(note)

    def take(self, *asked: Tensor) -> Tensor | float:
        total: Tensor | float = 0.0
        for block, calls in self.seen.items() if asked else ():
            targets, weights = asked
            name, x = self.names[block], torch.cat(calls, dim=1)
            norm, epsilon = self.parameters[f"{name}.norm.weight"], self.config.norm_epsilon
            if self.config.norm == "layer":
                x = F.layer_norm(x, x.shape[-1:], norm, self.parameters[f"{name}.norm.bias"], epsilon)
            else:
                x = x * (x.square().mean(-1, keepdim=True) + epsilon).rsqrt() * norm
            scores = x @ self.parameters[f"{name}.output.weight"].t()
            losses = F.cross_entropy(scores.flatten(0, -2), targets.flatten(), reduction="none")
            total = total + (losses.view(targets.shape) * weights).sum()
        self.seen.clear()
        return total
