"""The training step: one interpreter of a schedule's actions. Everything else hangs off it.

A call of the loop is a list of actions. Where steps do not overlap it is one whole step; where they do, the list holds
what the call does of this batch's step and of the one before, whose microbatches have numbers below 0.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.ops.collectives import gather_json
from meshwright.ops.memory_cap import MemoryCap
from meshwright.ops.model_interface import Inputs, map_inputs, split_inputs
from meshwright.ops.weight_versions import Versions
from meshwright.optimizers.update import Optimizer
from meshwright.runtime.build import RankBuild
from meshwright.schedules import Action, Actions, Call
from meshwright.schedules.actions import WEIGHTS, last_of_chunks
from meshwright.schedules.events import BACKWARDS


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
        """Divides the sum of losses. A batch without targets has nothing to learn: its loss and gradient are zero."""
        return self.num_tokens or 1.0

    def split(self, size: int) -> list[tuple[Inputs, Tensor, Tensor]]:
        parts = (split_inputs(self.inputs, size), self.targets.split(size), self.weights.split(size))
        return list(zip(*parts, strict=True))

    def rows(self, chosen: slice) -> Samples:
        """Some of them; the count of tokens stays that of the whole batch."""
        inputs = map_inputs(self.inputs, lambda tensor: tensor[chosen])
        return replace(self, inputs=inputs, targets=self.targets[chosen], weights=self.weights[chosen])


def on_device(tensor: Tensor, device: torch.device) -> Tensor:
    """Copied without waiting for the step before, as a copy from memory that is not pinned would."""
    if device.type == "cuda" and not tensor.is_cuda:
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


@dataclass(frozen=True, kw_only=True)
class StepResult:
    loss: float
    """Mean over the batch's tokens."""
    gradient_norm: float
    must_stop: bool
    """Some rank was told to stop."""
    must_save: bool = False
    """Rank 0 wants a checkpoint."""
    is_busy: bool = False
    """Some rank still writes its part of a checkpoint."""
    is_skipped: bool = False
    """Gradients overflowed in float16: nothing was updated, and the loss's scale is lower from here on."""
    refusal: str = ""
    """Of a step that is not finite, or beyond the `StepLimits`: what became of it."""
    loss_scale: float = 1.0
    """What the loss of this step was multiplied by."""
    ended_seconds: float = field(default=0.0, compare=False)
    """When the host could know that the step was over, on the clock of `time.perf_counter`."""
    idle_seconds: float | None = field(default=None, compare=False)
    """How long the GPU had nothing to do before this step; None where it is not measured."""
    evicted: Mapping[str, float] = field(default_factory=dict, compare=False)
    """What a memory cap has evicted, by `MemoryCap.take_tally`; empty where there is none."""


@dataclass(frozen=True, kw_only=True)
class StepLimits:
    """The largest loss and gradient norm of a step that may update anything."""

    loss: float = math.inf
    gradient_norm: float = math.inf

    def are_kept(self, loss: float, gradient_norm: float) -> bool:
        """False for what is not finite."""
        is_finite = math.isfinite(loss) and math.isfinite(gradient_norm)
        return is_finite and loss <= self.loss and gradient_norm <= self.gradient_norm


NO_LIMITS = StepLimits()


