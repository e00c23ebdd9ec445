"""What ranks of the pool run: a plan against one device, and what it sends against what `price` promised."""

from __future__ import annotations

import json
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from meshwright.core.codec import decode, encode
from meshwright.core.plan import Plan
from meshwright.data.dataset import part_rows
from meshwright.models.presets import DecoderConfig
from meshwright.ops.saved_tensors import moved_bytes
from meshwright.ops.staged_collectives import StagedWork, stage
from meshwright.optimizers.update import OptimizerConfig
from meshwright.run.model import ModelDescription, OpenedModel, describe, open_config, open_model
from meshwright.run.run_file import ModelSection
from meshwright.runtime.loop import Samples
from meshwright.runtime.rank import device_of
from meshwright.simulator.pricing import price
from meshwright.verify import parity
from meshwright.verify.check_ranks import promised
from meshwright.verify.reference_model import plain_model, plain_of

CPU = torch.device("cpu")


def reference_job(
    *, config: dict[str, Any], optimizer: dict[str, Any], batch: int, sequence: int, steps: int, dtype: str,
    folder: str, techniques: list[dict[str, Any]] | None = None, rank: int, num_ranks: int, rendezvous: str,
) -> None:  # fmt: skip
    """One device in plain torch; in our own loop with techniques that own no axis, where they are given."""
    rates = decode(OptimizerConfig, optimizer, "optimizer")
    opened, samples = open_tiny(config, batch, sequence, dtype)
    if not techniques and dtype == "float64":
        if "section" in config:
            section = decode(ModelSection, config["section"], "model")
            plain = plain_model(describe(section, sequence), seed=0, dtype=torch.float64)
        else:
            plain = plain_of(opened, sequence=sequence, dtype=torch.float64)

        def batch_of(step: int) -> Any:
            given = samples(step, 0, 1)
            return given.inputs, given.targets, given.weights

        parity.write_plain(Path(folder), plain, batch_of, rates, steps, microbatch=batch)
        return
    plan = {"techniques": techniques or [], "batch": batch, "microbatch": batch}
    session = parity.open_session(Plan.from_json(json.dumps(plan)), opened, rates, dtype=dtype, device=CPU)
    for step, result, gradients in parity.steps_of(session, samples, steps, rates):
        tensors = {f"gradient/{name}": value for name, value in gradients.items()}
        tensors |= {f"parameter/{name}": value.clone() for name, value in session.build.local_parameters()}
        parity.write_step(Path(folder), step, tensors, loss=result.loss, norm=result.gradient_norm)


def open_tiny(config: dict[str, Any], batch: int, sequence: int, dtype: str) -> tuple[OpenedModel, parity.SamplesOf]:
    """A decoder by its dimensions, or any model by `section`; with random samples of the kind it takes."""
    if "section" not in config:
        shape = decode(DecoderConfig, config, "config")
        return open_config(shape, "tiny", 0), parity.random_samples(shape.vocab_size, batch, sequence)
    section = decode(ModelSection, config["section"], "model")
    # As it travels from `mw train` to its ranks.
    told = json.loads(json.dumps(encode(describe(section, sequence))))
    opened = open_model(decode(ModelDescription, told, "description"), 0)
    if "vocab" in config:
        return opened, parity.random_samples(config["vocab"], batch, sequence)
    shapes = [(tuple(shape), kind) for shape, kind in config["inputs"]]

    def samples(step: int, part: int, num_parts: int) -> Samples:
        generator = torch.Generator().manual_seed(1000 + step)
        rows = part_rows(batch, part, num_parts)
        inputs = tuple(_drawn((batch, *shape), kind, generator, dtype)[rows] for shape, kind in shapes)
        targets = _drawn((batch,), config["targets"], generator, dtype)[rows]
        weights = torch.rand(batch, generator=generator, dtype=torch.float64).round(decimals=2) + 0.5
        return Samples(
            inputs=inputs if len(inputs) > 1 else inputs[0],
            targets=targets,
            weights=weights[rows].to(parity.DTYPES[dtype]),
            num_tokens=float(weights.sum()),
        )

    return opened, samples


def _drawn(shape: tuple[int, ...], kind: int | list[int], generator: torch.Generator, dtype: str) -> torch.Tensor:
    """Numbers below `kind` (a list: of each column), or floats for 0 and coin tosses as floats for -1."""
    if isinstance(kind, list):
        return torch.stack([_drawn(shape[:-1], each, generator, dtype) for each in kind], dim=-1)
    if kind > 0:
        return torch.randint(kind, shape, generator=generator)
    wide = parity.DTYPES[dtype]
    if kind == -1:
        return torch.randint(2, shape, generator=generator).to(wide)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(wide)


