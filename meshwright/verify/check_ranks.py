"""What the pool's ranks do for `mw check`: the reference on one, the comparison on all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from dataclasses import replace
from math import isclose
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open

from meshwright.core.codec import decode
from meshwright.core.plan import Plan
from meshwright.data.dataset import part_rows
from meshwright.ops.collectives import gather_json
from meshwright.ops.model_interface import Inputs, map_inputs, split_inputs
from meshwright.ops.traffic import Traffic
from meshwright.run.model import open_model
from meshwright.run.prepare import open_data
from meshwright.run.run_file import OptimizerConfig
from meshwright.runtime.build import Build
from meshwright.runtime.loop import Samples
from meshwright.simulator.pricing import price
from meshwright.verify import parity, reference
from meshwright.verify.check import CheckedRun
from meshwright.verify.reference_model import plain_model, without_dropout


def _samples(run: CheckedRun, dtype: str) -> parity.SamplesOf:
    all_trained = replace(run.config, data=replace(run.config.data, held_out_fraction=0.0))
    data = open_data(all_trained, run.description, Path(run.folder) / "tokens")
    batch = run.plan.batch

    def put(array: Any) -> torch.Tensor:
        tensor = torch.from_numpy(array)
        return tensor.to(parity.DTYPES[dtype]) if tensor.is_floating_point() else tensor

    def samples(step: int, part: int, num_parts: int) -> Samples:
        rows = data.batch(step * batch, batch, part, num_parts)
        return Samples(
            inputs=tuple(map(put, rows.inputs)) if isinstance(rows.inputs, tuple) else put(rows.inputs),
            targets=put(rows.targets),
            weights=put(rows.weights),
            num_tokens=rows.num_tokens,
        )

    return samples


def _drawing(answer: Mapping[str, Any]) -> Any:
    """The mode for a model that draws random numbers also without its dropout modules, if numbers may not differ."""
    return reference.MeanDraws() if answer["draws_means"] else nullcontext()


def reference_job(
    *, rank: int, num_ranks: int, rendezvous: str, run: Any, keeps_dropout: bool, rounds: bool
) -> dict[str, Any]:
    """The independent reference, and two controls of it: other microbatches, and bf16.

    Answers whether the model `is_random`, how the ranks are to run it (`dropout`, `draws_means`), how far one device
    departs from itself (`spread`, and `noise` of a gradient's elements), and what bf16 costs one device.
    """
    checked = decode(CheckedRun, run, "")
    try:
        return _referred(checked, keeps_dropout, rounds)
    except Exception:  # what is wrong with a module, our own loop says in better words
        whole = Plan(batch=checked.plan.batch, microbatch=checked.plan.batch)
        session = _session(checked, whole, "float64", "off")
        session.loop.step(_samples(checked, "float64")(0, 0, 1), 0.0)
        raise


def _session(run: CheckedRun, plan: Plan, dtype: str, dropout: str) -> parity.Session:
    """The run's model under a plan; its running statistics in the dtype of the comparison."""
    opened = open_model(run.description, run.config.train.seed)
    if dropout == "off":
        without_dropout(opened.model)
    for module in opened.model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and name not in module._non_persistent_buffers_set:
                module._buffers[name] = buffer.to(parity.DTYPES[dtype])
    return parity.open_session(plan, opened, run.config.train.optimizer, dtype=dtype, device=torch.device("cpu"))


def _referred(run: CheckedRun, keeps_dropout: bool, rounds: bool) -> dict[str, Any]:
    plan, folder, steps = run.plan, Path(run.folder) / "reference", run.steps
    plain, batch_of = _plain(run, torch.float64), _batches(run, "float64")
    first = split_inputs(batch_of(0)[0], plan.microbatch)[0]
    answer: dict[str, Any] = {"is_random": reference.draws(plain, first), "dropout": "on", "draws_means": False}
    # Batch norms see the whole batch at once; ranks that draw for their own rows cannot be one device then.
    sees_batch = "samples" in run.description.profile.uncut
    keeps = keeps_dropout and answer["is_random"] and not (sees_batch and plan.num_replicas > 1)
    quiet = plain
    if answer["is_random"]:
        quiet = _plain(run, torch.float64, dropout=False)
        answer["draws_means"] = reference.draws(quiet, first) and not keeps
        answer["dropout"] = "on" if keeps else "off"
    with reference.MeanDraws() if answer["is_random"] else nullcontext():
        answer |= _spread(quiet, batch_of(0), plan, sees_batch)
    size = plan.batch if sees_batch else plan.microbatch
    settings: dict[str, Any] = {"microbatch": size, "noise": max(1e-15, 10 * answer["noise"])}
    settings["update_tolerance"] = answer["update_tolerance"] = min(
        1e-2, max(reference.UPDATE_TOLERANCE, 1e4 * answer["noise"])
    )
    optimizer, parts = run.config.train.optimizer, plan.num_replicas
    if keeps:
        rows = [part_rows(plan.batch, part, parts, plan.shares) for part in range(parts)]
        parity.write_plain(
            folder, plain, batch_of, optimizer, steps, **settings, parts=rows, seed=run.config.train.seed
        )
    else:
        with _drawing(answer):
            losses = parity.write_plain(folder, quiet, batch_of, optimizer, steps, **settings)
            if rounds:
                answer["rounded"] = _rounded_control(run, folder, losses, size)
    total = run.config.train.steps
    sampled = sorted({*range(min(total, 200)), *range(0, total, max(1, total // 1000)), total - 1})
    wrong = [s for s in sampled if not isclose(optimizer.lr_at(s, total), reference.learning_rate(optimizer, s, total))]
    answer["wrong_rates"] = wrong[:1]
    return answer


def _plain(run: CheckedRun, dtype: torch.dtype, dropout: bool = True) -> reference.Plain:
    return plain_model(run.description, seed=run.config.train.seed, dtype=dtype, dropout=dropout)


def _batches(run: CheckedRun, dtype: str) -> reference.BatchOf:
    samples = _samples(run, dtype)

    def batch_of(step: int) -> tuple[Inputs, torch.Tensor, torch.Tensor]:
        given = samples(step, 0, 1)
        return given.inputs, given.targets, given.weights

    return batch_of


def _spread(plain: reference.Plain, batch: Any, plan: Plan, sees_batch: bool) -> dict[str, float]:
    """How far one device departs from itself in the first gradient: with the samples in another order and in other
    microbatches, and without the module's own casts to float32."""
    saved = {name: each.clone() for name, each in plain.buffers.items()}
    rows = plan.batch if sees_batch else plan.microbatch
    other_rows = plan.batch if sees_batch or rows < plan.batch else max(1, plan.batch // 2)
    inputs, targets, weights = batch
    flipped = map_inputs(inputs, lambda tensor: tensor.flip(0)), targets.flip(0), weights.flip(0)
    loss, gradients = reference.gradient(plain, batch, rows)
    others = [reference.gradient(plain, flipped, other_rows)]
    with suppress(RuntimeError), reference.WideCasts():  # a module may insist on float32
        others.append(reference.gradient(plain, batch, rows))
    for name, each in plain.buffers.items():
        each.copy_(saved[name])
    norm = sum(float(g.square().sum()) for g in gradients.values()) ** 0.5
    size = max((float(g.abs().max()) for g in gradients.values() if g.numel()), default=0.0)
    largest = spread = 0.0
    for other_loss, result in others:
        largest = max([largest, *(float((g - result[n]).abs().max()) for n, g in gradients.items() if g.numel())])
        spread = max(spread, largest / (norm or 1.0), abs(loss - other_loss) / (abs(loss) or 1.0))
    return {"spread": spread, "noise": largest / (size or 1.0)}


def _rounded_control(run: CheckedRun, folder: Path, losses: list[float], size: int) -> dict[str, Any]:
    """What bf16 by torch's autocast costs one device: of the losses, and of the first gradient."""
    plain, batch_of = _plain(run, torch.float32, dropout=False), _batches(run, "float32")
    found, sums = [], (0.0, 1.0, 1.0)
    settings: dict[str, Any] = {"steps": len(losses), "microbatch": size, "cast": torch.bfloat16}
    for result in reference.train(plain, batch_of, run.config.train.optimizer, **settings):
        found.append(result.loss)
        if result.step == 0:
            with safe_open(folder / "step-0.safetensors", framework="pt") as written:
                wanted = {n: written.get_tensor(f"gradient/{n}") for n in result.gradients}
            sums = parity.gradient_sums(result.gradients, wanted)
    return {"sums": sums, "losses": found, "exact": losses}


def parity_job(
    *, rank: int, num_ranks: int, rendezvous: str, run: Any, tolerance: float, answer: dict[str, Any], rounds: bool
) -> dict[str, Any]:
    """This rank of the plan against the reference, as the reference's `answer` says; then what it sends and holds."""
    checked, dtype = decode(CheckedRun, run, ""), "float32" if rounds else "float64"
    samples, folder, steps = _samples(checked, dtype), Path(checked.folder) / "reference", checked.steps
    optimizer, seed = checked.config.train.optimizer, checked.config.train.seed
    if checked.plan.mesh:
        parity.enter(rank, num_ranks, rendezvous)
    session = _session(checked, checked.plan, dtype, answer["dropout"])
    result: dict[str, Any] = {"worst": 0.0, "losses": [], "sums": (0.0, 0.0, 0.0)}
    with _drawing(answer):
        if not rounds:
            limits: dict[str, Any] = {"tolerance": tolerance, "update_tolerance": answer["update_tolerance"]}
            limits["seed"] = seed if answer["is_random"] and answer["dropout"] == "on" else None
            result["worst"], departures = parity.compare(session, folder, samples, steps, optimizer, **limits)
        else:
            rounded = parity.compare_rounded(session, folder, samples, steps, optimizer)
            departures = rounded.departures
            result |= {"losses": rounded.losses, "sums": rounded.sums}
        traffic, sizes = parity.observe(session, samples, optimizer)
    priced, at_most, priced_sizes = promised(session.build, sequence=checked.config.sequence, optimizer=optimizer)
    # Price speaks of the rank with the largest pieces: where rows do not divide evenly, others send and hold less.
    mesh, wire = session.mesh, session.build.wire
    pieces = {name: piece.nbytes for name, piece in session.build.local_parameters()}
    all_pieces = gather_json(mesh.control, pieces)
    missing = sum(max(each.get(name, 0) for each in all_pieces) - size for name, size in pieces.items())
    missing *= max(mesh.sizes.values(), default=1)
    lines = differences(lengthened(rounded_up(traffic, priced, at_most), priced, missing), priced)
    cutting = {axis for axes in session.build.cut_axes.values() for axis in axes}
    cutting -= {wire.axis} if wire is not None else set()
    if all(mesh.index(axis) == 0 for axis in cutting):
        lines += [
            f"{name}: {sizes[name]:,} bytes held, {priced_sizes[name]:,} priced"
            for name in sizes
            if sizes[name] != priced_sizes[name]
        ]
    if checked.plan.mesh:
        parity.leave()
    found = [{**vars(departure), "order": i} for i, departure in enumerate(departures)]
    return result | {"departures": found, "traffic": lines, "num_messages": sum(traffic.values())}


Message = tuple[str, str, int]


def promised(
    build: Build, *, sequence: int, optimizer: OptimizerConfig
) -> tuple[Traffic, set[Message], dict[str, int]]:
    """Messages that `price` promises this rank, which of them may be shorter, and resident bytes."""
    plan, mesh, wire = build.plan, build.mesh, build.wire
    work = price(
        build.profile,
        plan,
        sequence=sequence,
        stage=mesh.index(wire.axis) if wire is not None else 0,
        optimizer=optimizer,
        element_bytes=build.dtype.itemsize,
    )
    num_microbatches = plan.microbatches_of(mesh.part(plan.sample_axes)[0])
    traffic: Traffic = Counter()
    at_most: set[Message] = set()
    for task in work.collectives:
        count = int(task.repeat) * (1 if task.per_step else num_microbatches)
        assert float(task.bytes).is_integer(), f"{task} has a part of a byte"
        if task.algorithm is not None:
            for sent in task.algorithm.sent_bytes(mesh.size(task.axis), mesh.index(task.axis), int(task.bytes)):
                traffic["send", task.axis, sent] += count
        elif count:
            message = (task.kind, task.where, int(task.bytes))
            traffic[message] += count
            at_most |= {message} if task.at_most else set()
    sizes: dict[str, int] = {"parameters": 0, "gradients": 0, "optimizer": 0}
    for item in work.residents:
        if item.category in sizes and not (item.category == "gradients" and work.facts.frees_gradients):
            sizes[item.category] += int(item.repeat * item.bytes)
    return traffic, at_most, sizes


def rounded_up(seen: Traffic, priced: Traffic, at_most: set[Message]) -> Traffic:
    """What was seen, a message shorter than a promise of "at most" as that promise."""
    settled: Traffic = Counter()
    for message, count in seen.items():
        kind, axis, size = message
        bounds = [bound for bound in at_most if bound[:2] == (kind, axis) and bound[2] >= size]
        settled[message if message in priced or not bounds else min(bounds)] += count
    return settled


def lengthened(seen: Traffic, priced: Traffic, missing: int) -> Traffic:
    """What was seen, a message that is shorter than a priced one by `missing` bytes at most as that one."""
    settled, unsent = seen.copy(), priced - seen
    for (kind, axis, size), count in (seen - priced).items():
        for longer in sorted(unsent):
            if longer[:2] == (kind, axis) and size < longer[2] <= size + missing:
                moved = min(count, unsent[longer])
                settled[kind, axis, size] -= moved
                settled[longer] += moved
                unsent[longer] -= moved
                count -= moved
    return +settled


def differences(seen: Traffic, priced: Traffic) -> list[str]:
    return [
        f"{n} x {kind} of {size:,} bytes on {axis} {what}"
        for what, left in (("not priced", seen - priced), ("priced and not sent", priced - seen))
        for (kind, axis, size), n in left.items()
    ]
