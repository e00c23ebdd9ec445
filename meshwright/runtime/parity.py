"""Proof that a plan trains the model exactly as one device would, or where it departs first.

The reference runs once, on one device, and leaves its losses, gradients and parameters in a folder; every rank of the
plan compares its own pieces with their places there. Nothing but a few numbers travels between processes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.plan import Plan
from meshwright.data.batch import part_rows
from meshwright.ops.init import join_in_order
from meshwright.ops.mesh import Mesh, join
from meshwright.ops.record import Recorder, Traffic
from meshwright.ops.shard import local
from meshwright.runtime.build import Build, build
from meshwright.runtime.loop import Loop, Samples
from meshwright.runtime.model import Opened
from meshwright.runtime.optimizer import Optimizer, OptimizerConfig
from meshwright.runtime.stream import loop_of

DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Where a plan and one device differ, and by how much of the quantity's global norm."""

    step: int
    quantity: str
    layer: str
    error: float


@dataclass(kw_only=True)
class Session:
    """One rank's model, ready to step."""

    build: Build
    loop: Loop
    mesh: Mesh


def open_session(
    plan: Plan,
    opened: Opened,
    optimizer: OptimizerConfig,
    *,
    dtype: str,
    device: torch.device,
) -> Session:
    mesh = Mesh.make(plan.mesh, device)
    made = build(plan, opened.model, opened.profile, mesh, opened.source, DTYPES[dtype])
    return Session(build=made, loop=loop_of(made, Optimizer(optimizer, made)), mesh=mesh)


SamplesOf = Callable[[int, int, int], Samples]
"""(step, part, num_parts) -> those rows of the step's batch."""


def own_samples(session: Session, samples: SamplesOf, step: int) -> Samples:
    """This rank's rows of a step's batch."""
    plan = session.build.plan
    part, num_parts = session.mesh.part(plan.sample_axes)
    if not plan.shares:
        return samples(step, part, num_parts)
    return samples(step, 0, 1).rows(part_rows(plan.batch, part, num_parts, plan.shares))


def random_samples(vocab_size: int, batch: int, sequence: int, *, masked: bool = True) -> SamplesOf:
    def samples(step: int, part: int, num_parts: int) -> Samples:
        generator = torch.Generator().manual_seed(1000 + step)
        tokens = torch.randint(vocab_size, (batch, sequence + 1), generator=generator)
        weights = torch.ones(batch, sequence, dtype=torch.float64)
        if masked:
            weights = (torch.rand(batch, sequence, generator=generator) > 0.2).double()
        rows = part_rows(batch, part, num_parts)
        inputs, targets = tokens[rows, :-1].contiguous(), tokens[rows, 1:].contiguous()
        total = float(weights.sum())
        return Samples(inputs=inputs, targets=targets, weights=weights[rows], num_tokens=total)

    return samples


def write_reference(
    folder: Path, opened: Opened, optimizer: OptimizerConfig, samples: SamplesOf, steps: int, *,
    dtype: str = "float64", batch: int, plan: Plan | None = None,
) -> None:  # fmt: skip
    """What one device does, step by step; as a plan without axes says, where one is given."""
    plan = plan or Plan(batch=batch, microbatch=batch)
    session = open_session(plan, opened, optimizer, dtype=dtype, device=torch.device("cpu"))
    folder.mkdir(parents=True, exist_ok=True)
    for step, result, gradients in _steps(session, samples, steps, optimizer):
        tensors = {f"gradient/{name}": value for name, value in gradients.items()}
        tensors |= {f"parameter/{name}": value.clone() for name, value in session.build.local_parameters()}
        tensors["loss"] = torch.tensor([result.loss], dtype=torch.float64)
        tensors["norm"] = torch.tensor([result.gradient_norm], dtype=torch.float64)
        temporary = folder / f"step-{step}.tmp"
        save_file(tensors, temporary)
        temporary.rename(folder / f"step-{step}.safetensors")


def _steps(
    session: Session, samples: SamplesOf, steps: int, optimizer: OptimizerConfig
) -> Iterator[tuple[int, Any, dict[str, Tensor]]]:
    """Steps, with the gradients as they were before clipping."""
    caught: dict[str, Tensor] = {}
    inner = session.loop.optimizer.update

    def update(lr: float, norm: float) -> None:
        caught.clear()
        caught.update({name: value.clone() for name, value in session.build.local_gradients()})
        inner(lr, norm)

    session.loop.optimizer.update = update
    for step in range(steps):
        result = session.loop.step(own_samples(session, samples, step), optimizer.lr_at(step, steps))
        yield step, result, caught


