"""What one rank process of `mw train` does, from its job to its exit code; and before, to time the run's model."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import statistics
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile, record_function

from meshwright.checkpoint.memory_folder import MemoryFolder, copies_in_memory
from meshwright.checkpoint.remote import END_SECONDS, STOP_SECONDS, ObjectFolder, Uploader, fetch_newest
from meshwright.checkpoint.save import Retention, space_forecast, write_seconds
from meshwright.checkpoint.step_folders import committed_folders, discard, newest_good, read_manifest, step_folder
from meshwright.core.codec import decode, encode
from meshwright.core.errors import MeshwrightError, Problem
from meshwright.core.files import write_whole
from meshwright.core.plan import Plan
from meshwright.core.time_ledger import read_marks
from meshwright.core.timeline import Span
from meshwright.core.units import pretty_bytes, pretty_seconds
from meshwright.data.open_data import Data
from meshwright.launch.cpu_bf16 import limit_isa_for_bf16
from meshwright.launch.rank_job import PREEMPTED_EXIT_CODE, Job, StopFlag, run_rank
from meshwright.launch.sections import SectionStamp
from meshwright.machine.probe import available_host_bytes
from meshwright.ops.collectives import gather_json, share_json
from meshwright.ops.device_mesh import Mesh, join
from meshwright.run.comparison import COMPARISON, WARM_UP_STEPS, Promise, StepTally, compared_entry, keep
from meshwright.run.model import ModelDescription, open_model
from meshwright.run.prepare import open_data, require_owner
from meshwright.run.replay import TROUBLES
from meshwright.run.result import held_out_text
from meshwright.run.run_file import RunConfig
from meshwright.runtime.build import RankBuild
from meshwright.runtime.checkpointing import state_bytes
from meshwright.runtime.out_of_memory import is_out_of_memory, out_of_memory
from meshwright.runtime.run_record import (
    Lines,
    Metrics,
    Progress,
    RunClock,
    Watch,
    current_bytes,
    num_retries,
    one_line,
    peak_bytes,
    reserved_bytes,
    write_timeline,
)
from meshwright.runtime.sanity import StragglerWatch, TrainingTrouble, Trouble
from meshwright.runtime.trainer import Trainer, TrainStep, is_due, samples_on

OWNER_SECONDS = 1.0
"""Between two looks at whose the run folder is. A process that was stopped for long looks before it writes."""


def device_of(kind: str, local_rank: int) -> torch.device:
    """This rank's device. A launcher may show each task one GPU only, or all of the node's."""
    if kind == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count()
    if not count:
        what = "the plan is for GPUs and there is none here."
        raise MeshwrightError(
            [Problem(where="run.cluster", what=what, fix="Leave run.cluster out to use this machine.")]
        )
    index = local_rank % count
    torch.cuda.set_device(index)
    return torch.device("cuda", index)


def main(job: Job, stop: StopFlag) -> int:
    """A rank that `mw train` started on this machine."""
    arguments = job.arguments
    limit_isa_for_bf16()  # it forks, so before any tensor
    device = device_of(arguments["device"], job.rank)
    plan = decode(Plan, arguments["plan"], "plan")
    if plan.mesh:
        join(job.rank, job.num_ranks, device, rendezvous=job.rendezvous)
    stamp = SectionStamp(job.sections, job.rank)
    return RankTraining(arguments, plan, device, stop, stamp).go(stop)


def on_first(control: dist.ProcessGroup | None, action: Callable[[], Any]) -> Any:
    """Do it on rank 0; its result (JSON) or its error is every rank's, so that nobody waits for the others."""
    answer: dict[str, Any] = {}
    if control is None or dist.get_rank() == 0:
        try:
            answer = {"value": action()}
        except MeshwrightError as error:
            answer = {"problems": [encode(p) for p in error.problems], "exit_code": error.exit_code}
        except OSError as error:
            problem = Problem(where=str(error.filename or ""), what=f"{error.strerror or error}.")
            answer = {"problems": [encode(problem)], "exit_code": 1}
    answer = share_json(control, answer)
    if "problems" in answer:
        problems = [Problem(**problem) for problem in answer["problems"]]
        raise MeshwrightError(problems, answer["exit_code"], is_everywhere=control is not None)
    return answer["value"]


