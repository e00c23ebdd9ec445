"""A recorded step again, inside a rank, with every layer's numbers looked at."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.data.dataset import part_rows
from meshwright.ops.device_mesh import Mesh, join
from meshwright.ops.fsdp import local
from meshwright.run.model import ModelDescription, open_model
from meshwright.run.prepare import open_data
from meshwright.run.run_file import RunConfig
from meshwright.runtime.rank import device_of
from meshwright.runtime.sanity import TrainingTrouble
from meshwright.runtime.trainer import Trainer


class StepLook:
    """What layers make of a step: attached to a trainer before it."""

    def __init__(self, trainer: Trainer, samples: Sequence[int]):
        self.trainer, self.samples = trainer, samples
        self.outputs: dict[str, float] = {}
        self.first_bad = ""
        self.bad_samples: list[int] = []
        self.squares: dict[str, list[float]] = {}
        """Layer -> this rank's shares of the squared norms of weights and gradients."""
        build = trainer.build
        self.parts = [part.name for part in build.model.parts()]
        layers = {id(part.module): part.name for part in build.model.parts()}
        for name, module in build.model.named_modules():
            if name:  # inner ones first, so that the first is the innermost
                module.register_forward_hook(self._watched(layers.get(id(module), name)))
        self.update, trainer.loop.update = trainer.loop.update, self._before_update  # type: ignore[method-assign]

    def _watched(self, name: str) -> Any:
        def look(module: nn.Module, given: Any, output: Any) -> None:
            tensors = [each for each in tree_leaves(output) if isinstance(each, Tensor) and each.is_floating_point()]
            for tensor in tensors:
                if name in self.parts and tensor.numel():
                    most = float(tensor.detach().abs().max())
                    self.outputs[name] = most if math.isnan(most) else max(self.outputs.get(name, 0.0), most)
                self._note(tensor.detach(), f"output of {name}")
                if tensor.requires_grad:
                    tensor.register_hook(lambda gradient: self._note(gradient, f"gradient of the output of {name}"))

        return look

    def _note(self, tensor: Tensor, what: str) -> None:
        if self.first_bad or bool(tensor.isfinite().all()):
            return
        loop, mesh = self.trainer.loop, self.trainer.mesh
        assert loop.action is not None
        bad = ~tensor.isfinite()
        self.first_bad = f"rank {mesh.rank}, {loop.action}: {what}, {int(bad.sum())} of {tensor.numel()} numbers"
        batch = loop.batch.microbatches[loop.action.microbatch] if loop.batch is not None else None
        if batch is not None and tensor.ndim and len(tensor) == len(batch[1]):
            plan = self.trainer.plan
            rows = range(*part_rows(plan.batch, self.trainer.part, self.trainer.num_parts, plan.shares).indices(10**9))
            start = rows.start + loop.action.microbatch * plan.microbatch
            found = bad.flatten(1).any(1) if bad.ndim > 1 else bad
            self.bad_samples = [self.samples[start + int(row)] for row in found.nonzero().flatten()]

    def _before_update(self, batch: Any) -> None:
        """Gradients are whole, and not clipped."""
        scale = self.trainer.loop._scaled()
        for piece in self.trainer.optimizer.pieces:
            if piece.is_owned:
                name = next((part for part in self.parts if piece.name.startswith(f"{part}.")), "elsewhere")
                shares, gradient = self.squares.setdefault(name, [0.0, 0.0]), piece.value.grad
                shares[0] += float(piece.value.detach().double().square().sum())
                if gradient is not None:
                    values = gradient.values() if gradient.is_sparse else local(gradient)
                    shares[1] += float((values.double() / scale).square().sum())
                    self._note(values, f"gradient of {piece.name}")
        self.update(batch)

    def layers(self) -> list[list[Any]]:
        names = [name for name in (*self.parts, "elsewhere") if name in self.squares or name in self.outputs]
        told = [[name, self.outputs.get(name), *self.squares.get(name, (0.0, 0.0))] for name in names]
        return [
            [each if not isinstance(each, float) or math.isfinite(each) else str(each) for each in row] for row in told
        ]


def replay_step(
    *,
    rank: int,
    num_ranks: int,
    rendezvous: str,
    kind: str,
    run: Any,
    model: Any,
    plan: Any,
    checkpoint: str,
    from_step: int,
    cursor: int | None,
    step: int,
) -> dict[str, Any]:
    """Train from the checkpoint to the step (the first is 1) and look at it. `cursor`: where the data goes on from the
    checkpoint; None: where it says."""
    config, chosen = decode(RunConfig, run, ""), decode(Plan, plan, "plan")
    description = decode(ModelDescription, model, "description")
    device = device_of(kind, rank)
    if chosen.mesh:
        join(rank, num_ranks, device, rendezvous=rendezvous)
    opened, data = open_model(description, config.train.seed), open_data(config, description)
    mesh = Mesh.make(chosen.mesh, device)
    trainer = Trainer(chosen, opened, data, config.train, mesh, checkpoint=Path(checkpoint) if checkpoint else None)
    trainer.cursor = trainer.cursor if cursor is None else cursor
    trainer.rests = (step - 1, step)
    at = trainer.cursor + (step - 1 - from_step) * chosen.batch
    samples = [int(each) for each in data.order(at, chosen.batch)]
    look = StepLook(trainer, samples) if trainer.step == step - 1 else None
    loss = norm = math.nan
    try:
        for done in trainer.steps():
            loss, norm = done.loss, done.gradient_norm
            if trainer.step == step:
                break
            if trainer.step == step - 1:
                look = StepLook(trainer, samples)
    except TrainingTrouble as error:
        if error.trouble.step != step:
            raise
        loss, norm = error.trouble.loss, error.trouble.gradient_norm
    assert look is not None
    told = {"loss": str(loss), "gradient_norm": str(norm), "cursor": at, "samples": samples, "layers": look.layers()}
    answer = {**told, "first_bad": look.first_bad, "bad_samples": look.bad_samples}
    del trainer, look
    if chosen.mesh:
        dist.destroy_process_group()
    return answer