@dataclass(kw_only=True, eq=False)
class BatchUnderWay:
    """A batch that is trained on or evaluated."""

    microbatches: list[Any]
    """(inputs, targets, weights) of each; where steps overlap, None once its forward is over."""
    trains: bool = False
    scale: float = 1.0
    """What its losses are multiplied by."""
    divisor: float = 1.0
    """What the sum of its losses is divided by, where it is reported."""
    lr: float = 0.0
    limits: StepLimits = NO_LIMITS
    version: int = 0
    """The weights it uses, by the number of updates before."""
    total: Tensor = field(default_factory=lambda: torch.zeros((), dtype=torch.float64))
    """Sum of losses; zero but where the last layers are."""
    scores: Tensor | None = None
    """What the last layers made of the last microbatch, where no targets were given."""
    message: Tensor | None = None
    """After its exchange, what ranks agree on: sum of losses, squared norm, `requests`, whether parameters were unused,
    and of several islands the squared norm of each. Each rank's share; the sum over all ranks once it is `sent`. Where
    the host does not wait for them: the first two and whether the update is refused, on the device, then on their way
    to the host."""
    sent: dist.Work | None = None
    began: torch.cuda.Event | None = None
    after: torch.cuda.Event | None = None
    """When the step before was over, if it had not been read yet."""
    arrived: torch.cuda.Event | None = None
    """When the message is in the host's memory, if it comes from a GPU."""
    requests: float = 0.0
    num_steps: int = 0
    """Updates before this one."""
    norm: float = 0.0
    """Of this island's gradients."""
    result: StepResult | None = None
    ended_seconds: float = 0.0
    evicted: Mapping[str, float] = field(default_factory=dict)


Key = tuple[int, int]
"""(microbatch, chunk)."""


