"""Proof that a plan trains the model exactly as one device would, or where it departs first.

The independent reference (`reference.py`) runs once, on one device, and leaves its losses, gradients, parameters and
buffers in a folder; every rank of the plan compares its own pieces with their places there. Nothing but a few numbers
travels between processes.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.plan import Plan
from meshwright.data.dataset import part_rows
from meshwright.ops.device_mesh import Mesh, join
from meshwright.ops.fsdp import local
from meshwright.ops.initial_weights import join_in_order
from meshwright.ops.model_interface import map_inputs
from meshwright.ops.traffic import Traffic, TrafficRecorder
from meshwright.optimizers.update import Optimizer, OptimizerConfig
from meshwright.run.model import OpenedModel
from meshwright.runtime.build import RankBuild, build
from meshwright.runtime.loop import Loop, Samples
from meshwright.verify.reference import UPDATE_TOLERANCE, BatchOf, Plain, doubted_update, part_seed, train

EXACT = 1e-9
"""Largest departure of float64 that is rounding: of an element over its quantity's norm."""
REPLAY_TOLERANCE = 1e-3
"""Of the largest update of a parameter, in float32."""
DTYPES = {"float64": torch.float64, "float32": torch.float32}


@dataclass(frozen=True, kw_only=True)
class Departure:
    """Where a plan and one device differ, and by how much of the quantity's global norm."""

    step: int
    quantity: str
    layer: str
    error: float
    tolerance: float = EXACT


@dataclass(kw_only=True)
class Session:
    """One rank's model, ready to step."""

    build: RankBuild
    loop: Loop
    mesh: Mesh


def open_session(
    plan: Plan, opened: OpenedModel, optimizer: OptimizerConfig, *, dtype: str, device: torch.device
) -> Session:
    mesh = Mesh.make(plan.mesh, device)
    made = build(plan, opened.model, opened.profile, mesh, opened.source, DTYPES[dtype])
    return Session(build=made, loop=Loop(made, Optimizer(optimizer, made)), mesh=mesh)


SamplesOf = Callable[[int, int, int], Samples]
"""(step, part, num_parts) -> those rows of the step's batch."""


def own_samples(session: Session, samples: SamplesOf, step: int) -> Samples:
    """This rank's rows of a step's batch."""
    plan = session.build.plan
    part, num_parts = session.mesh.part(plan.sample_axes)
    if plan.shares:
        own = samples(step, 0, 1).rows(part_rows(plan.batch, part, num_parts, plan.shares))
    else:
        own = samples(step, part, num_parts)
    device = session.mesh.device
    inputs = map_inputs(own.inputs, lambda tensor: tensor.to(device))
    return replace(own, inputs=inputs, targets=own.targets.to(device), weights=own.weights.to(device))


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


def write_plain(
    folder: Path, plain: Plain, batch_of: BatchOf, optimizer: OptimizerConfig, steps: int, **settings: Any
) -> list[float]:
    """What the independent reference does, step by step; its losses. `settings` are those of `reference.train`."""
    losses = []
    for result in train(plain, batch_of, optimizer, steps=steps, **settings):
        kinds = {"gradient": result.gradients, "parameter": result.parameters, "buffer": result.buffers}
        kinds["undetermined"] = result.undetermined
        tensors = {f"{kind}/{name}": value for kind, named in kinds.items() for name, value in named.items()}
        write_step(folder, result.step, tensors, loss=result.loss, norm=result.norm, scale=result.update_scale)
        losses.append(result.loss)
    return losses


