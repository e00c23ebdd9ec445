"""The training step: a small interpreter of a schedule's actions. Everything else hangs off it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.ops.control import gather_json
from meshwright.ops.model_interface import Inputs, map_inputs, split_inputs
from meshwright.ops.stage_transport import Wire
from meshwright.optimizers.update import Optimizer
from meshwright.runtime.build import Build
from meshwright.schedules import Action, Actions
from meshwright.schedules.events import BACKWARDS

WEIGHTS = ("backward", "backward_weight")
"""Actions after which a microbatch has all its gradients in a chunk."""


@dataclass(frozen=True, kw_only=True)
class Samples:
    """This rank's rows of a batch; `num_tokens` counts the whole batch's, over all ranks."""

    inputs: Inputs
    targets: Tensor
    weights: Tensor
    num_tokens: float
    """Or samples, where they have no sequence; 0 where no target counts."""

    @property
    def divisor(self) -> float:
        """Of the sum of losses. A batch without targets has nothing to learn: its loss and its gradient are zero."""
        return self.num_tokens or 1.0

    def split(self, size: int) -> list[tuple[Inputs, Tensor, Tensor]]:
        parts = (split_inputs(self.inputs, size), self.targets.split(size), self.weights.split(size))
        return list(zip(*parts, strict=True))

    def num_microbatches(self, size: int) -> int:
        return self.targets.shape[0] // size

    def rows(self, chosen: slice) -> Samples:
        """Some of them; the count of tokens stays that of the whole batch."""
        inputs = map_inputs(self.inputs, lambda tensor: tensor[chosen])
        return replace(self, inputs=inputs, targets=self.targets[chosen], weights=self.weights[chosen])


@dataclass(frozen=True, kw_only=True)
class StepResult:
    loss: float
    """Mean over the batch's tokens."""
    gradient_norm: float
    must_stop: bool
    """Some rank was told to stop."""
    must_save: bool = False
    """Rank 0 wants a checkpoint."""


Key = tuple[int, int]
"""(microbatch, chunk)."""


