"""What a rank holds at the moment when it runs out of memory, by category."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from meshwright.core.codec import encode
from meshwright.core.errors import MeshwrightError
from meshwright.ops.fsdp import local
from meshwright.ops.memory_cap import asked_bytes
from meshwright.run.out_of_memory import CATEGORIES, MemoryFailure
from meshwright.runtime.run_record import current_bytes
from meshwright.runtime.trainer import Trainer

_WORDS = ("can't allocate memory", "not enough memory", "out of memory", "bad_alloc")
"""Of errors that torch raises as plain RuntimeErrors."""


def is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, MeshwrightError):
        return any(problem.where == "train.memory_cap" for problem in error.problems)
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in _WORDS)


def out_of_memory(
    error: BaseException, rank: int, num_ranks: int, device: torch.device, own_bytes: int, trainer: Trainer | None
) -> MeshwrightError:
    """The error to raise in its place. `own_bytes`: of the process, before it had a model; `trainer`: None where the
    model was being made."""
    action, step, stage = "start", 0, 0
    if trainer is not None:
        loop, step, stage = trainer.loop, trainer.step + 1, trainer.build.stage
        is_training = loop.batch is None or loop.batch.trains
        action = str(loop.action) if is_training and loop.action is not None else "evaluation"
    failure = MemoryFailure(
        rank=rank,
        num_ranks=num_ranks,
        stage=stage,
        step=step,
        action=action,
        asked_bytes=asked_bytes(str(error)),
        held_bytes=held_bytes(error, device, own_bytes, trainer),
    )
    # A cap that is too small says itself what a step needs.
    what = error.problems if isinstance(error, MeshwrightError) else failure.sentence()
    result = MeshwrightError(what, exit_code=1)
    result.facts = {"out_of_memory": encode(failure)}
    return result


def held_bytes(
    error: BaseException, device: torch.device, own_bytes: int, trainer: Trainer | None = None
) -> dict[str, int]:
    """Bytes by category. On a CPU all that the process holds, on a GPU all that is taken of the device.

    Activations are what autograd has saved for backward passes that are still to come, also of the forward that failed:
    what it had made so far lives as long as the error's traceback.
    """
    seen: set[int] = set()

    def count(tensors: Iterable[Tensor]) -> int:
        total = 0
        for tensor in tensors:
            storage = tensor.untyped_storage()
            if tensor.device.type == device.type and storage._cdata not in seen:
                seen.add(storage._cdata)
                total += storage.nbytes()
        return total

    held = dict.fromkeys(CATEGORIES, 0)
    if trainer is not None:
        build, optimizer, loop = trainer.build, trainer.optimizer, trainer.loop
        own = [local(parameter) for parameter in build.model.parameters()]
        held["parameters"] = count((*own, *(value for _, value in build.local_parameters())))
        pieces = [piece.value.grad for piece in optimizer.pieces if piece.value.grad is not None]
        held["gradients"] = count((*pieces, *(value for _, value in build.local_gradients())))
        held["optimizer"] = count(value for _, _, value, _ in optimizer.state())
        held["other"] = count(build.model.buffers())
        roots, traceback = tree_leaves((loop.outputs, loop.received, loop.gradients)), error.__traceback__
        while traceback is not None:  # what the functions that failed had in their variables
            roots += tree_leaves(list(traceback.tb_frame.f_locals.values()))
            traceback = traceback.tb_next
        graph = [each for each in roots if isinstance(each, Tensor) and each.grad_fn is not None]
        held["activations"] = count(saved_by(graph))
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        everything, allocated = total - free, torch.cuda.memory_allocated(device)
    else:
        everything = current_bytes(device)
        allocated = everything - own_bytes
    held["temporary"] = max(0, allocated - sum(held.values()))
    held["other"] += max(0, everything - sum(held.values()))
    return held


def saved_by(outputs: Iterable[Tensor]) -> Iterator[Tensor]:
    """Tensors that autograd keeps for the backward of these; what hooks keep elsewhere is not looked into."""
    waiting, seen = [each.grad_fn for each in outputs], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        waiting += [before for before, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_raw_saved"):
                with contextlib.suppress(RuntimeError):  # backward has freed it
                    saved = [getattr(each, "data", None) for each in tree_leaves(getattr(node, name))]
                    yield from (each for each in tree_leaves(saved) if isinstance(each, Tensor))