class Interpreter:
    """Does what a schedule says, action by action."""

    def __init__(self, build: RankBuild):
        self.build, self.places, self.wire = build, build.places, build.wire
        self.batch: BatchUnderWay | None = None
        """Of this call."""
        self.before: BatchUnderWay | None = None
        """Of the call before, if its step is still under way."""
        self.versions: Versions | None = None
        """Of the weights, where steps overlap."""
        self.has_trained_before = [
            build.profile.trains_before(first) and first not in build.model.cut_before for first, _ in build.spans
        ]
        self.received: dict[Key, Tensor] = {}
        self.outputs: dict[Key, Tensor] = {}
        self.gradients: dict[Key, Tensor | None] = {}
        self.shapes: dict[tuple[str, int], tuple[int, ...]] = {}
        """Of what comes from the stages before and after, by `RankBuild.boundaries`."""
        self.cap: MemoryCap | None = None
        self.action: Action | None = None
        """That is being done, or was done last."""

    def run(self, actions: Actions, *, ends_all: bool = True) -> None:
        """`ends_all`: nothing is under way afterwards."""
        build, wire = self.build, self.wire
        if wire is not None:
            if self.batch is not None:  # else what is left of the one before, in the same shapes
                self.shapes = build.boundaries(self.batch.microbatches[0][0])
            wire.start(actions, self.shapes, build.model.boundary_dtype(build.dtype))
        lasts = last_of_chunks(actions)
        for position, action in enumerate(actions):
            self.action = action
            for look in build.on_action:
                look(action.kind)
            batch = self.batch if action.microbatch >= 0 else self.before
            assert batch is not None
            key, is_last = (action.microbatch, action.chunk), position in lasts
            if action.kind == "begin":  # too short to be seen in a timeline
                self.begin(batch)
                continue
            with record_function(f"mw:{action}"), self.cap or nullcontext():
                if action.kind == "forward":
                    self.forward(batch, key)
                elif action.kind in BACKWARDS:
                    self.backward(batch, key, is_last=is_last, is_whole=action.kind == "backward")
                elif action.kind == "backward_weight":
                    assert build.later is not None
                    build.zero_filled.difference_update(map(id, build.later.pay(key)))
                elif action.kind == "exchange":
                    if wire is not None and ends_all:
                        wire.finish()  # what was sent need not stay in memory beside the optimizer's work
                    self.exchange(batch)
                elif action.kind == "update":
                    self.update(batch)
                else:
                    self._transfer(batch, action, key)
                if action.kind in WEIGHTS:
                    for exchange in build.exchanges:
                        exchange.gradients_ready(action.chunk, is_last=is_last)
        if wire is not None and ends_all:
            wire.finish()

    def begin(self, batch: BatchUnderWay) -> None:
        raise NotImplementedError

    def exchange(self, batch: BatchUnderWay) -> None:
        raise NotImplementedError

    def update(self, batch: BatchUnderWay) -> None:
        raise NotImplementedError

    def before_backward(self, batch: BatchUnderWay) -> None:
        """A microbatch of the batch goes back."""

    def _transfer(self, batch: BatchUnderWay, action: Action, key: Key) -> None:
        wire, chunk = self.wire, action.chunk
        assert wire is not None
        if action.kind == "receive_forward":
            self.received[key] = wire.receive("forward", chunk).requires_grad_(batch.trains and self._goes_back(chunk))
        elif action.kind == "send_forward":
            wire.send("forward", chunk, self.outputs[key].detach() if batch.trains else self.outputs.pop(key))
        elif action.kind == "receive_backward":
            self.gradients[key] = wire.receive("backward", chunk)
        else:
            given = self.received.pop(key)
            assert given.grad is not None or not self._goes_back(chunk)
            wire.send("backward", chunk, torch.zeros_like(given) if given.grad is None else given.grad)

    def _goes_back(self, chunk: int) -> bool:
        """Whether the gradient of what comes into a chunk is asked for."""
        return self.has_trained_before[chunk] and self.build.spans[chunk][0] > self.build.trained_from

    def _prepare(self, batch: BatchUnderWay) -> None:
        """Before a forward or backward of the batch."""
        self.build.model.loss_scale = batch.scale
        if self.versions is not None and batch.trains:
            self.versions.use(batch.version)

    def forward(self, batch: BatchUnderWay, key: Key) -> None:
        self._prepare(batch)
        build, (i, chunk) = self.build, key
        inputs, targets, weights = batch.microbatches[i]
        if self.versions is not None and batch.trains:  # its step ends beside the next batch, which needs the room
            batch.microbatches[i] = None
        given = self.received.get(key) if batch.trains else self.received.pop(key, None)
        build.model.span = build.spans[chunk]
        span = self.places.span(build.stage, chunk)
        is_end = span == self.places.num_spans - 1
        is_asked = is_end or (batch.trains and build.model.has_local_heads)
        with self.cap.outside(build.model) if self.cap is not None and batch.trains else nullcontext():
            output = build.model(inputs, *((targets, weights) if is_asked else (None, None)), given)
        if is_end and targets is None:
            batch.scores = output
        elif is_end:
            batch.total += output.detach()
        elif self.places.stage(span + 1) == build.stage:  # the next chunk is here too
            there = self.places.chunk(span + 1)
            self.received[i, there] = output.detach().requires_grad_(batch.trains and self._goes_back(there))
        if batch.trains or not (is_end or self.places.stage(span + 1) == build.stage):
            self.outputs[key] = output

    def backward(self, batch: BatchUnderWay, key: Key, *, is_last: bool, is_whole: bool) -> None:
        self._prepare(batch)
        build, (i, chunk) = self.build, key
        for exchange in build.exchanges:
            exchange.before_backward(chunk, is_last=is_last and build.later is None)
        span = self.places.span(build.stage, chunk)
        output = self.outputs.pop(key)
        if span == self.places.num_spans - 1:
            target, gradient = output * batch.scale, None
        else:
            is_awaited = span + 1 not in build.timetable.cut_spans
            target, gradient = output, self.gradients.pop(key) if is_awaited else None
            if gradient is None:  # nothing comes back: only losses inside of the layers have a gradient
                gradient = output.new_zeros(()).expand_as(output)
        with nullcontext() if is_whole or build.later is None else build.later.collect(key):
            if target.requires_grad:  # else nothing up to here is trained
                self.before_backward(batch)
                target.backward(gradient)
        if span > 0 and self.places.stage(span - 1) == build.stage:
            self.gradients[i, self.places.chunk(span - 1)] = self.received.pop(key).grad
        elif span in build.timetable.cut_spans:  # nothing is sent back
            del self.received[key]

    @torch.no_grad()
    def scores(self, inputs: Inputs) -> Tensor | None:
        """A microbatch through all stages: scores where the last layers are, None elsewhere."""
        self.batch = batch = BatchUnderWay(microbatches=[(inputs, None, None)])
        self.run(self.build.forward_actions(1))
        return batch.scores


