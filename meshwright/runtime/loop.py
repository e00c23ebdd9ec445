"""The training step: a small interpreter of a schedule's actions. Everything else hangs off it."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.ops.model import Inputs, split_inputs
from meshwright.runtime.build import Build
from meshwright.runtime.optimizer import Optimizer
from meshwright.schedules import Actions


@dataclass(frozen=True, kw_only=True)
class Samples:
    """This rank's rows of a batch; `num_tokens` counts the whole batch's, over all ranks."""

    inputs: Inputs
    targets: Tensor
    weights: Tensor
    num_tokens: float
    """Or samples, where they have no sequence."""

    def split(self, size: int) -> list[tuple[Inputs, Tensor, Tensor]]:
        parts = (split_inputs(self.inputs, size), self.targets.split(size), self.weights.split(size))
        return list(zip(*parts, strict=True))

    def num_microbatches(self, size: int) -> int:
        return self.targets.shape[0] // size


@dataclass(frozen=True, kw_only=True)
class StepResult:
    loss: float
    """Mean over the batch's tokens."""
    gradient_norm: float
    must_stop: bool
    """Some rank was told to stop."""


def interpret(build: Build, actions: Actions, samples: Samples) -> Tensor:
    """Do what the schedule says. Returns this rank's sum of losses (zero but on the last stage)."""
    microbatches = samples.split(build.plan.microbatch)
    scale = build.loss_scale / samples.num_tokens
    last_backward = max((i for i, a in enumerate(actions) if a.kind == "backward"), default=-1)
    trains = last_backward >= 0
    total = torch.zeros((), dtype=torch.float64, device=build.mesh.device)
    received: dict[int, Tensor] = {}
    outputs: dict[int, Tensor] = {}
    gradients: dict[int, Tensor | None] = {}
    wire: Any = build.wire
    build.model.loss_scale = scale
    if wire is not None:
        shapes = build.boundaries(microbatches[0][0])
        wire.start((action.kind for action in actions), shapes, build.model.boundary_dtype(build.dtype))
    for position, action in enumerate(actions):
        i = action.microbatch
        for look in build.on_action:
            look()
        with record_function(f"mw:{action.kind} {i}"):
            if action.kind == "receive_forward":
                received[i] = wire.receive("forward").requires_grad_(trains)
            elif action.kind == "forward":
                inputs, targets, weights = microbatches[i]
                given = received.get(i) if trains else received.pop(i, None)
                asked = (targets, weights) if build.has_loss else (None, None)
                outputs[i] = build.model(inputs, *asked, given)
                if build.has_loss:
                    total += outputs[i].detach()
            elif action.kind == "send_forward":
                wire.send("forward", outputs[i].detach() if trains else outputs.pop(i))
            elif action.kind == "receive_backward":
                gradients[i] = wire.receive("backward")
            elif action.kind == "backward":
                for prepare in build.on_backward:
                    prepare(position == last_backward)
                output = outputs.pop(i)
                if build.has_loss:
                    (output * scale).backward()
                elif output.requires_grad:
                    output.backward(gradients.pop(i))
                else:  # nothing up to here is trained
                    gradients.pop(i)
            elif action.kind == "send_backward":
                wire.send("backward", received.pop(i).grad)
    if wire is not None:
        wire.finish()
    return total


class Loop:
    """Steps and evaluations of one rank."""

    def __init__(self, build: Build, optimizer: Optimizer):
        self.build, self.optimizer = build, optimizer

    def step(self, samples: Samples, lr: float, *, stop: bool = False) -> StepResult:
        build = self.build
        self.optimizer.zero_gradients()
        for start in build.on_step:
            start()
        if not build.model.training:
            build.model.train()
        count = samples.num_microbatches(build.plan.microbatch)
        loss = interpret(build, build.schedule(count), samples)
        with record_function("mw:exchange"):
            for finish in build.on_finish:
                finish()
            if build.owed:
                build.sum_owed()
            self.optimizer.take_gradients()
            # One small message for all that ranks must agree on.
            agreed = self._agree(self._share(loss), self.optimizer.squared_norm(), float(stop))
        loss_mean, norm = agreed[0] / samples.num_tokens, agreed[1] ** 0.5
        if not (math.isfinite(loss_mean) and math.isfinite(norm)):  # all ranks see the same numbers and stop together
            what = f"the loss is {loss_mean} and the gradient norm {norm}: this step was not taken."
            fix = "Resume from the last checkpoint with a lower rate, a longer warm-up or clipping."
            raise MeshwrightError([Problem(where="train", what=what, fix=fix)], exit_code=1)
        with record_function("mw:update"):
            self.optimizer.update(lr, norm)
        return StepResult(loss=loss_mean, gradient_norm=norm, must_stop=agreed[2] > 0)

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Samples]) -> tuple[float, float, float | None]:
        """(sum of losses, tokens, first choices that were right) over all ranks; None where nothing is classified."""
        build = self.build
        build.model.eval()
        total, tokens = torch.zeros((), dtype=torch.float64, device=build.mesh.device), 0.0
        for samples in batches:
            count = samples.num_microbatches(build.plan.microbatch)
            total += interpret(build, build.forward_schedule(count), samples)
            tokens += samples.num_tokens
        for finish in build.on_evaluated:
            finish()
        hits = build.model.take_hits()
        known = torch.full_like(total, float(hits is not None))
        right = torch.zeros_like(total) if hits is None else hits.to(total)
        agreed = self._agree(*map(self._share, (total, right, known)))
        return agreed[0], tokens, agreed[1] if agreed[2] else None

    def total(self, value: Tensor) -> float:
        """The sum over all samples of what each rank has of its own."""
        return self._agree(self._share(value, every_stage=False))[0]

    def _share(self, value: Tensor, every_stage: bool = True) -> Tensor:
        """Ranks with the same samples count once; along the stages, only the last one has a loss at all."""
        mesh, wire = self.build.mesh, self.build.wire
        other = {*self.build.plan.loss_axes, wire.axis if wire is not None and every_stage else ""}
        mine = all(mesh.index(axis) == 0 for axis in mesh.sizes if axis not in other)
        return value if mine else torch.zeros_like(value)

    def _agree(self, *values: Tensor | float) -> list[float]:
        message = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.build.mesh.control is not None:
            dist.all_reduce(message, group=self.build.mesh.control)
        return message.tolist()