class RankTraining:
    """A run as one of its ranks sees it: what is due after each step, and what rank 0 writes down."""

    def __init__(
        self,
        arguments: Mapping[str, Any],
        plan: Plan,
        device: torch.device,
        stop: StopFlag,
        stamp: SectionStamp | None = None,
    ):
        """`arguments`: see `Run.adopt`."""
        self.stamp, self.stop = stamp or SectionStamp(), stop
        stop.leave_at_once(True)  # until there is a step to save
        self.config = config = decode(RunConfig, arguments["config"], "")
        stop.grace_seconds = config.run.grace_seconds
        self.folder = Path(config.run.folder)
        self.promise, self.is_compared = decode(Promise, arguments["promise"], "promise"), False
        mesh = Mesh.make(plan.mesh, device)
        self.is_first = mesh.rank == 0
        restart = str(arguments.get("restart", ""))
        """Why ranks were started again by the same `Run`, whose events go on."""
        last = sys.maxsize if restart else -1
        self.events = Lines(self.folder / "events.jsonl", last, Progress(0, 0, 0.0).say) if self.is_first else None
        self.progress = Progress(0, config.train.steps, float(arguments["tokens_per_second"]), self.events)
        self.mfu = float(arguments["mfu"])  # as forecast
        description = decode(ModelDescription, arguments["description"], "description")
        self.own_bytes = current_bytes(device)
        self.uploader: Uploader | None = None
        try:
            self.trainer = trainer = self._open(arguments, description, plan, mesh)
        except Exception as error:
            if is_out_of_memory(error):
                raise out_of_memory(error, mesh.rank, plan.num_ranks, device, self.own_bytes, None) from error
            raise
        self.progress.first_step = self.progress.steps_done = trainer.step
        self.progress.counts = trainer.build.profile.counts
        self.metrics: Metrics | None = None
        if self.events is not None:
            shown = {**encode(config), "techniques": str(plan)}
            self.metrics = Metrics(self.folder, trainer.step, self.progress.say, config.run.track, shown)
            about = {"metrics_bytes": self.metrics.lines.num_bytes, **({"cause": restart} if restart else {})}
            self.events.write({"event": "start", "step": trainer.step, **about})
        # Where steps overlap, none begins and ends in one call: the profiler would be started and stopped between two
        # that are told at once, which has crashed it.
        num_watched = 0 if plan.overlaps_steps else config.run.timeline_steps
        self.watch = Watch(trainer.step + WARM_UP_STEPS, num_watched, mesh)
        self.stragglers = StragglerWatch(trainer.build)
        trainer.build.on_action += [self.stamp.look, self.watch.look, self.stragglers.look]
        if trainer.loop.reads_late:  # elsewhere a rest would change the run, or is there anyway
            # After the first step a signal is answered by saving: it must be over by then, not beside a second one.
            trainer.rests = (trainer.step + 1, self.watch.range.start, self.watch.range.stop)
        self.tally = StepTally()
        self.num_early_retries = 0
        self.evaluated_step = -1
        self.save_error = ""
        self.save_seconds = 0.0
        """The least that a checkpoint has taken to be written, on rank 0; 0 before the first."""
        self.is_grace_said = False
        self.held_out: dict[str, float] = {}
        self.loss: float | None = None
        self.num_tokens = 0.0
        self.num_skipped = 0
        self.evicted: Counter[str] = Counter()
        self.start = time.monotonic()
        self.clock = RunClock(self.folder if self.is_first else None, trainer.step, self.progress.say)
        self.saves_behind = self._plan_saves()
        trainer.saving.fence = lambda: require_owner(self.folder, str(arguments.get("owner", "")))
        self.owned_seconds = time.monotonic()
        self.stamp.begin(trainer.step)
        if since := float(arguments.get("changed_since", 0.0)):
            seconds = pretty_seconds(time.monotonic() - since)
            self.progress.say(f"the change to {plan} took {seconds}, from the last step to here (step {trainer.step})")

    def _open(self, arguments: Mapping[str, Any], description: ModelDescription, plan: Plan, mesh: Mesh) -> Trainer:
        config, say = self.config, self.progress.say if self.is_first else lambda text: None
        mine: list[Data] = []  # rank 0 tokenizes if nobody has; the others map the same file
        on_first(mesh.control, lambda: mine.append(open_data(config, description)))
        data = mine[0] if mine else open_data(config, description)
        config.train.require_tokenizer(data)
        root = self.folder / "checkpoints"
        on_first(mesh.control, lambda: self._open_remote(root))
        # Rank 0 verifies once; a damaged checkpoint is passed over, with a message.
        self.memory = tuple(map(MemoryFolder, arguments.get("memory", ())))

        def choose() -> str | int:
            newest = max(committed_folders(root), default=-1)
            for step, folder in copies_in_memory(self.memory).items():
                if step <= newest:
                    break
                if not (problems := folder.verify(folder.read_manifest())):
                    return self.memory.index(folder)
                say(f"the copy of step {step} in memory is damaged and is not used: {problems[0].what}")
            return str(newest_good(root, report=say) or "")

        chosen = on_first(mesh.control, choose)
        checkpoint = self.memory[chosen] if isinstance(chosen, int) else Path(chosen) if chosen else None
        opened = open_model(description, config.train.seed)
        about, disk = description.about(), Path(config.run.disk or self.folder)
        trainer = Trainer(plan, opened, data, config.train, mesh, checkpoint=checkpoint, about=about, disk=disk)
        if checkpoint is not None:
            say(f"resuming from step {trainer.step} ({checkpoint})")
        if self.uploader is not None:
            trainer.spared = self.uploader.reads
            if isinstance(checkpoint, Path):  # the start before may not have come to it
                self.uploader.put(checkpoint)
        self.saved_step = self.saving_step = trainer.step if isinstance(checkpoint, Path) and trainer.step else -1
        self.stop.leave_at_once(not isinstance(checkpoint, MemoryFolder))  # whose steps are on no disk yet
        return trainer

    def _open_remote(self, root: Path) -> None:
        """Rank 0: bring the newest checkpoint of object storage here, and begin to put new ones there."""
        if not self.config.run.remote:
            return
        remote = ObjectFolder(self.config.run.remote)
        try:
            fetch_newest(remote, root, report=self.progress.say)
        except MeshwrightError as error:
            if not committed_folders(root):  # a second beginning could meet the first one there
                raise
            self.progress.say(f"object storage is not looked at: {error.problems[0]}")
        settings = self.config.train
        retention = Retention(last=settings.keep, every=settings.keep_every)
        self.uploader = Uploader(remote, retention.of, self.progress.say)

    def _plan_saves(self) -> bool:
        """Whether checkpoints are written behind training; raises or warns where the disk has no room for them, or the
        host for copies in memory."""
        trainer, settings = self.trainer, self.config.train
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
        own_bytes = state_bytes(trainer.build, trainer.optimizer)
        has_room = own_bytes * num_local <= available_host_bytes() // 2
        told = gather_json(trainer.mesh.control, [own_bytes, has_room])
        if self.is_first:
            trainer.interval.expect_failures(read_marks(self.folder), max(1, len(told) // num_local))
        needed_bytes = sum(each for each, _ in told)
        root, about = self.folder / "checkpoints", {"keep": settings.keep, "every": settings.keep_every}

        def look() -> bool:
            if news := space_forecast(root, needed_bytes, settings.steps - trainer.step, **about):
                self.progress.say(news)
            if not settings.memory_save_seconds:
                return False
            # The copy that is written from, and two sets of files, which a restart finds there.
            most_bytes = available_host_bytes() + sum(folder.held_bytes for folder in self.memory)
            numbers = f"{pretty_bytes(3 * needed_bytes)} of the {pretty_bytes(most_bytes)} available on this host"
            seconds = pretty_seconds(settings.memory_save_seconds)
            if self.memory and 6 * needed_bytes <= most_bytes:
                self.progress.say(f"a copy of the state in host memory every {seconds}: at most {numbers}")
                return True
            why = f"they would take {numbers}; half may be" if self.memory else "only for ranks that `mw train` starts"
            self.progress.say(f"warning: train.memory_save_seconds: no copies in memory are made: {why}")
            return False

        if on_first(trainer.mesh.control, look):
            trainer.saving.use_memory(self.memory)
        self._judge_grace(on_first(trainer.mesh.control, lambda: write_seconds(root, own_bytes * num_local)))
        return settings.save_async is True or (settings.save_async == "auto" and all(each for _, each in told))

    def go(self, stop: StopFlag) -> int:
        """Train to the end, or until somebody asks to stop; the exit code."""
        trainer, settings = self.trainer, self.config.train
        start = trainer.step
        if "roll_back" in (settings.on_nan, settings.on_spike, settings.on_mismatch) and self.saved_step < 0:
            self._save()  # there is something to roll back to
        stopped = None
        while stopped is None:
            try:
                stopped = self._train(stop, start)
            except TrainingTrouble as trouble:
                self._recover(trouble)
            except Exception as error:
                if is_out_of_memory(error):
                    place = trainer.mesh.rank, trainer.plan.num_ranks, trainer.mesh.device
                    raise out_of_memory(error, *place, self.own_bytes, trainer) from error
                raise
        with self.stamp.within("end"):  # uploads and trackers take their time
            self._write_result(stopped, trainer.step - start)
            if trainer.mesh.control is not None:
                dist.barrier(trainer.mesh.control)
        if self.save_error:
            raise MeshwrightError(f"the last checkpoint was not written: {self.save_error}", exit_code=1)
        return PREEMPTED_EXIT_CODE if stopped else 0

    def _train(self, stop: StopFlag, start: int) -> bool:
        """Train to the end; whether somebody asked to stop before."""
        trainer, settings, stopped = self.trainer, self.config.train, False
        self._watch(self.watch.before, trainer.step)
        for step in trainer.steps(stop):
            stop.leave_at_once(False)
            self.stamp.end_step(step.step + 1)
            self._watch(self.watch.after, step.step)
            if trainer.saving.is_under_way and not step.is_busy:
                with self.stamp.within("save"):
                    self._note_save(trainer.saving.advance())
            self._record(step, measured=step.step >= start + WARM_UP_STEPS)
            stopped = step.must_stop
            if stopped:
                stop.note()
            if is_due(trainer.step, settings.compare_replicas_every):
                trainer.check_replicas()
            if not stopped and is_due(trainer.step, settings.evaluate_every):
                self._evaluate()
            if not stopped and is_due(trainer.step, settings.sample_every):
                self._sample()
            is_save_due = step.must_save or is_due(trainer.step, settings.save_every)
            if self._has_time_to_save() if stopped else is_save_due:
                is_last = stopped or trainer.step == settings.steps
                self._save(behind=not is_last, on_disk=is_last or is_due(trainer.step, settings.save_every))
            self._watch(self.watch.before, trainer.step)
            self.stamp.look("data")
        stop.leave_at_once(False)
        if not stopped:
            self._evaluate()
            self._save()
        return stopped

    def _watch(self, look: Callable[[int], None], step: int) -> None:
        """The profiler takes long to begin and to end."""
        with self.stamp.within("start"):
            look(step)

    @contextlib.contextmanager
    def _spend(self, category: str, section: str) -> Iterator[None]:
        with self.clock.spend(category), self.stamp.within(section):
            yield

    def _recover(self, error: TrainingTrouble) -> None:
        """Save the good state and raise the error; or roll back to the last good checkpoint, from which the run goes
        on with the samples after the batch that was to blame."""
        trouble, root = error.trouble, self.folder / "checkpoints"
        self._finish_save()
        cursor = trouble.cursor + self.trainer.plan.batch
        self._note(trouble)
        if trouble.action == "stop":
            if error.is_state_good:
                self._save()
            raise error

        def choose() -> str:
            self.trainer.saving.forget_memory()  # of a history that is given up
            newest = newest_good(root, report=self.progress.say)
            for step, folder in committed_folders(root).items():
                if newest is not None and step > read_manifest(newest).step:
                    discard(folder)  # damaged, and no longer of this run
            return str(newest or "")

        newest = on_first(self.trainer.mesh.control, choose)
        if not newest:
            raise error
        with self.stamp.within("start"):
            self.trainer.roll_back(Path(newest))
        self.saved_step = self.trainer.step
        self.clock.resume(self.trainer.step)
        lost = trouble.step - 1 - self.trainer.step
        if self.is_first:
            self.progress.say(f"rolled back to step {self.trainer.step}, {lost} steps before: {error}")
        if error.moves_on:
            self.trainer.cursor, self.saved_step = cursor, -1
            self._save()  # a resume goes on past the batch, too

    def _note(self, trouble: Trouble) -> None:
        """Keep it for `mw replay`."""
        if self.is_first:
            self.progress.say(f"step {trouble.step}: {trouble.reason}, {trouble.action}: {trouble.what}")
            lines = Lines(self.folder / TROUBLES, sys.maxsize, self.progress.say)
            lines.write(trouble.as_json(self.trainer.data.order(trouble.cursor, self.trainer.plan.batch).tolist()))
            lines.close()

    def _record(self, step: TrainStep, measured: bool) -> None:
        if self.is_first and time.monotonic() > self.owned_seconds + OWNER_SECONDS:
            self.trainer.saving.fence()  # before a line is added to what may be another run's by now
            self.owned_seconds = time.monotonic()
        self.clock.add(step.step + 1, step.seconds, step.data_seconds)
        # The profiler slows the steps it watches.
        is_measured = measured and step.step not in self.watch.range
        self.tally.add(step.seconds, step.data_seconds, is_measured=is_measured)
        if not is_measured:
            self.num_early_retries = num_retries(self.trainer.mesh.device)
        self.loss = step.loss if math.isfinite(step.loss) else self.loss
        self.num_tokens += step.num_tokens
        self.num_skipped += step.is_skipped
        if step.trouble is not None:
            self._note(step.trouble)
        self.evicted.update(step.evicted)
        slow = self.stragglers.end_step(step.data_seconds)
        if self.metrics is None:
            return
        memory = peak_bytes(self.trainer.mesh.device)
        self.progress.step(step.step, step.loss, step.tokens_per_second, memory)
        values = {
            "loss": step.loss,
            "gradient_norm": step.gradient_norm,
            "lr": step.lr,
            "seconds": step.seconds,
            f"{self.progress.counts}_per_second": step.tokens_per_second,
            "mfu": self.mfu * step.tokens_per_second / self.progress.forecast,
            "memory_bytes": memory,
            "goodput": self.clock.goodput,
            **step.evicted,
        }
        if slow is not None:
            values |= {"slow_rank": slow.rank, "slow_rank_ratio": slow.ratio}
            what = f"{slow.ratio:.2f} times as long as others, most of it in {slow.part}"
            self.progress.say(f"step {step.step + 1}: rank {slow.rank} is slow: its steps take {what}")
        if self.trainer.build.loss_scaling is not None:
            values["loss_scale"] = step.loss_scale
        if self.num_skipped or self.trainer.build.loss_scaling is not None:
            values["skipped_steps"] = self.num_skipped
        for exchange in self.trainer.build.exchanges:
            values |= exchange.take_figures()
        self.metrics.write(step.step + 1, {name: value for name, value in values.items() if math.isfinite(value)})
        is_last = step.must_stop or step.step + 1 == self.config.train.steps
        if self.tally.is_enough and not self.is_compared and not is_last:
            # What rank 0 knows so far: asking the others would cost every rank a message.
            facts = self.tally.facts(self.watch.spans, self._memory())
            assert facts is not None
            self.is_compared = True
            about = {"unix_seconds": time.time(), **self._versions()}
            entry = compared_entry(self.promise, facts, str(self.folder), is_whole=False, **about)
            self.progress.say(f"step {self.trainer.step}: {entry.comparison['text']}")
            if reason := keep(entry, self.folder):
                self.progress.say(f"{COMPARISON} is not written: {reason}")

    def _memory(self) -> dict[str, int]:
        device = self.trainer.mesh.device
        return {
            "peak_bytes": peak_bytes(device),
            "reserved_bytes": reserved_bytes(device),
            "num_retries": num_retries(device) - self.num_early_retries,
        }

    def _versions(self) -> dict[str, str]:
        device = self.trainer.mesh.device
        name = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        return {"torch": torch.__version__, "device_name": name}

    def _evaluate(self) -> None:
        if self.evaluated_step == self.trainer.step:
            return
        self.evaluated_step = self.trainer.step
        with self._spend("evaluation", "evaluation"):
            self.held_out = self.trainer.evaluate(self.stop)
        if self.metrics is not None and self.held_out:
            self.metrics.write(self.trainer.step, self.held_out)
            self.progress.say(f"step {self.trainer.step}: held-out {held_out_text(self.held_out)}")

    def _sample(self) -> None:
        with self._spend("evaluation", "evaluation"):
            text = self.trainer.sample()
        if self.metrics is None:
            return
        if text is None:
            self.progress.say(f"step {self.trainer.step}: no sample, the model has no scores for every token")
            return
        self.metrics.sample(self.trainer.step, self.config.train.sample_prompt, text)
        self.progress.say(f"step {self.trainer.step} sample: {one_line(text)}")

    def _save(self, *, behind: bool = False, on_disk: bool = True) -> None:
        """`behind`: training may go on while it is written. Not `on_disk`: a copy in memory will do."""
        self._finish_save()
        trainer = self.trainer
        if self.saved_step == trainer.step:
            return
        self.clock.mark()  # where a restart goes on, if the save succeeds
        self.saving_step = trainer.step
        with self._spend("checkpoint", "save"):
            root = self.folder / "checkpoints"
            reason = trainer.save(root, behind=behind and self.saves_behind, may_be_in_memory=not on_disk)
        self._note_save(None if trainer.saving.is_under_way else reason)

    def _has_time_to_save(self) -> bool:
        """Whether the rest of the grace is as long as a checkpoint takes; the one that is being written is ended."""
        self._finish_save()
        left = self.stop.left_seconds
        if on_first(self.trainer.mesh.control, lambda: self.save_seconds <= left):
            return True
        if self.is_first:
            what = f"step {self.trainer.step} is not saved: that takes {pretty_seconds(self.save_seconds)}, of which "
            self.progress.say(f"{what}the grace (run.grace_seconds) leaves {pretty_seconds(max(left, 0.0))}")
        return False

    def _judge_grace(self, seconds: float) -> None:
        """Say once that a stop leaves too little time for a checkpoint that is written in so many seconds."""
        grace = self.stop.grace_seconds
        if self.is_first and not self.is_grace_said and seconds + self.trainer.interval.step_seconds > 0.8 * grace:
            self.is_grace_said = True
            what = f"a checkpoint takes about {pretty_seconds(seconds)}, and a stop has {pretty_seconds(grace)} "
            what += "(run.grace_seconds) for it and for the step under way: it may leave the last checkpoint as it is"
            fix = "Raise run.grace_seconds, and what the scheduler gives (Slurm: --signal=USR1@T), or save more often."
            self.progress.say(f"warning: {what}. {fix}")

    def _finish_save(self) -> None:
        """Wait for the one that is being written."""
        if self.trainer.saving.is_under_way:
            with self._spend("checkpoint", "save"):
                reason = self.trainer.saving.finish()
            self._note_save(reason)

    def _note_save(self, reason: str | None) -> None:
        """A save is over: "" or why it could not be written; None where it is not."""
        if reason is None:
            return
        if self.trainer.saving.is_in_memory:
            if reason:
                self.trainer.saving.memory = ()
                if self.is_first:
                    self.progress.say(f"no more copies in memory are made, training goes on: {reason}")
            return
        self.save_error = reason
        if reason and self.is_first:
            self.progress.say(f"checkpoint not written, training goes on: {reason}")
        if not reason:
            self.saved_step, taken = self.saving_step, self.trainer.saving.seconds
            self.save_seconds = min(self.save_seconds or taken, taken)
            self._judge_grace(self.save_seconds)
            if self.events is not None:
                path = step_folder(self.folder / "checkpoints", self.saved_step)
                self.events.write({"event": "save", "step": self.saved_step, "path": str(path)})
                if self.uploader is not None:
                    self.uploader.put(path)
        if self.is_first and (news := self.trainer.interval.news()):
            self.progress.say(news)

    def _write_result(self, stopped: bool, num_steps: int) -> None:
        mesh = self.trainer.mesh
        gathered = gather_json(
            mesh.control,
            {
                **self._memory(),
                "spans": [encode(span) for span in self.watch.spans],
                "memory": [encode(point) for point in self.watch.memory],
                "evicted": self.evicted,
            },
        )
        if self.uploader is not None:
            with self.clock.spend("checkpoint"):
                limit = max(0.0, min(STOP_SECONDS, self.stop.left_seconds - 1)) if stopped else END_SECONDS
                self.uploader.close(limit)
        self.clock.mark()
        if self.metrics is None:
            return
        most = {name: max(rank[name] for rank in gathered) for name in self._memory()}
        facts = self.tally.facts((Span(**span) for rank in gathered for span in rank["spans"]), most)
        measured = most | {"step_seconds": None, "num_measured": 0} if facts is None else encode(facts)
        result = {
            "step": self.trainer.step,
            "steps_now": num_steps,
            "stopped": stopped,
            "seconds": time.monotonic() - self.start,
            "counts": self.progress.counts,
            "seen_now": self.num_tokens,
            "samples_in_all": self.trainer.cursor,
            **measured,
            **self._versions(),
            "loss": self.loss,
            "held_out": self.held_out,
            "evicted": {name: sum(rank["evicted"][name] for rank in gathered) for name in self.evicted},
            "saved_step": self.saved_step,
            "finished_unix_seconds": time.time(),
        }
        try:
            write_timeline(self.folder, gathered, self.trainer.plan.fingerprint)
            write_whole(self.folder / "result.json", json.dumps(result, indent=1))
        except OSError as error:
            self.progress.say(f"result.json and the measured timeline are not written: {error.strerror or error}")
        self.metrics.close(result)
        if self.events is not None:
            self.events.close()


_KINDS = {"attention": re.compile(r"attention|sdp"), "matmul": re.compile(r"mm\b|mm_|linear|convolution|rnn")}
"""By the name of an operator; all others move memory."""


def time_model(
    *,
    rank: int,
    num_ranks: int,
    rendezvous: str,
    kind: str,
    run: Any,
    model: Any,
    plan: Any,
    blocks: int,
    budget: float,
) -> dict[str, Any]:
    """`forward` and `backward` seconds, `by_kind` of them as profiled, `wait_seconds` of a rank for the others wherever
    they meet after a block, and `peak_bytes`. `blocks`: so many of them, without a head unless those are all."""
    config, local = decode(RunConfig, run, ""), decode(Plan, plan, "")
    description = decode(ModelDescription, model, "description")
    device, is_whole = device_of(kind, rank), blocks >= description.profile.num_blocks
    join(rank, num_ranks, device, rendezvous=rendezvous)
    opened, mesh = open_model(description, config.train.seed), Mesh.make({}, device)
    made = RankBuild(plan=local, profile=opened.profile, model=opened.model, mesh=mesh, source=opened.source)
    if not is_whole:
        made.at("cut", lambda build: build.keep_spans(((0, blocks),)))
    made.run()
    made.model.train()
    samples = samples_on(open_data(config, description).batch(0, local.batch * num_ranks, rank, num_ranks), device)
    given = (samples.targets, samples.weights) if is_whole else ()
    num_meetings, meet = 0, False

    def after(block: Any, given: Any = None, output: Any = None) -> None:
        nonlocal num_meetings
        if meet:
            num_meetings += 1
            dist.barrier()
            first = output[0] if isinstance(output, tuple) else output
            if isinstance(first, Tensor) and first.requires_grad:
                first.register_hook(after)

    def now() -> float:
        if kind == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter()

    def step() -> tuple[float, float]:
        dist.barrier()
        with record_function("mw:forward"):
            start, output, middle = now(), made.model(samples.inputs, *given), now()
        with record_function("mw:backward"):
            if output.requires_grad:
                output.backward(torch.ones_like(output))
            end = now()
        made.model.zero_grad(set_to_none=True)
        return middle - start, end - middle

    for block in made.model.block_modules():
        block.register_forward_hook(after)
    step()
    longest = torch.tensor(sum(step()), device=device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)  # all make as many steps: one less would leave the others waiting
    free, waits = [], []
    for _ in range(max(3, min(12, int(budget / float(longest) / 2)))):
        free.append(step())
        num_meetings, meet = 0, True
        waits.append((sum(step()) - sum(free[-1])) / max(num_meetings, 1))
        meet = False
    forward, backward = (statistics.median(each) for each in zip(*free, strict=True))
    told = {"forward": forward, "backward": backward, "wait_seconds": statistics.median(waits)}
    return {**told, "by_kind": profiled_kinds(step, kind == "cuda"), "peak_bytes": peak_bytes(device)}


def profiled_kinds(step: Callable[[], Any], on_gpu: bool) -> dict[str, float]:
    """ "attention backward" -> seconds of the device in such ops during one step."""
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]) as watched:
        step()
    events = [event for event in watched.events() if event.device_type == DeviceType.CPU]
    middle = next(event.time_range.start for event in events if event.name == "mw:backward")
    seconds: dict[str, float] = {}
    for event in events:
        if not event.name.startswith(("mw:", "c10d", "gloo", "nccl")):
            kind = next((kind for kind, names in _KINDS.items() if names.search(event.name)), "memory")
            key = f"{kind} {'backward' if event.time_range.start >= middle else 'forward'}"
            micro = event.self_device_time_total if on_gpu else event.self_cpu_time_total
            seconds[key] = seconds.get(key, 0.0) + micro / 1e6
    return seconds


if __name__ == "__main__":
    run_rank(main)
