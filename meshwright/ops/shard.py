"""FSDP2 over an axis, one unit per layer, with the boxes of the pieces written down."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard


def shard_units(build: Any, axis: str, replicas: list[str], *, reshard: bool) -> Callable[[int, bool], None]:
    """Shard every unit of `build` and return what to call before each backward: flags(stage, is_last)."""
    mesh = build.mesh
    assert len(replicas) <= 1, "hybrid sharding sums over one axis of replicas"
    grid = mesh.grid[(*replicas, axis)] if replicas else mesh.grid[axis]
    options: dict[str, Any] = {"mesh": grid}
    if build.compute_dtype != build.dtype:
        options["mp_policy"] = MixedPrecisionPolicy(
            param_dtype=build.compute_dtype, reduce_dtype=build.dtype, cast_forward_inputs=False
        )
    wrapped, goes_back = [], []
    has_backward = build.first_block > 0
    for unit in build.units():
        has_backward = has_backward or any(parameter.requires_grad for parameter in unit.parameters)
        build.materialise(unit.parameters)
        if unit.module is not None:
            # The ends stay gathered from forward to backward: the head's come one after the other, and the embedding's
            # backward needs no weight, but FSDP would gather it all the same.
            wrapped.append(fully_shard(unit.module, reshard_after_forward=reshard and unit.is_block, **options))
            goes_back.append(has_backward)
    # The root takes what no unit took: the layers that share a weight.
    wrapped.append(fully_shard(build.model, reshard_after_forward=False, **options))
    # Said outright, because FSDP's own guess fetches one layer too many when microbatches interleave.
    # What is frozen, with nothing trained before it, has no backward to fetch for; silence lets FSDP guess again.
    for before, needed, module in zip([wrapped[0], *wrapped], [False, *goes_back], wrapped, strict=False):
        module.set_modules_to_backward_prefetch([before if needed else module])
    for name in build.boxes:
        build.boxes[name] = build.boxes[name].chunk(0, mesh.index(axis), mesh.size(axis))
        build.cut_axes[name] |= {axis}
    # FSDP divides gradients by the ranks it sums over; the loss is already divided by all tokens.
    build.loss_scale *= grid.size()

    # A forward without a backward leaves layers gathered, and their parameters whole: nothing to save or to update.
    build.on_evaluated.append(lambda: [module.reshard() for module in wrapped])
    told: list[bool] = []

    def flags(stage: int, is_last: bool) -> None:
        if told == [is_last]:  # telling walks the whole model
            return
        told[:] = [is_last]
        build.model.set_requires_gradient_sync(stage > 1 or is_last)
        build.model.set_reshard_after_backward(stage == 3 or is_last)
        build.model.set_is_last_backward(is_last)
        if replicas:
            build.model.set_requires_all_reduce(is_last)

    return flags


def local(tensor: torch.Tensor) -> torch.Tensor:
    """The piece of a possibly sharded tensor that this rank holds."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor
