"""Between a running model and its checkpoints: which pieces this rank writes, and where it reads its own from."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.manifest import MANIFEST
from meshwright.checkpoint.memory_folder import MemoryFolder, copies_in_memory
from meshwright.checkpoint.save import Retention, begin, commit, commit_in_memory, write_rank_file
from meshwright.checkpoint.step_folders import discard
from meshwright.core.box import Box
from meshwright.core.build import OptimizerState
from meshwright.ops.collectives import gather_json, share_json
from meshwright.ops.host_memory import CopyLanes, pinned_empty
from meshwright.ops.initial_weights import Source
from meshwright.optimizers.update import Optimizer
from meshwright.runtime.build import RankBuild


def _pieces(build: RankBuild, optimizer: Optimizer) -> Iterable[tuple[str, Box, Tensor]]:
    for name, value in build.local_parameters() if build.island == 0 else ():
        if build.owns(name):
            yield from as_it_lies(f"parameter.{name}", build.boxes[name], build.evaluated.get(name, value))
    for kind, name, value, box in optimizer.owned_state():
        yield from as_it_lies(f"optimizer.{kind}.{name}", box, value)
    if build.answers_for_buffers():
        for name, value in build.lasting_buffers():
            yield f"buffer.{name}", Box.whole(tuple(value.shape)), value


def as_it_lies(name: str, box: Box, value: Tensor) -> Iterable[tuple[str, Box, Tensor]]:
    """A piece as boxes that any other plan can read."""
    if box.order is None:
        yield name, box, value
        return
    dim, boxes = box.order[0], box.in_order()
    for each, part in zip(boxes, value.split([each.size[dim] for each in boxes], dim), strict=True):
        yield name, each, part


def state_bytes(build: RankBuild, optimizer: Optimizer) -> int:
    """What this rank's part of a checkpoint takes."""
    return sum(value.numel() * value.element_size() for _, _, value in _pieces(build, optimizer))


def save(root: Path, step: int, build: RankBuild, optimizer: Optimizer, state: Mapping[str, Any], keep: int) -> str:
    """Write a checkpoint together. Returns "" or, on every rank, why it could not be written; the run goes on."""
    saving = Saving(build, optimizer)
    return saving.start(root, step, state, Retention(last=keep)) or saving.finish()


class Saving:
    """One checkpoint at a time, written while training goes on or while it waits.

        main thread of every rank                    a thread of every rank
        start: pieces copied to host memory  ─────>  write, hash and fsync the rank's file
        advance: entries gathered            ─────>  rank 0: commit
        advance: every rank learns the outcome

    All collectives are made by the main threads, at the same step: `is_busy` of all ranks is part of the message that
    ends every step. Host memory for the copies is reused.
    """

    def __init__(self, build: RankBuild, optimizer: Optimizer):
        self.build, self.optimizer, self.mesh = build, optimizer, build.mesh
        self.thread: threading.Thread | None = None
        self.answer: dict[str, Any] = {}
        """Of the thread."""
        self.folder: Path | MemoryFolder | None = None
        self.memory: tuple[MemoryFolder, ...] = ()
        """Two, where copies in memory are made."""
        self.turn = 0
        """Rank 0: the one of them that is written next."""
        self.is_in_memory = False
        """What is under way, or was last."""
        self.is_committing = False
        self.commit: Callable[[list[Any]], Any] = list
        self.fence: Callable[[], None] = lambda: None
        """Rank 0 calls it before a commit; it raises where this run may not commit any more."""
        self.copies: list[Tensor] = []
        self.lanes: CopyLanes | None = None
        self.copied: torch.cuda.Event | None = None
        """The device has copied everything; until then nothing of it may change."""
        self.seconds = 0.0
        """That this rank's thread has taken for this checkpoint, or the last one."""

    @property
    def is_under_way(self) -> bool:
        """The same on all ranks."""
        return self.folder is not None

    @property
    def is_busy(self) -> bool:
        """This rank's thread is at work."""
        return self.thread is not None and self.thread.is_alive()

    def use_memory(self, memory: tuple[MemoryFolder, ...]) -> None:
        """Copies in memory may be made; by all ranks."""
        self.memory = memory
        whole = list(copies_in_memory(memory).values()) if self.mesh.rank == 0 else []
        self.turn = 1 - memory.index(whole[0]) if whole else 0

    def forget_memory(self) -> None:
        """The copies in memory are of a history that is given up; by rank 0."""
        for each in self.memory:
            os.truncate(each / MANIFEST, 0)

    def start(
        self,
        root: Path,
        step: int,
        state: Mapping[str, Any],
        retention: Retention,
        *,
        copies: bool = False,
        in_memory: bool = False,
    ) -> str:
        """Begin a checkpoint on all ranks; "" or why not. `copies`: training goes on before `finish`. `in_memory`: a
        copy in host memory, in place of the older one there; rank 0 decides."""
        assert not self.is_under_way
        self.seconds = 0.0
        mesh, optimizer = self.mesh, self.optimizer
        for exchange in self.build.exchanges:
            exchange.before_saving()

        def open_folder() -> str | int:
            if not in_memory:
                return str(begin(root, step))
            os.truncate(self.memory[self.turn] / MANIFEST, 0)
            return self.turn

        opened = {"in_memory": in_memory, **_attempt(open_folder)} if mesh.rank == 0 else None
        opened = share_json(mesh.control, opened)
        self.is_in_memory = opened["in_memory"]
        if "error" in opened:
            return str(opened["error"])
        place = opened["value"]
        folder = self.folder = self.memory[place] if self.is_in_memory else Path(place)

        def commit_parts(parts: list[Any]) -> None:
            if isinstance(folder, MemoryFolder):
                commit_in_memory(folder, step, parts, state)
                self.turn = 1 - self.turn
            else:
                self.fence()
                commit(root, step, folder, parts, state, retention)

        self.commit = commit_parts
        self.answer = _attempt(lambda: list(self._copied() if copies else _pieces(self.build, optimizer)))
        if (pieces := self.answer.get("value")) is not None:
            self._run(lambda: write_rank_file(folder, mesh.rank, pieces))
        return ""

    @torch.no_grad()
    def _copied(self) -> Iterator[tuple[str, Box, Tensor]]:
        device = self.mesh.device
        if self.lanes is None:
            self.lanes = CopyLanes(device)
            self.build.on_action.append(self._before_action)
        for index, (name, box, value) in enumerate(_pieces(self.build, self.optimizer)):
            if index == len(self.copies):
                self.copies.append(pinned_empty(value.numel(), value.dtype, device).view(value.shape))
            if self.copies[index].shape != value.shape or self.copies[index].dtype != value.dtype:
                self.copies[index] = pinned_empty(value.numel(), value.dtype, device).view(value.shape)
            if value.is_cuda:
                self.copied = self.lanes.copy_out(self.copies[index], value)
            else:
                self.copies[index].copy_(value)
            yield name, box, self.copies[index]
        if any(each.updates_in_backward or each.overlaps_steps for each in self.build.plan.techniques) or any(
            True for _ in self.build.lasting_buffers()
        ):
            self._before_action("update")  # what a forward or backward pass changes cannot wait for the update

    def _before_action(self, kind: str) -> None:
        if kind == "update" and self.copied is not None:
            torch.cuda.current_stream(self.mesh.device).wait_event(self.copied)

    def _run(self, action: Callable[[], Any]) -> None:
        copied = self.copied

        def work() -> None:
            if copied is not None:
                copied.synchronize()
            start = time.monotonic()
            self.answer = _attempt(action)
            self.seconds += time.monotonic() - start

        self.thread = threading.Thread(target=work, name="checkpoint", daemon=True)
        self.thread.start()

    def advance(self, *, waits: bool = False) -> str | None:
        """By all ranks at once, when no thread was busy or to wait for them: go on with the next part. None, or when
        it is over "" or why it could not be written."""
        mesh = self.mesh
        if self.thread is not None and (waits or not self.is_committing):
            self.thread.join()
        if not self.is_committing:
            entries = gather_json(mesh.control, self.answer)
            failed = [entry["error"] for entry in entries if "error" in entry]
            if not failed:
                self.is_committing, parts = True, [entry["value"] for entry in entries]
                if mesh.rank == 0:
                    self._run(lambda: self.commit(parts))
                return None
            if mesh.rank == 0 and isinstance(self.folder, Path):
                discard(self.folder)  # gives its space back
            done = {"error": failed[0]}
        else:  # where steps overlap, "not busy" may have been said before the commit began
            done = share_json(mesh.control, {"busy": True} if self.is_busy else self.answer)
            if "busy" in done:
                return None
        self.folder, self.thread, self.is_committing, self.copied = None, None, False, None
        return str(done.get("error", ""))

    def finish(self) -> str:
        """Wait until it is over: "" or why it could not be written."""
        reason: str | None = None
        while self.is_under_way and reason is None:
            reason = self.advance(waits=True)
        return reason or ""


def _attempt(action: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"value": action()}
    except Exception as error:  # told to all ranks; a checkpoint that fails does not end training
        return {"error": str(error) or type(error).__name__}


def source_of(reader: Reader, first: Source, buffers: Collection[str]) -> Source:
    """Parameters from a checkpoint, buffers as they first are (`restore_buffers` comes after)."""
    known = set(reader.tensor_names())

    def read(name: str, box: Box, dtype: torch.dtype) -> Tensor:
        key = f"parameter.{name}"
        if key not in known and not box.is_empty and name in buffers:
            return first(name, box, dtype)
        entry = reader.manifest.tensors.get(key)
        # Weights of a run that stored them in 16 bits, or in 32: a plan may change that, and nothing else.
        is_other_width = entry is not None and {entry.dtype, str(dtype)[6:]} == {"float32", "bfloat16"}
        out = torch.empty(box.size, dtype=getattr(torch, entry.dtype) if entry and is_other_width else dtype)
        if not box.is_empty:
            reader.read_into(key, box, out)
        return out.to(dtype)

    return read


@torch.no_grad()
def restore_parameters(reader: Reader, build: RankBuild, optimizer: Optimizer) -> None:
    """In place: those of a model that has been trained on since."""
    read = source_of(reader, build.source, ())
    for name, value in build.local_parameters():
        for _, box, part in as_it_lies(name, build.boxes[name], value):
            part.copy_(read(name, box, value.dtype))
        if name in build.evaluated:
            build.evaluated[name].copy_(value)
    optimizer.reload()


def restore_buffers(reader: Reader, build: RankBuild) -> None:
    for name, value in build.lasting_buffers():
        if f"buffer.{name}" in reader.tensor_names():
            staged = torch.empty(value.shape, dtype=value.dtype)
            reader.read_into(f"buffer.{name}", Box.whole(tuple(value.shape)), staged)
            value.copy_(staged)


def restore_optimizer(reader: Reader, build: RankBuild, optimizer: Optimizer) -> None:
    def read(kind: str, state: OptimizerState) -> None:
        for _, each, part in as_it_lies(state.name, state.box, state.value):
            staged = torch.empty(each.size, dtype=state.value.dtype)
            reader.read_into(f"optimizer.{kind}.{state.name}", each, staged)
            part.copy_(staged)

    known = set(reader.tensor_names())
    for state in optimizer.rule.kept():
        if not state.box.is_empty:
            # An island that is new goes on with what the first one remembers.
            own = optimizer.kind_here(state.kind)
            read(own if f"optimizer.{own}.{state.name}" in known else state.kind, state)
            optimizer.rule.restore(state)
    exchanged = [state for exchange in build.exchanges for state in exchange.kept() if not state.box.is_empty]
    for state in exchanged:
        if f"optimizer.{state.kind}.{state.name}" in known:
            read(state.kind, state)
    if exchanged:
        optimizer.reload()
    optimizer.set_num_steps(reader.step)
