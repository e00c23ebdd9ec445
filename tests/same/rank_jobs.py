"""What ranks of the pool run: a plan against one device, and what it sends against what `price` promised."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from meshwright.core.plan import Plan
from meshwright.models.config import DecoderConfig
from meshwright.models.cost import decoder_profile
from meshwright.runtime import parity
from meshwright.runtime.optimizer import OptimizerConfig
from meshwright.simulate.price import price

CPU = torch.device("cpu")
STATE = ("parameters", "gradients", "optimizer")


def reference_job(
    *, config: dict[str, Any], optimizer: dict[str, Any], batch: int, sequence: int, steps: int, dtype: str,
    folder: str, techniques: list[dict[str, Any]] | None = None, rank: int, num_ranks: int, rendezvous: str,
) -> None:  # fmt: skip
    """One device, with techniques that own no axis where they are given."""
    shape, rates, target = DecoderConfig(**config), OptimizerConfig(**optimizer), Path(folder)
    samples = parity.random_samples(shape, batch, sequence)
    if not techniques:
        parity.write_reference(target, shape, rates, samples, steps, seed=0, dtype=dtype, batch=batch)
        return
    plan = Plan.from_json(json.dumps({"techniques": techniques, "batch": batch, "microbatch": batch}))
    session = parity.open_session(plan, shape, rates, seed=0, dtype=dtype, device=CPU)
    target.mkdir()
    for step, result, gradients in parity._steps(session, samples, steps, rates):
        tensors = {f"gradient/{name}": value for name, value in gradients.items()}
        tensors |= {f"parameter/{name}": value.clone() for name, value in session.build.local_parameters()}
        tensors["loss"] = torch.tensor([result.loss], dtype=torch.float64)
        tensors["norm"] = torch.tensor([result.gradient_norm], dtype=torch.float64)
        save_file(tensors, target / f"step-{step}.safetensors")


def plan_job(
    *, plan: dict[str, Any], config: dict[str, Any], optimizer: dict[str, Any], sequence: int, steps: int,
    reference: str = "", dtype: str = "float64", prices: bool = False, rank: int, num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """Largest errors by quantity where there is a reference; observed and priced traffic where asked for."""
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    parity.enter(rank, num_ranks, rendezvous)
    chosen, shape, rates = (
        Plan.from_json(json.dumps(plan)),
        DecoderConfig(**config),
        OptimizerConfig(**optimizer),
    )
    samples = parity.random_samples(shape, chosen.batch, sequence)
    answer: dict[str, Any] = {}
    if reference:
        session = parity.open_session(chosen, shape, rates, seed=0, dtype=dtype, device=CPU)
        answer["errors"] = _errors(session, Path(reference), samples, steps, rates)
    if prices:
        session = parity.open_session(chosen, shape, rates, seed=0, dtype="float32", device=CPU)
        answer["observed"], answer["state"] = _observed(session, samples, rates)
        stage = session.mesh.index("pp")
        promised = price(
            decoder_profile(shape, "tiny"),
            chosen,
            sequence=sequence,
            stage=stage,
            state_bytes=rates.state_bytes,
        )
        answer["priced"], answer["priced_state"] = _priced(promised, chosen.num_microbatches)
        places = [session.mesh.index(axis) for axis in session.mesh.sizes if axis != "pp"]
        answer["holds_largest"] = not any(places)
    answer["num_graphs"] = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    parity.leave()
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


def _priced(work: Any, num_microbatches: int) -> tuple[list[Any], dict[str, int]]:
    traffic: Counter[tuple[str, str, int]] = Counter()
    for task in work.collectives:
        size = float(task.bytes)
        assert size.is_integer(), f"{task} has a part of a byte"
        count = int(task.repeat) * (1 if task.per_step else num_microbatches)
        if count:
            traffic[task.kind, task.axis, int(size)] += count
    state = dict.fromkeys(STATE, 0)
    for item in work.residents:
        if item.category in state:
            state[item.category] += int(item.repeat * item.bytes)
    return _listed(traffic), state


def _listed(traffic: Counter[tuple[str, str, int]]) -> list[Any]:
    return sorted([*key, count] for key, count in traffic.items())


def evaluate_job(
    *, plan: dict[str, Any], config: dict[str, Any], optimizer: dict[str, Any], sequence: int, rank: int,
    num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """Evaluation, the next step's loss, and whether one rank's wish to stop is everyone's."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, shape, rates = Plan.from_json(json.dumps(plan)), DecoderConfig(**config), OptimizerConfig(**optimizer)
    session = parity.open_session(chosen, shape, rates, seed=0, dtype="float64", device=CPU)
    samples = parity.random_samples(shape, chosen.batch, sequence)
    part = session.mesh.part(chosen.sample_axes)
    batches = [samples(step, *part) for step in (5, 6)]
    before = [value.clone() for _, value in session.build.local_parameters()]
    total, tokens = session.loop.evaluate(batches)
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
