"""One rank's training run: open, resume, step, evaluate, save. `Trainer.steps` is a generator: anyone may drive it."""

from __future__ import annotations

import hashlib
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.memory_folder import MemoryFolder
from meshwright.checkpoint.save import Retention
from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError, Problem, raise_problems
from meshwright.core.plan import Plan
from meshwright.data.dataset import Batch
from meshwright.data.open_data import Data
from meshwright.ops.device_mesh import Mesh
from meshwright.optimizers.loss_scaling import LossScaling
from meshwright.optimizers.update import Optimizer
from meshwright.run.model import OpenedModel
from meshwright.run.run_file import TrainSection
from meshwright.run.save_interval import SaveInterval
from meshwright.runtime.build import build
from meshwright.runtime.checkpointing import Saving, restore_buffers, restore_optimizer, restore_parameters, source_of
from meshwright.runtime.loop import NO_LIMITS, Loop, Samples, StepLimits, StepResult, on_device
from meshwright.runtime.sanity import ReplicaCheck, SpikeRule, TrainingTrouble, Trouble
from meshwright.runtime.text_samples import Sampler

_MOST_FILES = 10_000
"""Named in a checkpoint, so that it can be said which of them changed."""


@dataclass(frozen=True, kw_only=True)
class TrainStep:
    step: int
    loss: float
    gradient_norm: float
    lr: float
    seconds: float
    data_seconds: float
    """Of these, waiting for samples."""
    tokens_per_second: float
    num_tokens: float
    """That were learnt from; samples, where they have no sequence."""
    must_stop: bool
    loss_scale: float
    """What the loss was multiplied by in backward."""
    is_skipped: bool
    """Nothing was updated: gradients overflowed in float16, or `trouble` says why."""
    must_save: bool
    """A checkpoint is due by time on rank 0's clock, and no step is under way."""
    is_busy: bool
    """Some rank still wrote its part of a checkpoint when the step was made."""
    evicted: Mapping[str, float]
    """What this rank's `train.memory_cap` has evicted; empty where there is none."""
    trouble: Trouble | None = None


@dataclass(kw_only=True)
class _Fed:
    """A step whose result is not known yet."""

    lr: float
    num_tokens: float
    start_seconds: float
    data_seconds: float
    limits: StepLimits
    """Beyond which it is a spike."""