def write_step(folder: Path, step: int, tensors: dict[str, Tensor], **numbers: float) -> None:
    """What a reference leaves of a step."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors |= {name: torch.tensor([value], dtype=torch.float64) for name, value in numbers.items()}
    temporary = folder / f"step-{step}.tmp"
    save_file(tensors, temporary)
    temporary.rename(folder / f"step-{step}.safetensors")


def steps_of(
    session: Session, samples: SamplesOf, steps: int, optimizer: OptimizerConfig, seed: int | None = None
) -> Iterator[tuple[int, Any, dict[str, Tensor]]]:
    """Steps, with the gradients as they were before clipping. `seed`: of the random numbers of each step."""
    caught: dict[str, Tensor] = {}
    inner = session.loop.optimizer.update

    def update(*given: Any) -> None:
        scaling = session.build.loss_scaling
        scale = 1.0 if scaling is None else scaling.scale
        caught.update({name: value / scale for name, value in session.build.local_gradients()})
        inner(*given)

    session.loop.optimizer.update = update
    session.loop.optimizer.rule.on_gradient.append(lambda name, value: caught.update({name: value.clone()}))
    for step in range(steps):
        caught.clear()
        given = own_samples(session, samples, step)
        if seed is not None:
            torch.manual_seed(part_seed(seed, step, session.mesh.part(session.build.plan.sample_axes)[0]))
        result = session.loop.step(given, optimizer.lr_at(step, steps))
        while result.is_skipped:  # until the loss's scale is low enough
            result = session.loop.step(given, optimizer.lr_at(step, steps))
        yield step, result, caught


def compare(
    session: Session,
    folder: Path,
    samples: SamplesOf,
    steps: int,
    optimizer: OptimizerConfig,
    tolerance: float,
    *,
    update_tolerance: float = UPDATE_TOLERANCE,
    seed: int | None = None,
) -> tuple[float, list[Departure]]:
    """Largest relative error of this rank, and its departures beyond the tolerance in the order they arose.

    Elements whose update a rounding error decides are not compared; they go on with the reference's values. With a
    tolerance above that of float64 all elements do, so that rounding errors do not add up from step to step.
    """
    worst, departures = 0.0, []
    for step, result, gradients in steps_of(session, samples, steps, optimizer, seed):
        with safe_open(folder / f"step-{step}.safetensors", "pt", str(session.mesh.device)) as reference:
            loss, norm = (float(reference.get_tensor(name)) for name in ("loss", "norm"))
            errors = [("loss", "loss", _relative(abs(result.loss - loss), abs(loss)))]
            errors += _tensor_errors(session.build, reference, gradients, forced=tolerance > EXACT)
            session.loop.optimizer.reload()
            errors.append(("gradient norm", "all", _relative(abs(result.gradient_norm - norm), norm)))
        for quantity, name, error in errors:
            limit = update_tolerance if quantity == "update" else tolerance
            worst = worst if quantity == "update" else max(worst, error)
            if not error <= limit:  # also true of NaN
                departures.append(Departure(step=step, quantity=quantity, layer=name, error=error, tolerance=limit))
    return worst, departures


def _relative(difference: float, size: float) -> float:
    """Relative, but where nothing is expected (a batch without targets)."""
    return difference / (size or 1.0)


def box_of(reference: Any, key: str, box: Box) -> Tensor:
    """A piece of a tensor of the reference."""
    whole = reference.get_tensor(key)
    return join_in_order(box, [whole[each.slices] for each in box.in_order()])


def _norm(reference: Any, quantity: str) -> float:
    named = (reference.get_tensor(key) for key in reference.keys() if key.startswith(f"{quantity}/"))  # noqa: SIM118
    return sum(float(each.double().norm()) ** 2 for each in named if each.is_floating_point()) ** 0.5


def _tensor_errors(
    build: RankBuild, reference: Any, gradients: dict[str, Tensor], *, forced: bool
) -> list[tuple[str, str, float]]:
    """(quantity, name, error) of this rank's gradients, parameters and buffers.

    A gradient that is missing, on either side, is zero. Parameters are compared by their norm, and by what the update
    has changed over the largest change of any element. `forced`: they go on with the reference's values.
    """
    names, errors = set(reference.keys()), []
    gradient_norm, parameter_norm = _norm(reference, "gradient"), _norm(reference, "parameter")
    scale = float(reference.get_tensor("scale")) if "scale" in names else 0.0
    pieces = [(name, piece) for name, piece in build.local_parameters() if not build.boxes[name].is_empty]
    for name, parameter in pieces:
        if f"gradient/{name}" in names or name in gradients:
            piece = gradients.get(name, torch.zeros_like(parameter))
            wanted = torch.zeros_like(piece)
            if f"gradient/{name}" in names:
                wanted = box_of(reference, f"gradient/{name}", build.boxes[name])
            errors.append(("gradient", name, _relative(float((piece - wanted).abs().max()), gradient_norm)))
    for name, piece in pieces:
        wanted = box_of(reference, f"parameter/{name}", build.boxes[name])
        difference = (piece - wanted).abs()
        if f"undetermined/{name}" in names:
            unsure = box_of(reference, f"undetermined/{name}", build.boxes[name])
            difference = difference.masked_fill(unsure, 0.0)
            piece[unsure] = wanted[unsure]
        error = float(difference.max())
        errors.append(("parameter", name, _relative(error, parameter_norm)))
        if "scale" in names:
            rounding = 1e-8 * float(wanted.abs().max())  # below it, float64 itself rounds an update away
            errors.append(("update", name, _relative(error, max(scale, rounding))))
        if forced:
            piece.copy_(wanted)
    for name, buffer in build.lasting_buffers():
        if f"buffer/{name}" in names and buffer.numel():
            wanted = reference.get_tensor(f"buffer/{name}")
            size = float(wanted.abs().max())
            errors.append(("buffer", name, _relative(float((buffer.to(wanted.dtype) - wanted).abs().max()), size)))
    return errors


@dataclass(kw_only=True)
class Rounded:
    """One rank of a plan that rounds, over some steps."""

    losses: list[float]
    sums: tuple[float, float, float]
    """First step, summed over this rank's pieces of the gradient: squared distance from the reference, squared norm of
    the reference, and their product."""
    departures: list[Departure]
    """Updates that are not the optimizer's rule applied to this rank's own gradients."""


def compare_rounded(
    session: Session, folder: Path, samples: SamplesOf, steps: int, optimizer: OptimizerConfig
) -> Rounded:
    """A plan in fewer bits: its losses, the first gradient, and whether every update is the rule's, in float32.

    Later gradients are not compared with one device's: rounding changes the path. An update needs no path: it is the
    independent rule of `reference.py`, applied to this rank's own weights and gradients.
    """
    build, boxes = session.build, session.build.boxes
    blocks = tuple(build.model.public_name(f"{part.name}.") for part in build.model.parts() if part.is_block)

    def parameters() -> dict[str, Tensor]:
        """Whole ones, or pieces where a piece is enough."""
        held = [(name, value) for name, value in build.local_parameters() if not boxes[name].is_empty]
        by_pieces = optimizer.kind == "elementwise"
        return {name: value.double() for name, value in held if by_pieces or boxes[name].size == boxes[name].shape}

    losses: list[float] = []
    sums, departures, before = (0.0, 0.0, 0.0), [], parameters()
    states: dict[str, dict[str, Tensor]] = {name: {} for name in before}
    for step, result, gradients in steps_of(session, samples, steps, optimizer):
        losses.append(result.loss)
        if step == 0:
            with safe_open(folder / f"step-{step}.safetensors", "pt", str(session.mesh.device)) as reference:
                wanted = {n: box_of(reference, f"gradient/{n}", boxes[n]) for n in gradients}
            sums = gradient_sums(gradients, wanted)
        rate, clip = optimizer.lr_at(step, steps), optimizer.clip
        factor = clip / result.gradient_norm if clip and result.gradient_norm > clip else 1.0
        is_compared, after = step == 0 or not session.loop.optimizer.rule.rounds_states, parameters()
        for name, w in before.items():
            if name not in gradients:
                continue
            g = gradients[name].double() * factor
            doubts: dict[str, Any] = {"error": 1e-7 * float(g.abs().max()), "in_block": name.startswith(blocks)}
            new, doubt = doubted_update(optimizer, name, w, g, states[name], step + 1, rate, **doubts)
            scale = float((new - w).abs().max())
            difference = (new - after[name]).abs() - 4 * torch.finfo(torch.float32).eps * new.abs()
            difference = difference.masked_fill(doubt > REPLAY_TOLERANCE / 2 * scale, 0.0)
            error = _relative(max(float(difference.max()), 0.0), scale)
            if is_compared and not error <= REPLAY_TOLERANCE:
                found = Departure(step=step, quantity="update", layer=name, error=error, tolerance=REPLAY_TOLERANCE)
                departures.append(found)
        before = after
    return Rounded(losses=losses, sums=sums, departures=departures)


def gradient_sums(gradients: dict[str, Tensor], wanted: dict[str, Tensor]) -> tuple[float, float, float]:
    """Squared distance, squared norm of what is wanted, and their product."""
    distance = norm = product = 0.0
    for name, piece in gradients.items():
        mine, other = piece.double(), wanted[name].double()
        distance += float((mine - other).square().sum())
        norm += float(other.square().sum())
        product += float((mine * other).sum())
    return distance, norm, product


def observe(session: Session, samples: SamplesOf, optimizer: OptimizerConfig) -> tuple[Traffic, dict[str, int]]:
    """One steady step's traffic, and the bytes of parameters, gradients and optimizer afterwards."""
    session.loop.feed(own_samples(session, samples, 0), optimizer.lr)  # what is lazy happens here
    with TrafficRecorder(session.mesh.axis_of_group()) as recorder:
        session.loop.feed(own_samples(session, samples, 1), optimizer.lr)
    session.loop.flush()
    optimizer_here = session.loop.optimizer
    held = zip(optimizer_here.parameters, optimizer_here.pieces, strict=True)
    passing = {name for unit in session.build.host_units if unit.is_streamed for name in unit.names}
    every = session.build.named_parameters()
    lasting = (session.build.wide.get(name, value) for name, value in every if name not in passing)
    sizes = {
        "parameters": sum(local(value.detach()).nbytes for value in lasting),
        # A parameter that took no part in this step may in the next: price counts its gradient.
        "gradients": sum(
            local(p if p.grad is None else p.grad).nbytes
            for p, piece in held
            if piece.name not in optimizer_here.rule.updated and not (p.grad is not None and p.grad.is_sparse)
        ),
        "optimizer": sum(each.nbytes for each in optimizer_here.rule.storage()),
    }
    return recorder.evened(session.mesh), sizes


def enter(rank: int, num_ranks: int, rendezvous: str, device: torch.device | None = None) -> None:
    join(rank, num_ranks, device or torch.device("cpu"), rendezvous=rendezvous, timeout_seconds=60)


def leave() -> None:
    gc.collect()
    dist.destroy_process_group()