class Interpreter:
    """Does what a schedule says, action by action."""

    def __init__(self, build: Build, microbatches: list[Any], *, scale: float = 1.0, trains: bool = False):
        self.build, self.microbatches, self.scale, self.trains = build, microbatches, scale, trains
        self.places, self.wire = build.places, build.wire
        self.received: dict[Key, Tensor] = {}
        self.outputs: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor | None] = {}
        self.total = torch.zeros((), dtype=torch.float64, device=build.mesh.device)
        """Sum of losses; zero but where the last layers are."""
        self.scores: Tensor | None = None
        """What the last layers made of the last microbatch, where no targets were given."""

    def run(self, actions: Actions) -> None:
        self.expect(actions)
        # Where halves are apart, the last gradients come later than the last backward.
        kinds = WEIGHTS if self.build.timetable.splits_backward else BACKWARDS
        lasts = {a.chunk: at for at, a in enumerate(actions) if a.kind in kinds}
        for position, action in enumerate(actions):
            self.do(action, is_last=lasts.get(action.chunk) == position)
        if self.wire is not None:
            self.wire.finish()

    def expect(self, actions: Actions) -> None:
        """Be ready for the messages that come during these actions."""
        if self.wire is not None:
            shapes = self.build.boundaries(self.microbatches[0][0])
            self.wire.start(actions, shapes, self.build.model.boundary_dtype(self.build.dtype))

    def do(self, action: Action, *, is_last: bool) -> None:
        """`is_last`: of the chunk's backwards in this step."""
        build, key = self.build, (action.microbatch, action.chunk)
        for look in build.on_action:
            look()
        with record_function(f"mw:{action}"):
            if action.kind == "forward":
                self.forward(key)
            elif action.kind in BACKWARDS:
                self.backward(key, is_last and build.later is None, is_whole=action.kind == "backward")
            elif action.kind == "backward_weight":
                assert build.later is not None
                build.zero_filled.difference_update(map(id, build.later.pay(key)))
            elif self.wire is not None:
                self._transfer(self.wire, action, key)
            if build.later is not None and action.kind in WEIGHTS:
                for finish in build.on_weights:
                    finish(is_last, action.chunk)

    def shift(self, count: int) -> None:
        """Another step begins: what is left of the last one is numbered from its end, below 0."""
        self.received, self.outputs, self.gradients = (
            {(i - count, chunk): value for (i, chunk), value in held.items()}
            for held in (self.received, self.outputs, self.gradients)
        )

    def _transfer(self, wire: Wire, action: Action, key: Key) -> None:
        chunk = action.chunk
        if action.kind == "receive_forward":
            self.received[key] = wire.receive("forward", chunk).requires_grad_(self.trains)
        elif action.kind == "send_forward":
            wire.send("forward", chunk, self.outputs[key].detach() if self.trains else self.outputs.pop(key))
        elif action.kind == "receive_backward":
            self.gradients[key] = wire.receive("backward", chunk)
        else:
            gradient = self.received.pop(key).grad
            assert gradient is not None
            wire.send("backward", chunk, gradient)

    def forward(self, key: Key) -> None:
        build, (i, chunk) = self.build, key
        inputs, targets, weights = self.microbatches[i]
        given = self.received.get(key) if self.trains else self.received.pop(key, None)
        build.model.span = build.spans[chunk]
        span = self.places.span(build.stage, chunk)
        is_end = span == self.places.num_spans - 1
        output = build.model(inputs, *((targets, weights) if is_end else (None, None)), given)
        if is_end and targets is None:
            self.scores = output
        elif is_end:
            self.total += output.detach()
        elif self.places.stage(span + 1) == build.stage:  # the next chunk is here too
            self.received[i, self.places.chunk(span + 1)] = output.detach().requires_grad_(self.trains)
        if self.trains or not (is_end or self.places.stage(span + 1) == build.stage):
            self.outputs[key] = output

    def backward(self, key: Key, is_last: bool, *, is_whole: bool) -> None:
        build, (i, chunk) = self.build, key
        for prepare in build.on_backward:
            prepare(is_last, chunk)
        span = self.places.span(build.stage, chunk)
        output = self.outputs.pop(key)
        if span == self.places.num_spans - 1:
            target, gradient = output * self.scale, None
        else:
            target, gradient = output, self.gradients.pop(key)
        with nullcontext() if is_whole or build.later is None else build.later.collect(key):
            if target.requires_grad:  # else nothing up to here is trained
                target.backward(gradient)
        if span > 0 and self.places.stage(span - 1) == build.stage:
            self.gradients[i, self.places.chunk(span - 1)] = self.received.pop(key).grad


def interpret(build: Build, actions: Actions, samples: Samples, *, trains: bool) -> Tensor:
    """This rank's sum of losses."""
    build.model.loss_scale = scale = build.loss_scale / samples.divisor
    interpreter = Interpreter(build, samples.split(build.plan.microbatch), scale=scale, trains=trains)
    interpreter.run(actions)
    return interpreter.total


def settled(agreed: Sequence[float], divisor: float, consequence: str) -> StepResult:
    """What all ranks agreed on: the sum of losses, the squared norm, and the sum of their `requests`."""
    loss, norm = agreed[0] / divisor, agreed[1] ** 0.5
    if not (math.isfinite(loss) and math.isfinite(norm)):  # all ranks see the same numbers and stop together
        what = f"the loss is {loss} and the gradient norm {norm}: {consequence}."
        fix = "Resume from the last checkpoint with a lower rate, a longer warm-up or clipping."
        raise MeshwrightError([Problem(where="train", what=what, fix=fix)], exit_code=1)
    return StepResult(loss=loss, gradient_norm=norm, must_stop=agreed[2] >= 2, must_save=agreed[2] % 2 == 1)


def requests(stop: bool, save: bool) -> float:
    """As one number whose sum over all ranks says both: two for each that must stop, one if rank 0 wants to save."""
    return 2.0 * stop + save