def compare(
    session: Session,
    folder: Path,
    samples: SamplesOf,
    steps: int,
    optimizer: OptimizerConfig,
    tolerance: float,
) -> tuple[float, list[Departure]]:
    """Largest relative error of this rank, and its departures beyond the tolerance in the order they arose."""
    worst, departures = 0.0, []
    for step, result, gradients in _steps(session, samples, steps, optimizer):
        with safe_open(folder / f"step-{step}.safetensors", framework="pt") as reference:
            loss, norm = float(reference.get_tensor("loss")), float(reference.get_tensor("norm"))
            errors = [("loss", "loss", _relative(result.loss, loss))]
            for quantity, pieces in (
                ("gradient", gradients),
                ("parameter", dict(session.build.local_parameters())),
            ):
                errors += _errors(session.build, reference, quantity, pieces)
            errors.append(("gradient norm", "all", _relative(result.gradient_norm, norm)))
        for quantity, name, error in errors:
            worst = max(worst, error)
            if not error <= tolerance:  # also true of NaN
                departures.append(Departure(step=step, quantity=quantity, layer=name, error=error))
    return worst, departures


def _relative(value: float, expected: float) -> float:
    """The error; relative, but where nothing is expected (a batch without targets)."""
    return abs(value - expected) / (abs(expected) or 1.0)


def _errors(build: Build, reference: Any, quantity: str, pieces: dict[str, Tensor]) -> list[tuple[str, str, float]]:
    names = [key for key in reference.keys() if key.startswith(f"{quantity}/")]  # noqa: SIM118
    norm = sum(float(reference.get_tensor(key).double().norm()) ** 2 for key in names) ** 0.5
    errors = []
    for name, box in build.boxes.items():
        piece, key = pieces.get(name), f"{quantity}/{name}"
        if box.is_empty or (piece is None and key not in names):
            continue
        # A parameter that took no part in a step has no gradient on one device, and zeros where ranks sum theirs.
        wanted = box_of(reference, key, box) if key in names else torch.zeros(())
        distance = wanted if piece is None else piece - wanted
        errors.append((quantity, name, float(distance.abs().max()) / (norm or 1.0)))
    return errors


def box_of(reference: Any, key: str, box: Box) -> Tensor:
    """A piece of a tensor of the reference."""
    whole = reference.get_tensor(key)
    return join_in_order(box, [whole[each.slices] for each in box.in_order()])


def compare_rounded(
    session: Session, folder: Path, samples: SamplesOf, optimizer: OptimizerConfig, tolerance: float
) -> tuple[float, list[Departure]]:
    """The first step of a plan in fewer bits: its loss, and the whole gradient of this rank by its L2 distance.

    Later steps are not compared: rounding changes the path. An element's error over the global norm would say nothing
    here (a gradient of zeros is within 5 % by it); the distance between whole gradients does.
    """
    step, result, gradients = next(_steps(session, samples, 1, optimizer))
    distance = norm = 0.0
    with safe_open(folder / f"step-{step}.safetensors", framework="pt") as reference:
        loss, names = float(reference.get_tensor("loss")), set(reference.keys())
        for name, piece in gradients.items():
            box = session.build.boxes[name]
            if not box.is_empty:
                key = f"gradient/{name}"
                wanted = box_of(reference, key, box).double() if key in names else torch.zeros_like(piece)
                distance += float((piece.double() - wanted).norm()) ** 2
                norm += float(wanted.norm()) ** 2
    errors = {"loss": _relative(result.loss, loss), "gradient": (distance / norm) ** 0.5 if norm else 0.0}
    found = [
        Departure(step=step, quantity=quantity, layer="all", error=error)
        for quantity, error in errors.items()
        if not error <= tolerance
    ]
    return max(errors.values()), found


def observe(session: Session, samples: SamplesOf, optimizer: OptimizerConfig) -> tuple[Traffic, dict[str, int]]:
    """One steady step's traffic, and the bytes of parameters, gradients and optimizer afterwards."""
    session.loop.feed(own_samples(session, samples, 0), optimizer.lr)  # what is lazy happens here
    with Recorder(session.mesh.axis_of_group()) as recorder:
        session.loop.feed(own_samples(session, samples, 1), optimizer.lr)
    session.loop.flush()
    sizes = {
        "parameters": sum(_bytes(value) for _, value in session.build.local_parameters()),
        # A parameter that took no part in this step may in the next: price counts its gradient.
        "gradients": sum(_bytes(local(p if p.grad is None else p.grad)) for p in session.loop.optimizer.parameters),
        "optimizer": sum(_bytes(value) for _, _, value, _ in session.loop.optimizer.state()),
    }
    return recorder.evened(session.mesh), sizes


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def enter(rank: int, num_ranks: int, rendezvous: str) -> None:
    join(rank, num_ranks, torch.device("cpu"), rendezvous=rendezvous, timeout_seconds=60)


def leave() -> None:
    gc.collect()
    dist.destroy_process_group()
