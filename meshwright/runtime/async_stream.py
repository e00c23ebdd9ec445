"""Steps that overlap: a stage goes on with the next batch while others finish the last one.

The promise, whatever the timing: every microbatch of batch t, on every stage, forward and backward, uses the weights
after t - 1 updates (after f, where the last flush came after f updates and f is more), and

    W[t + 1] = update(W[t], gradient of batch t at its promised weights).

So a stage holds two versions of its weights. Loss and norm are agreed on while the next batch runs.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function

from meshwright.core.errors import MeshwrightError, Problem
from meshwright.ops.weight_versions import Versions
from meshwright.optimizers.update import Optimizer
from meshwright.runtime.build import Build
from meshwright.runtime.loop import Interpreter, Loop, Samples, StepResult, requests, settled
from meshwright.schedules import Action
from meshwright.schedules.asynchronous import Call, is_last


@dataclass(kw_only=True)
class _Batch:
    version: int
    """The weights its microbatches use, by the number of updates before."""
    lr: float
    divisor: float
    scale: float
    """What its losses are multiplied by."""
    message: Tensor | None = None
    """After its update: what ranks are to agree on."""
    sent: dist.Work | None = None


class StreamLoop(Loop):
    """Steps of one rank, each under way until the next call or a flush has ended it."""

    def __init__(self, build: Build, optimizer: Optimizer):
        super().__init__(build, optimizer)
        problems = optimizer.config.problems_with(build.plan)
        if problems:
            raise MeshwrightError(problems)
        self.versions = Versions(optimizer.parameters, [piece.value for piece in optimizer.pieces])
        self.interpreter = Interpreter(build, [], trains=True)
        self.num_microbatches = build.plan.num_microbatches
        self.batch: _Batch | None = None
        """Of this call."""
        self.before: _Batch | None = None
        """Of the call before, if there was no flush since."""
        self.num_flushed = 0
        """Updates at the last flush."""
        self.num_fed = 0
        self.requests = 0.0

    def step(self, samples: Samples, lr: float, *, stop: bool = False, save: bool = False) -> StepResult:
        """A step with a flush after it: what one device does."""
        self.require_rest()
        return [*self.feed(samples, lr, stop=stop, save=save), *self.flush()][-1]

    def feed(self, samples: Samples, lr: float, *, stop: bool = False, save: bool = False) -> list[StepResult]:
        build = self.build
        assert samples.num_microbatches(build.plan.microbatch) == self.num_microbatches
        if not build.model.training:
            build.model.train()
        self.requests = requests(stop, save)
        self.batch = _Batch(
            version=max(self.num_fed - 1, self.num_flushed),
            lr=lr,
            divisor=samples.divisor,
            scale=build.loss_scale / samples.divisor,
        )
        self.num_fed += 1
        self.interpreter.microbatches = samples.split(build.plan.microbatch)
        self._run("first" if self.before is None else "next")
        self.interpreter.shift(self.num_microbatches)
        ended, self.before, self.batch = self.before, self.batch, None
        return [] if ended is None else [self._result(ended)]

    def flush(self) -> list[StepResult]:
        if self.before is None:
            return []
        self._run("flush")
        if self.build.wire is not None:
            self.build.wire.finish()
        ended, self.before = self.before, None
        self.num_flushed = self.num_fed
        self.versions.use(self.versions.newest)
        return [self._result(ended)]

    def evaluate(self, batches: Iterable[Samples]) -> tuple[float, float, float | None]:
        self.require_rest()
        return super().evaluate(batches)

    def require_rest(self) -> None:
        if self.before is not None:
            what = "a step is still under way: its weights are of two versions."
            raise MeshwrightError([Problem(where="train", what=what, fix="Call flush first.")])

    def _run(self, call: Call) -> None:
        build = self.build
        if self.before is not None:
            self._send(self.before)
        actions = build.timetable.stream_actions(build.stage, build.num_stages, self.num_microbatches, call)
        self.interpreter.expect(actions)
        for action in actions:
            batch = self.batch if action.microbatch >= 0 else self.before
            assert batch is not None
            if action.kind == "update":
                self._update(batch)
            else:
                self._do(action, batch)
        if self.before is not None:
            self._send(self.before)

    def _do(self, action: Action, batch: _Batch) -> None:
        if action.kind in ("forward", "backward"):
            self.versions.use(batch.version)
            self.interpreter.scale = self.build.model.loss_scale = batch.scale
        if action.kind == "backward" and action.microbatch == 0:
            self.optimizer.zero_gradients()
            for start in self.build.on_step:
                start()
        self.interpreter.do(action, is_last=is_last(action.microbatch, self.num_microbatches))

    def _update(self, batch: _Batch) -> None:
        build, optimizer = self.build, self.optimizer
        with record_function("mw:exchange"):
            for finish in build.on_finish:
                finish()
            if build.owed:
                build.sum_owed()
            optimizer.take_gradients()
            self._require_used()
            loss = self._share(self.interpreter.total)
            batch.message = torch.stack([loss, optimizer.squared_norm(), torch.zeros_like(loss)]).cpu()
            self.interpreter.total = torch.zeros_like(loss)
        with record_function("mw:update"), self.versions.updating():
            optimizer.update(batch.lr, norm=0.0)

    def _require_used(self) -> None:
        """Before an update: nobody waits until ranks have agreed on what took part in the step."""
        unused = self.optimizer.unused() if self.build.plan.num_replicas > 1 else []
        if unused:
            what = f"{unused[0]} took no part in a step, and replicas update before they could agree to leave it out."
            fix = "Freeze it, or use a schedule whose steps do not overlap."
            raise MeshwrightError([Problem(where="schedule", what=what, fix=fix)])

    def _send(self, batch: _Batch) -> None:
        """Tell the others, once. In the same call on every stage, so that all messages of the loop come in one order:
        the last stage, whose update ended the call before, has waited until now."""
        if batch.message is None or batch.sent is not None:
            return
        batch.message[2] = self.requests
        control = self.build.mesh.control
        assert control is not None
        batch.sent = dist.all_reduce(batch.message, group=control, async_op=True)

    def _result(self, batch: _Batch) -> StepResult:
        """Nobody waits long: every stage has sent its part before this call's last microbatch came through."""
        assert batch.message is not None
        assert batch.sent is not None
        batch.sent.wait()
        return settled(batch.message.tolist(), batch.divisor, "known only after this step was taken")


def loop_of(build: Build, optimizer: Optimizer) -> Loop:
    """The loop that the plan's schedule needs."""
    return StreamLoop(build, optimizer) if build.timetable.overlaps_steps else Loop(build, optimizer)