class Loop:
    """Steps and evaluations of one rank."""

    def __init__(self, build: Build, optimizer: Optimizer):
        self.build, self.optimizer = build, optimizer
        self.names: dict[str, int] | None = None
        """Places of all trained parameters of all stages, once some parameter took no part in a step."""

    def step(self, samples: Samples, lr: float, *, stop: bool = False, save: bool = False) -> StepResult:
        build = self.build
        self.optimizer.zero_gradients()
        for start in build.on_step:
            start()
        if not build.model.training:
            build.model.train()
        count = samples.num_microbatches(build.plan.microbatch)
        loss = interpret(build, build.actions(count), samples, trains=True)
        with record_function("mw:exchange"):
            for finish in build.on_finish:
                finish()
            if build.owed:
                build.sum_owed()
            self.optimizer.take_gradients()
            # One small message for all that ranks must agree on.
            unused = self.optimizer.unused()
            agreed = self._agree(
                self._share(loss), self.optimizer.squared_norm(), requests(stop, save), float(bool(unused))
            )
            if agreed[3]:
                self.optimizer.skip(self._used_by_none(unused))
        result = settled(agreed, samples.divisor, "this step was not taken")
        with record_function("mw:update"):
            self.optimizer.update(lr, result.gradient_norm)
        return result

    def _used_by_none(self, unused: list[str]) -> set[str]:
        """Of the parameters that took no part in a step here, those that took no part anywhere."""
        control = self.build.mesh.control
        if control is None:
            return set(unused)
        mine = {piece.name for piece in self.optimizer.pieces}
        if self.names is None:
            every = {name for names in gather_json(control, sorted(mine)) for name in names}
            self.names = {name: place for place, name in enumerate(sorted(every))}
        used = torch.zeros(len(self.names))
        used[[self.names[name] for name in mine.difference(unused)]] = 1.0
        dist.all_reduce(used, group=control)
        return {name for name in unused if not used[self.names[name]]}

    def feed(self, samples: Samples, lr: float, *, stop: bool = False, save: bool = False) -> list[StepResult]:
        """Begin a step; the results known since the last call, in order. Here each step ends before the next begins."""
        return [self.step(samples, lr, stop=stop, save=save)]

    def flush(self) -> list[StepResult]:
        """Take every step to its end; the results that `feed` has not returned."""
        return []

    def require_rest(self) -> None:
        """Before anybody reads the weights: raise while steps are under way."""

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Samples]) -> tuple[float, float, float | None]:
        """(sum of losses, tokens, first choices that were right) over all ranks; None where nothing is classified."""
        build = self.build
        build.model.eval()
        total, tokens = torch.zeros((), dtype=torch.float64, device=build.mesh.device), 0.0
        for samples in batches:
            count = samples.num_microbatches(build.plan.microbatch)
            total += interpret(build, build.forward_actions(count), samples, trains=False)
            tokens += samples.num_tokens
        for finish in build.on_evaluated:
            finish()
        hits = build.model.take_hits()
        known = torch.full_like(total, float(hits is not None))
        right = torch.zeros_like(total) if hits is None else hits.to(total)
        agreed = self._agree(*map(self._share, (total, right, known)))
        return agreed[0], tokens, agreed[1] if agreed[2] else None

    def total(self, value: Tensor) -> float:
        """The sum over the batch of a number that each rank has computed from its whole samples."""
        return self._agree(self._counted(value, self.build.plan.sample_axes))[0]

    def _share(self, loss: Tensor) -> Tensor:
        """What this rank adds to the sum of losses: a part along `loss_axes`, and nothing but on the last stage."""
        wire = self.build.wire
        return self._counted(loss, (*self.build.plan.loss_axes, *(() if wire is None else (wire.axis,))))

    def _counted(self, value: Tensor, axes: tuple[str, ...]) -> Tensor:
        """The value on the first rank of every axis but `axes`, zero elsewhere: ranks that hold the same count once."""
        mesh = self.build.mesh
        is_first = all(mesh.index(axis) == 0 for axis in mesh.sizes if axis not in axes)
        return value if is_first else torch.zeros_like(value)

    def _agree(self, *values: Tensor | float) -> list[float]:
        message = torch.tensor([float(value) for value in values], dtype=torch.float64)
        if self.build.mesh.control is not None:
            dist.all_reduce(message, group=self.build.mesh.control)
        return message.tolist()