def plan_job(
    *, plan: dict[str, Any], config: dict[str, Any], optimizer: dict[str, Any], sequence: int, steps: int,
    reference: str = "", dtype: str = "float64", prices: bool = False, device: str = "cpu", rank: int, num_ranks: int,
    rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """Largest errors by quantity where there is a reference; observed and priced traffic where asked for.

    `device`: "cpu"; "cuda": all ranks share the first GPU (`MESHWRIGHT_ONE_DEVICE=1`); "staged": on the CPU, with
    collectives staged as they are there.
    """
    library = stage.__wrapped__("cpu") if device == "staged" else None
    place = device_of("cuda", rank) if device == "cuda" else CPU
    before = StagedWork.num_made
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    # Users of a newer torch would read it at every start.
    warnings.filterwarnings("error", message=r"`torch\.distributed\..* is deprecated", category=FutureWarning)
    parity.enter(rank, num_ranks, rendezvous, place)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, optimizer, "optimizer")
    answer: dict[str, Any] = {}
    opened, samples = open_tiny(config, chosen.batch, sequence, dtype)
    session = parity.open_session(chosen, opened, rates, dtype=dtype, device=place)
    if reference:
        answer["errors"] = _errors(session, Path(reference), samples, steps, rates)
    if prices:
        moved_bytes.clear()
        answer["observed"], answer["state"] = _observed(session, samples, rates)
        answer["copied"] = {way: moved_bytes[way] / 2 for way in ("out", "in")}  # two steps
        asked = sequence if opened.profile.counts == "tokens" else 1
        traffic, _, answer["priced_state"] = promised(session.build, sequence=asked, optimizer=rates)
        answer["priced_copies"] = _priced_copies(session, asked)
        answer["priced"] = _listed(traffic)
        places = [session.mesh.index(axis) for axis in session.mesh.sizes if axis != "pp"]
        answer["holds_largest"] = not any(places)
    answer["num_graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    answer["num_staged"], answer["num_unwaited"] = StagedWork.num_made - before, len(StagedWork.pending)
    parity.leave()
    if library is not None:
        library._destroy()
    return answer


def _errors(session: Any, reference: Path, samples: Any, steps: int, rates: OptimizerConfig) -> dict[str, Any]:
    # Nothing is within a tolerance below zero, so every error is listed, NaN too.
    _, listed = parity.compare(session, reference, samples, steps, rates, tolerance=-1.0)
    worst: dict[str, tuple[float, str]] = {}
    for each in listed:
        error = each.error if each.error == each.error else 1e300
        for quantity in (each.quantity, *([f"first {each.quantity}"] if each.step == 0 else [])):
            if error >= worst.get(quantity, (-1.0, ""))[0]:
                worst[quantity] = (error, f"step {each.step}, {each.layer}")
    return worst


def _observed(session: Any, samples: Any, rates: OptimizerConfig) -> tuple[list[Any], dict[str, int]]:
    traffic, state = parity.observe(session, samples, rates)
    return _listed(traffic), state


def _priced_copies(session: Any, sequence: int) -> dict[str, float]:
    """Bytes to and from the host in a step."""
    build, totals = session.build, {"out": 0.0, "in": 0.0}
    sizes: dict[str, Any] = {"sequence": sequence, "stage": build.stage, "element_bytes": build.dtype.itemsize}
    for task in price(build.profile, build.plan, **sizes).copies:
        totals["in" if task.is_inward else "out"] += task.repeat * task.bytes * build.plan.num_microbatches
    return totals


def _listed(traffic: Counter[tuple[str, str, int]]) -> list[Any]:
    return sorted([*key, count] for key, count in traffic.items())


def evaluate_job(
    *, plan: dict[str, Any], config: dict[str, Any], optimizer: dict[str, Any], sequence: int, rank: int,
    num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """Evaluation, the next step's loss, and whether one rank's wish to stop is everyone's."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, optimizer, "optimizer")
    opened, samples = open_tiny(config, chosen.batch, sequence, "float64")
    session = parity.open_session(chosen, opened, rates, dtype="float64", device=CPU)
    part = session.mesh.part(chosen.sample_axes)
    batches = [samples(step, *part) for step in (5, 6)]
    before = [value.clone() for _, value in session.build.local_parameters()]
    total, tokens, _ = session.loop.evaluate(batches)
    after = [value for _, value in session.build.local_parameters()]
    untouched = all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    goes_on = session.loop.step(samples(0, *part), 0.0)
    stops = session.loop.step(samples(0, *part), 0.0, stop=rank == num_ranks - 1)
    parity.leave()
    return {
        "total": total,
        "tokens": tokens,
        "untouched": untouched,
        "loss": goes_on.loss,
        "must_stop": [goes_on.must_stop, stops.must_stop],
    }


def overflow_job(
    *, plan: dict[str, Any], config: dict[str, Any], optimizer: dict[str, Any], sequence: int, rank: int,
    num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """Three steps, of which the last rank's gradients overflow in the first and the third."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, optimizer, "optimizer")
    opened, samples = open_tiny(config, chosen.batch, sequence, "float32")
    session = parity.open_session(chosen, opened, rates, dtype="float32", device=CPU)
    part, loop = session.mesh.part(chosen.sample_axes), session.loop
    answer: dict[str, Any] = {"skipped": [], "scales": [], "changed": []}
    for step in range(3):
        before = [*session.build.local_parameters(), *((name, value) for _, name, value, _ in loop.optimizer.state())]
        copies = [value.clone() for _, value in before]
        given = samples(step, *part)
        if step != 1 and rank == num_ranks - 1:
            given = replace(given, weights=given.weights * 1e30)
        result = loop.step(given, rates.lr)
        answer["skipped"].append(result.is_skipped)
        answer["scales"].append(result.loss_scale)
        pairs = zip(before, copies, strict=True)
        answer["changed"].append(any(not torch.equal(value, copy) for (_, value), copy in pairs))
    answer["num_steps"] = loop.optimizer.num_steps
    parity.leave()
    return answer