class Loop(Interpreter):
    """Steps and evaluations of one rank.

    Where the plan's steps overlap, a step is under way until the next call or a flush has ended it, and loss and norm
    are agreed on while the next batch runs.

    In one process the host does not wait for the device inside a step: norm, clipping and whether all is finite stay
    there, and `feed` reads them while the next step runs. After a step that was refused no update changes anything
    until the host has read it; the step that was launched meanwhile is dropped.
    """

    def __init__(self, build: RankBuild, optimizer: Optimizer):
        super().__init__(build)
        self.optimizer = optimizer
        problems = optimizer.config.problems_with(build.plan)
        if problems:
            raise MeshwrightError(problems)
        if build.timetable.overlaps_steps:
            self.versions = Versions(optimizer.parameters, [piece.value for piece in optimizer.pieces])
        is_alone = build.mesh.control is None and self.versions is None and build.loss_scaling is None
        self.reads_late = is_alone and optimizer.rule.decides_on_device
        self.unread: BatchUnderWay | None = None
        """A step that was launched, whose loss and norm the host has not read."""
        self.refused = torch.zeros((), device=build.mesh.device)
        """1 from the first step on that was not finite or beyond its limits."""
        self.buffers = [buffer for _, buffer in build.lasting_buffers()]
        self.old_buffers: list[Tensor] = []
        """As they were before the step: forward passes change them."""
        self.names: dict[str, int] | None = None
        """Places of all trained parameters of all stages, once some parameter took no part in a step."""
        islands = build.mesh.part(build.plan.island_axes)[1]
        self.num_islands = islands if islands > 1 else 0
        self.num_fed = 0
        self.num_flushed = 0
        """Steps fed up to the last flush."""
        self.requests = 0.0
        """Of this call, as one number whose sum over all ranks says all: two for each rank that must stop, one if rank
        0 wants to save, and a millionth for each rank that still writes a checkpoint."""
        self.is_busy: Callable[[], bool] = bool
        """Whether this rank does."""

    def cap_memory(self, cap_bytes: int) -> None:
        """From now on no step uses more memory of the device; to be called once."""
        build = self.build
        self.cap = MemoryCap(build.mesh.device, cap_bytes)
        self.cap.count(value for _, value in (*build.local_parameters(), *build.model.named_buffers()))
        self.cap.count(kept[2] for kept in self.optimizer.state())
        for part in build.model.parts():
            if part.is_block and part.module is not None:
                self.cap.watch(part.name, part.module)

    def step(self, samples: Samples, lr: float, *, stop: bool = False, save: bool = False) -> StepResult:
        """A step, with a flush after it: what one device does."""
        self.require_rest()
        count = self._open(samples, lr, stop=stop, save=save)
        self.run(self._actions(count, "first"), ends_all=self.versions is None)
        return [*_taken(self._close()), *self.flush()][-1]

    def feed(
        self, samples: Samples, lr: float, *, stop: bool = False, save: bool = False, limits: StepLimits | None = None
    ) -> list[StepResult]:
        """Begin a step; the results known since the last call, in order. Without `limits` one that was refused raises;
        with them it is the last of the results, and steps begun after it are dropped."""
        count = self._open(samples, lr, stop=stop, save=save, limits=limits or NO_LIMITS)
        call: Call = "first" if self.before is None else "next"
        self.run(self._actions(count, call), ends_all=self.versions is None)
        return _taken(self._close()) if limits is None else self._close()

    def _actions(self, count: int, call: Call) -> Actions:
        actions = self.build.actions(count, call)
        if any(exchange.leaves_out() for exchange in self.build.exchanges):
            return tuple(action for action in actions if action.kind in ("begin", "exchange", "update"))
        return actions

    def flush(self, *, raises: bool = True) -> list[StepResult]:
        """Take every step to its end; the results that `feed` has not returned."""
        self.optimizer.rule.finish()
        if self.before is None:
            results = self._read()
        else:
            self._send(self.before)
            self.run(self.build.actions(len(self.before.microbatches), "flush"))
            results = self._close()
        return _taken(results) if raises else results

    def require_rest(self) -> None:
        """Before anybody reads the weights: raise while steps are under way."""
        self.optimizer.rule.finish()
        if self.before is not None or self.unread is not None:
            why = "its weights are of two versions" if self.unread is None else "whether it was finite is not known"
            what = f"a step is still under way: {why}."
            raise MeshwrightError([Problem(where="train", what=what, fix="Call flush first.")])

    def _read(self) -> list[StepResult]:
        """The result of the step that was launched last, if it has not been read."""
        batch, self.unread = self.unread, None
        return [] if batch is None else [self._result(batch)]

    def _open(self, samples: Samples, lr: float, *, stop: bool, save: bool, limits: StepLimits = NO_LIMITS) -> int:
        """The call's batch, and how many microbatches it has."""
        if not self.build.model.training:
            self.build.model.train()
        if self.versions is None:  # whatever a step that failed has left
            self.received, self.outputs, self.gradients = {}, {}, {}
        self.requests = 2.0 * stop + save + 2.0**-20 * self.is_busy()
        self.batch = self._batch(samples, trains=True, lr=lr)
        self.batch.limits = limits
        if self.reads_late and self.unread is None:  # a step that failed may have left the flag
            self.refused = torch.zeros_like(self.refused)
        if self.reads_late and self.refused.is_cuda:
            self.batch.began = torch.cuda.Event(enable_timing=True)
            self.batch.began.record()
            self.batch.after = None if self.unread is None else self.unread.arrived
        self.num_fed += 1
        if self.before is not None:
            self._send(self.before)
        count = len(self.batch.microbatches)
        assert self.versions is None or count == self.build.plan.num_microbatches
        return count

    def _batch(self, samples: Samples, *, trains: bool, lr: float = 0.0) -> BatchUnderWay:
        return BatchUnderWay(
            microbatches=samples.split(self.build.plan.microbatch),
            trains=trains,
            scale=self.build.loss_scale * self._scaled(trains) / samples.divisor,
            divisor=samples.divisor,
            lr=lr,
            requests=self.requests,
            num_steps=self.optimizer.num_steps,
            version=max(self.num_fed - 1, self.num_flushed),
            total=torch.zeros((), dtype=torch.float64, device=self.build.mesh.device),
        )

    def _scaled(self, trains: bool = True) -> float:
        scaling = self.build.loss_scaling
        return scaling.scale if scaling is not None and trains else 1.0

    def _close(self) -> list[StepResult]:
        """The results of the steps that a call has ended."""
        ended, self.batch = self.batch, None
        if self.versions is not None:
            ended, self.before = self.before, ended
            if self.before is not None:  # what is left of its step is numbered from its end, below 0
                count = len(self.before.microbatches)
                self.received, self.outputs, self.gradients = (
                    {(i - count, chunk): value for (i, chunk), value in kept.items()}
                    for kept in (self.received, self.outputs, self.gradients)
                )
            else:
                self.num_flushed = self.num_fed
                self.versions.use(self.versions.newest)
            if ended is None:
                return []
            self._send(ended)
        assert ended is not None
        ended.evicted = {} if self.cap is None else self.cap.take_tally()
        if not self.reads_late:
            return [self._result(ended)]
        ended.microbatches = []  # not in memory beside those of the next step
        results = self._read()
        self.unread = None if results and results[0].refusal else ended
        return results

    def begin(self, batch: BatchUnderWay) -> None:
        self.optimizer.zero_gradients()
        self.optimizer.rule.begin(batch.lr, self.optimizer.num_steps + 1)
        self.old_buffers = [buffer.clone() for buffer in self.buffers]
        for exchange in self.build.exchanges:
            exchange.begin_step()

    def before_backward(self, batch: BatchUnderWay) -> None:
        self.optimizer.rule.before_backward(batch.total)

    def exchange(self, batch: BatchUnderWay) -> None:
        """Make gradients whole, and prepare the one small message for all that ranks must agree on."""
        for exchange in self.build.exchanges:
            exchange.finish()
        self.optimizer.take_gradients()
        unused = self.optimizer.unused()
        if self.reads_late:
            batch.message = torch.stack([batch.total, self.optimizer.squared_norm()])
            if unused:
                self.optimizer.skip(unused)
            return
        square = float(self.optimizer.squared_norm())
        of_islands = [square * (island == self.build.island) for island in range(self.num_islands)]
        shares = (self._share(batch.total), square, self.requests, bool(unused), *of_islands)
        batch.message = torch.tensor([float(share) for share in shares], dtype=torch.float64)
        if self.versions is None:
            self._send(batch)
            if self._agreed(batch)[3]:
                self.optimizer.skip(self._used_by_none(unused))
        elif unused and self.build.plan.num_replicas > 1:
            # Nobody waits until ranks have agreed on what took part in the step.
            what = f"{unused[0]} took no part in a step, and replicas update before they could agree to leave it out."
            fix = "Freeze it, or use a schedule whose steps do not overlap."
            raise MeshwrightError([Problem(where="schedule", what=what, fix=fix)])

    def update(self, batch: BatchUnderWay) -> None:
        if self.reads_late:
            assert batch.message is not None
            limits, norm = batch.limits, batch.message[1].sqrt()
            is_wrong = batch.message.sum().isfinite().logical_not()
            is_wrong |= (batch.message[0] > limits.loss * batch.divisor) | (norm > limits.gradient_norm)
            self.refused = torch.maximum(self.refused, is_wrong.float())
            batch.message = torch.cat([batch.message, self.refused.double().view(1)])
            self.optimizer.update(batch.lr, norm, self.refused)
            for buffer, old in zip(self.buffers, self.old_buffers, strict=True):
                buffer.copy_(torch.where(self.refused > 0, old, buffer))
            if batch.message.is_cuda:
                there = torch.empty(batch.message.shape, dtype=batch.message.dtype, pin_memory=True)
                batch.message = there.copy_(batch.message, non_blocking=True)
                batch.arrived = torch.cuda.Event(enable_timing=True)
                batch.arrived.record()
            else:
                batch.ended_seconds = time.perf_counter()
        elif self.versions is None:
            result, scaling = self._result(batch), self.build.loss_scaling
            if result.is_skipped or result.refusal:
                for buffer, old in zip(self.buffers, self.old_buffers, strict=True):
                    buffer.copy_(old)
            else:
                self.optimizer.update(batch.lr, batch.norm)
            if scaling is not None:
                scaling.update(is_finite=not result.is_skipped)
        else:
            with self.versions.updating():
                self.optimizer.update(batch.lr, 0.0)
        for exchange in self.build.exchanges if self.optimizer.num_steps > batch.num_steps else ():
            exchange.after_update(self.optimizer.num_steps)

    def _send(self, batch: BatchUnderWay) -> None:
        """Tell the others, once. Where steps overlap in the same call on every stage, so that all messages of the loop
        come in one order: the last stage, whose update ended the call before, has waited until now."""
        control = self.build.mesh.control
        if batch.message is not None and batch.sent is None and control is not None:
            batch.message[2] = self.requests
            most = batch.limits.loss, batch.limits.gradient_norm
            for exchange in self.build.exchanges:
                if (agreed := exchange.agree(batch.message, batch.lr, batch.divisor, most)) is not None:
                    batch.message = agreed
                    return
            batch.sent = dist.all_reduce(batch.message, group=control, async_op=True)

    def _agreed(self, batch: BatchUnderWay) -> list[float]:
        """Where steps overlap nobody waits long: every stage has sent its part before the call's last microbatch."""
        assert batch.message is not None
        if batch.sent is not None:
            batch.sent.wait()
        return batch.message.tolist()

    def _result(self, batch: BatchUnderWay) -> StepResult:
        if batch.result is None:
            idle = None
            if batch.arrived is not None:
                batch.arrived.synchronize()
                if batch.after is not None and batch.began is not None:
                    idle = batch.after.elapsed_time(batch.began) / 1e3
            total, square, *asked = self._agreed(batch)
            scale, requests = self._scaled(), batch.requests if self.reads_late else asked[0]
            of_islands = asked[2:] or [square]
            batch.norm = of_islands[self.build.island] ** 0.5 / scale
            if math.isfinite(square):
                square = max(of_islands)
            loss, norm = total / batch.divisor, square**0.5 / scale
            is_finite = math.isfinite(loss) and math.isfinite(norm)
            # All ranks see the same numbers and refuse together.
            is_refused = bool(asked[0]) if self.reads_late else not batch.limits.are_kept(loss, norm)
            is_skipped = not is_finite and self.build.loss_scaling is not None
            refusal = self._refusal(batch) if is_refused and not is_skipped else ""
            batch.result = StepResult(
                loss=loss,
                gradient_norm=norm,
                must_stop=requests >= 2,
                must_save=int(requests) % 2 == 1,
                is_busy=requests % 1 > 0,
                is_skipped=is_skipped,
                refusal=refusal,
                loss_scale=scale,
                idle_seconds=idle,
            )
        ended = batch.ended_seconds or time.perf_counter()
        return replace(batch.result, ended_seconds=ended, evicted=batch.evicted)

    def _refusal(self, batch: BatchUnderWay) -> str:
        if self.versions is not None:
            return "known only after this step was taken"
        if self.optimizer.rule.updated and not self.optimizer.rule.rolls_back:
            return "backward has updated parameters whose gradients are finite, and no other"
        if not self.reads_late:
            return "this step was not taken"
        # The update was launched, perhaps another after it: they have changed nothing.
        is_followed = self.optimizer.num_steps > batch.num_steps + 1
        self.refused, self.optimizer.num_steps = torch.zeros_like(self.refused), batch.num_steps
        return "this step was not taken" + (", nor the one after it, which had begun" if is_followed else "")

    def _used_by_none(self, unused: list[str]) -> set[str]:
        """Parameters that took no part in a step on any rank, of those unused here."""
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

    @torch.no_grad()
    def evaluate(self, batches: Iterable[Samples]) -> tuple[float, float, float | None]:
        """(sum of losses, tokens, first choices that were right) over all ranks; None where nothing is classified."""
        self.require_rest()
        build = self.build
        build.model.eval()
        for exchange in build.exchanges:
            exchange.before_evaluation()
        total, tokens = torch.zeros((), dtype=torch.float64, device=build.mesh.device), 0.0
        for samples in batches:
            self.batch = batch = self._batch(samples, trains=False)
            self.run(build.forward_actions(len(batch.microbatches)))
            total += batch.total
            tokens += samples.num_tokens
        self.batch = None
        for exchange in build.exchanges:
            exchange.after_evaluation()
        hits = build.model.take_hits()
        known = torch.full_like(total, float(hits is not None))
        right = torch.zeros_like(total) if hits is None else hits.to(total)
        agreed = self._agree(*map(self._share, (total, right, known)))
        return agreed[0], tokens, agreed[1] if agreed[2] else None

    def total(self, value: Tensor) -> float:
        """The sum over the batch of a number that each rank has computed from its whole samples."""
        return self._agree(self._counted(value, self.build.plan.sample_axes))[0]

    def any_rank(self, flag: bool) -> bool:
        """Whether a flag is set on some rank; all ranks call it."""
        return self._agree(float(flag))[0] > 0

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


def refused_step(result: StepResult, where: str = "train", fix: str = "") -> MeshwrightError:
    what = f"the loss is {result.loss} and the gradient norm {result.gradient_norm}: {result.refusal}."
    fix = fix or "Resume from the last checkpoint with a lower rate, a longer warm-up or clipping."
    return MeshwrightError([Problem(where=where, what=what, fix=fix)], exit_code=1)


def _taken(results: list[StepResult]) -> list[StepResult]:
    """The results; raises where one was refused."""
    for result in results:
        if result.refusal:
            raise refused_step(result)
    return results