class Trainer:
    def __init__(
        self,
        plan: Plan,
        opened: OpenedModel,
        data: Data,
        settings: TrainSection,
        mesh: Mesh,
        *,
        checkpoint: Path | MemoryFolder | None = None,
        about: Mapping[str, Any] | None = None,
        disk: Path | None = None,
    ):
        """Weights come from a checkpoint, or from where the model has them. `about` is kept in checkpoints; `disk` is a
        folder for optimizer states, where the plan has them on disk."""
        self.plan, self.data, self.settings, self.mesh = plan, data, settings, mesh
        self.about = dict(about or {})
        self.model_fingerprint = opened.profile.fingerprint
        reader = Reader(checkpoint) if checkpoint is not None else None
        # Weights that were imported are where a run begins; any other checkpoint is where it goes on.
        goes_on = reader is not None and not reader.state.get("weights_only")
        if reader is not None and goes_on:
            self._check_state(reader.state)
        buffers = {name for name, _ in opened.model.named_buffers()}
        source = opened.source if reader is None else source_of(reader, opened.source, buffers)
        self.build = build(plan, opened.model, opened.profile, mesh, source, disk=disk)
        self.optimizer = Optimizer(settings.optimizer, self.build)
        self.step = self.cursor = 0
        self.spikes = SpikeRule()
        if reader is not None and goes_on:
            self._restore(reader)
        raise_problems(settings.problems_with(plan))
        self.loop = Loop(self.build, self.optimizer)
        if settings.memory_cap:
            self.loop.cap_memory(settings.cap_bytes)
        self.sampler: Sampler | None = None
        self.replicas = ReplicaCheck(self.build, self.optimizer)
        self.bad_step, self.num_bad = -1, 0
        """The furthest step that was skipped or rolled back, and how many since a step after it was taken."""
        self.part, self.num_parts = mesh.part(plan.sample_axes)
        self.rests: tuple[int, ...] = ()
        """Counts of steps after which somebody wants none under way, beside those that the settings say."""
        self.saving = Saving(self.build, self.optimizer)
        self.loop.is_busy = lambda: self.saving.is_busy
        self.interval = SaveInterval(settings.save_minutes)
        self.memory_interval = SaveInterval(settings.memory_save_seconds / 60)
        """Between copies in memory, where `saving` makes any."""
        self.spared: Callable[[int], bool] = lambda step: False
        """Steps whose checkpoints somebody still reads."""
        self.fed: deque[_Fed] = deque()
        """Steps that were begun and whose results are not known yet."""
        self.ended_seconds = 0.0
        """When the last step was over, on the clock of `time.perf_counter`."""

    def _restore(self, reader: Reader) -> None:
        """Everything of a checkpoint but the parameters."""
        state = reader.state
        restore_buffers(reader, self.build)
        restore_optimizer(reader, self.build, self.optimizer)
        # Steps that were skipped are not among the optimizer's.
        self.optimizer.set_num_steps(int(state.get("updates", reader.step)))
        if self.build.loss_scaling is not None and state.get("loss_scaling"):
            self.build.loss_scaling = decode(LossScaling, state["loss_scaling"], "loss_scaling")
        self.step, self.cursor = reader.step, int(state["cursor"])
        self.spikes = SpikeRule(state.get("recent_steps", ()))

    def roll_back(self, checkpoint: Path) -> None:
        """Be what the checkpoint says; steps under way are given up."""
        self.loop.flush(raises=False)
        self.fed.clear()
        reader = Reader(checkpoint)
        restore_parameters(reader, self.build, self.optimizer)
        self._restore(reader)

    def _check_state(self, state: Any) -> None:
        """A run goes on with what it began with; the plan, the batch and the number of steps may change."""
        fix = "Restore it, or start a new run folder."
        known = state.get("files")
        is_known = isinstance(known, Mapping) and known and all(isinstance(each, list) for each in known.values())
        changed = self.data.changed_files(known) if is_known else ()
        data = f"{_listed(changed)} changed" if changed else "files, sequence, seed or packing changed"
        problems = [
            Problem(where=name, what=f"is not what this run was trained with so far: {what}.", fix=fix)
            for name, what, now in (
                ("data", data, self.data.fingerprint),
                ("seed", "train.seed changed", self.settings.seed),
                ("model", "its dimensions changed", self.model_fingerprint),
                ("optimizer", "another optimizer has other state", self.settings.optimizer.name),
            )
            if state.get(name) != now
        ]
        if problems:
            raise MeshwrightError(problems)

    def steps(self, stop: Any = None) -> Iterator[TrainStep]:
        """Train until `settings.steps`, or until some rank's stop flag is set.

        A step may be told of late, while the next one runs; but when something is due after it, all are at rest.
        """
        settings, plan, fed = self.settings, self.plan, self.fed
        must_stop = must_save = False
        while not must_stop and (at := self.step + len(fed)) < settings.steps:
            start = time.perf_counter()
            try:
                # Randomness depends on the step and the samples alone: nothing to save, nothing to resume.
                digest = hashlib.blake2b(f"{settings.seed}/{at}/{self.part}".encode(), digest_size=7).digest()
                torch.manual_seed(int.from_bytes(digest, "little"))
                cursor = self.cursor + len(fed) * plan.batch
                batch = self.data.batch(cursor, plan.batch, self.part, self.num_parts, plan.shares)
                waited = time.perf_counter() - start
                lr = settings.optimizer.lr_at(at, settings.steps)
                limits = self.spikes.limits(at)
                self.build.is_last_step = at + 1 == settings.steps
                # One clock decides: rank 0's.
                is_time = self.interval.is_due or (bool(self.saving.memory) and self.memory_interval.is_due)
                save = self.mesh.rank == 0 and not self.saving.is_under_way and is_time
                is_told = stop is not None and stop.is_set
                samples, num_tokens = samples_on(batch, self.mesh.device), batch.num_tokens
                del batch  # two batches need not be in memory while the next one is read
                refused = NO_LIMITS if settings.on_spike in ("ignore", "warn") else limits
                results = self.loop.feed(samples, lr, stop=is_told, save=save, limits=refused)
                del samples
            except Exception:
                if self.loop.reads_late:  # the step before is over, and is told of first
                    yield from self._told(self.loop.flush(raises=False))
                    fed.clear()
                raise
            fed.append(_Fed(lr=lr, num_tokens=num_tokens, start_seconds=start, data_seconds=waited, limits=limits))
            must_stop = any(result.must_stop for result in results)
            must_save = any(result.must_save for result in results)
            # Alone, this rank's wishes are everyone's.
            is_asked = must_stop or must_save or (self.loop.reads_late and (is_told or save))
            must_rest = is_asked or self._is_pause(self.step + len(fed))
            yield from self._told(results, must_stop=must_stop, must_save=must_save)
            if must_rest:  # what is known was told first: this may raise
                results = self.loop.flush(raises=False)
                must_stop |= any(result.must_stop for result in results)
                must_save |= any(result.must_save for result in results)
                yield from self._told(results, must_stop=must_stop, must_save=must_save)

    def _told(
        self, results: Sequence[StepResult], *, must_stop: bool = False, must_save: bool = False
    ) -> Iterator[TrainStep]:
        """Steps whose results are known, in order; requests come with the last one under way."""
        for result in results:
            known = self.fed.popleft()
            trouble = self._trouble(result, known)
            if result.refusal:  # the loop has dropped what began after it
                self.fed.clear()
            # A step that the device began before the last one was told of lasts from there.
            seconds = max(result.ended_seconds - max(known.start_seconds, self.ended_seconds), 1e-9)
            waited = known.data_seconds if result.idle_seconds is None else min(known.data_seconds, result.idle_seconds)
            self.ended_seconds = result.ended_seconds
            is_busy = self.saving.is_under_way and not self.saving.is_in_memory
            self.interval.note_step(seconds - waited, is_busy=is_busy)
            self.cursor += self.plan.batch
            self.step += 1
            yield TrainStep(
                step=self.step - 1,
                loss=result.loss,
                gradient_norm=result.gradient_norm,
                lr=known.lr,
                seconds=seconds,
                data_seconds=waited,
                tokens_per_second=known.num_tokens / seconds,
                num_tokens=known.num_tokens,
                loss_scale=result.loss_scale,
                is_skipped=result.is_skipped or bool(result.refusal),
                must_stop=must_stop and not self.fed,
                must_save=must_save and not self.fed,
                is_busy=result.is_busy,
                evicted=result.evicted,
                trouble=trouble,
            )

    def _trouble(self, result: StepResult, known: _Fed) -> Trouble | None:
        """What is wrong with a step that goes on all the same; raises where the run does not."""
        settings, loss, norm = self.settings, result.loss, result.gradient_norm
        is_finite, step = math.isfinite(loss) and math.isfinite(norm), self.step
        if result.is_skipped or known.limits.are_kept(loss, norm) or (is_finite and settings.on_spike == "ignore"):
            self.num_bad = 0 if step > self.bad_step else self.num_bad
            if not result.is_skipped:
                self.spikes.add(step, loss, norm)
            return None
        reason, action = ("spike", settings.on_spike) if is_finite else ("not finite", settings.on_nan)
        if action == "warn":
            self.spikes.add(step, loss, norm)
        else:
            self.bad_step, self.num_bad = max(step, self.bad_step), self.num_bad + 1
        limits = f" (no spike: up to {known.limits.loss:.4g} and {known.limits.gradient_norm:.4g})" if is_finite else ""
        what = f"the loss is {loss:.6g} and the gradient norm {norm:.6g}{limits}"
        is_last = self.num_bad > settings.most_bad_steps
        told = {"step": step + 1, "cursor": self.cursor, "reason": reason, "loss": loss, "gradient_norm": norm}
        trouble = Trouble(action="stop" if is_last else action, what=what, **told)  # type: ignore[arg-type]
        if trouble.action in ("warn", "skip"):
            return trouble
        self.fed.clear()
        self.build.is_last_step = False  # it was not made
        what = f"step {step + 1}: {what}: {result.refusal}."
        if is_last:
            what += f" So it was {self.num_bad} times in a row (train.most_bad_steps is {settings.most_bad_steps})."
        fix = f"Look at the batch (`mw replay RUN {step + 1}`); go on with a lower rate, a longer warm-up or clipping, "
        fix += f'or past such batches with train.{"on_spike" if is_finite else "on_nan"} = "skip".'
        is_good = not (self.plan.overlaps_steps or any(each.updates_in_backward for each in self.plan.techniques))
        raise TrainingTrouble(trouble, what, fix, is_state_good=is_good, moves_on=True)

    def check_replicas(self) -> None:
        """Raise where ranks hold different bits of what should be the same; between two steps."""
        settings = self.settings
        if not settings.compare_replicas_every or self.fed or not (odd := self.replicas.odd_one()):
            return
        self.bad_step, self.num_bad = max(self.step, self.bad_step), self.num_bad + 1
        action = "stop" if self.num_bad > settings.most_bad_steps else settings.on_mismatch
        trouble = Trouble(step=self.step, cursor=self.cursor, reason="mismatch", action=action, what=odd)
        fix = "Restart from the last checkpoint, which was compared before it was written, without the machine or the "
        fix += 'device of that rank if it happens again; train.on_mismatch = "roll_back" does so by itself.'
        raise TrainingTrouble(trouble, f"after step {self.step}, {odd}.", fix, is_state_good=False, moves_on=False)

    def _is_pause(self, step: int) -> bool:
        """Whether somebody looks at the weights after that many steps."""
        settings = self.settings
        every = (settings.save_every, settings.evaluate_every, settings.sample_every)
        return step == settings.steps or step in self.rests or any(is_due(step, each) for each in every)

    def evaluate(self, stop: Any = None) -> dict[str, float]:
        """Held-out loss by the names people know it by: bits per byte of text, top-1 of images. Nothing once some
        rank's stop flag is set."""
        if not self.data.num_held_out:
            return {}
        place = (self.plan.batch, self.part, self.num_parts)
        batches = self.data.held_out_batches(*place, limit=self.settings.evaluate_batches, shares=self.plan.shares)
        is_stopped = False

        def samples() -> Iterator[Samples]:
            nonlocal is_stopped
            for batch in batches:
                if stop is not None and (is_stopped := self.loop.any_rank(stop.is_set)):
                    return
                yield samples_on(batch, self.mesh.device)

        total, tokens, hits = self.loop.evaluate(samples())
        if is_stopped:
            return {}
        mean = total / (tokens or 1.0)
        result = {"held_out_loss": mean}
        if self.data.info.num_bytes_per_token:
            result["held_out_bits_per_byte"] = mean / math.log(2) / self.data.info.num_bytes_per_token
        if hits is not None:
            result["held_out_top1"] = hits / (tokens or 1.0)
        for exchange in self.build.exchanges:
            result |= exchange.take_figures()
        return result

    def sample(self) -> str | None:
        """A text the model writes now, the same on every rank; None where it has no scores for every token."""
        self.loop.require_rest()
        if self.sampler is None:
            self.sampler = Sampler(self.build, self.data, self.settings)
        return self.sampler.text(self.step)

    def save(self, root: Path, *, behind: bool = False, may_be_in_memory: bool = False) -> str:
        """Write a checkpoint: "" or why it could not be written. `behind`: training goes on meanwhile, and
        `self.saving` says when it is over. `may_be_in_memory`: a copy in memory will do, unless one on disk is due."""
        self.loop.require_rest()
        self.check_replicas()
        start, files = time.monotonic(), self.data.file_states
        state = {
            "cursor": self.cursor,
            "seed": self.settings.seed,
            "data": self.data.fingerprint,
            "files": files if len(files) <= _MOST_FILES else {},
            "model": self.model_fingerprint,
            "optimizer": self.settings.optimizer.name,
            "updates": self.optimizer.num_steps,
            "recent_steps": list(self.spikes.steps),
            "loss_scaling": encode(self.build.loss_scaling),
            "plan": encode(self.plan),
            **self.about,
        }
        settings = self.settings
        retention = Retention(last=settings.keep, every=settings.keep_every, spared=self.spared)
        in_memory = may_be_in_memory and bool(self.saving.memory) and not self.interval.is_due
        reason = self.saving.start(root, self.step, state, retention, copies=behind, in_memory=in_memory)
        if not reason and not behind:
            reason = self.saving.finish()
        self.memory_interval.note_save(time.monotonic() - start)
        if not self.saving.is_in_memory:
            self.interval.note_save(time.monotonic() - start)
        return reason


def samples_on(batch: Batch, device: torch.device) -> Samples:
    def put(array: Any) -> torch.Tensor:
        return on_device(torch.from_numpy(array), device)

    inputs = tuple(map(put, batch.inputs)) if isinstance(batch.inputs, tuple) else put(batch.inputs)
    about = {"targets": put(batch.targets), "weights": put(batch.weights)}
    return Samples(inputs=inputs, num_tokens=batch.num_tokens, **about)


def _listed(names: Sequence[str], most: int = 5) -> str:
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} more" if more > 0 else "")


def is_due(step: int, every: int) -> bool:
    return bool(every) and step % every == 0
