"""What ranks of the pool run for `test_async`: overlapping steps, and one process that replays what they promise."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import rank_jobs
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from meshwright.core.codec import decode
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.optimizers.update import OptimizerConfig
from meshwright.runtime.loop import Samples
from meshwright.schedules.actions import COMPUTES
from meshwright.simulator.pricing import price
from meshwright.verify import parity

CPU = torch.device("cpu")


def promised(batch: int, groups: list[int]) -> int:
    """The version of the weights that a batch uses; a flush follows each group of so many batches."""
    flushes = [sum(groups[:at]) for at in range(len(groups) + 1)]
    return max(batch - 1, max(flush for flush in flushes if flush <= batch))


def replay_job(
    *, config: dict[str, Any], optimizer: dict[str, Any], batch: int, sequence: int, groups: list[int], folder: str,
    dtype: str, techniques: list[dict[str, Any]], rank: int, num_ranks: int, rendezvous: str,
) -> None:  # fmt: skip
    """One process, one batch after the other: W[t + 1] = update(W[t], gradient of batch t at the promised version)."""
    rates = decode(OptimizerConfig, optimizer, "optimizer")
    opened, samples = rank_jobs.open_tiny(config, batch, sequence, dtype)
    plan = Plan.from_json(json.dumps({"techniques": techniques, "batch": batch, "microbatch": batch}))
    session = parity.open_session(plan, opened, rates, dtype=dtype, device=CPU)
    loop, steps = session.loop, sum(groups)
    named = dict(session.build.local_parameters())
    versions = [{name: value.clone() for name, value in named.items()}]
    told = {"loss": [], "norm": []}
    for step in range(steps):
        given = samples(step, 0, 1)
        _set(named, versions[promised(step, groups)])
        loop.optimizer.zero_gradients()
        loop.batch = loop._batch(given, trains=True)
        loop.run(tuple(action for action in session.build.actions(1) if action.kind in COMPUTES))
        loop.optimizer.take_gradients()
        told["loss"].append(float(loop.batch.total) / given.num_tokens)
        told["norm"].append(float(loop.optimizer.squared_norm()) ** 0.5)
        _set(named, versions[step])
        loop.optimizer.update(rates.lr_at(step, steps), 0.0)
        versions.append({name: value.clone() for name, value in named.items()})
    Path(folder).mkdir(parents=True)
    for number, version in enumerate(versions):
        save_file(version, Path(folder) / f"{number}.safetensors")
    (Path(folder) / "told.json").write_text(json.dumps(told))


@torch.no_grad()
def _set(named: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    for name, value in values.items():
        named[name].copy_(value)


class Probe:
    """Compares the weights that are really in place with a version of the replay."""

    def __init__(self, session: parity.Session, folder: Path, groups: list[int]):
        self.build, self.groups, self.loop = session.build, groups, session.loop
        self.versions = [safe_open(folder / f"{n}.safetensors", framework="pt") for n in range(sum(groups) + 1)]
        self.worst, self.seen = 0.0, 0
        for kind in ("forward", "backward"):
            self.watch(kind)

    def watch(self, kind: str) -> None:
        inner = getattr(self.loop, kind)

        def watched(batch: Any, key: tuple[int, int], **more: Any) -> None:
            inner(batch, key, **more)
            if batch.trains:
                number = self.loop.num_fed - 1 - (key[0] < 0 and self.loop.batch is not None)
                self.compare(promised(number, self.groups))

        setattr(self.loop, kind, watched)

    def distance(self, one: int, other: int) -> float:
        """Between two versions, as `compare` measures it; infinite for a rank with nothing to train."""
        trained = [name for name, parameter in self.build.named_parameters() if parameter.requires_grad]
        a, b = self.versions[one], self.versions[other]
        moves = [float((a.get_tensor(name) - b.get_tensor(name)).abs().max()) for name in trained]
        return max(moves, default=math.inf) / _norm(a)

    def compare(self, version: int) -> float:
        found = self.versions[version]
        norm, error = _norm(found), 0.0
        for name, value in self.build.local_parameters():
            wanted = found.get_tensor(name)[self.build.boxes[name].slices]
            error = max(error, float((value - wanted).abs().max()) / norm) if value.numel() else error
        self.worst, self.seen = max(self.worst, error), self.seen + 1
        return error


def _norm(version: Any) -> float:
    return sum(float(version.get_tensor(key).double().norm()) ** 2 for key in version.keys()) ** 0.5  # noqa: SIM118


def stream_job(
    *, plan: dict[str, Any], config: dict[str, Any], optimizer: dict[str, Any], sequence: int, groups: list[int],
    folder: str, dtype: str, rank: int, num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """Largest differences from the replay: parameters at every action and at rest, losses, norms."""
    torch._dynamo.reset()
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, optimizer, "optimizer")
    opened, samples = rank_jobs.open_tiny(config, chosen.batch, sequence, dtype)
    session = parity.open_session(chosen, opened, rates, dtype=dtype, device=CPU)
    assert session.loop.versions is not None
    part, probe = session.mesh.part(chosen.sample_axes), Probe(session, Path(folder), groups)
    told = json.loads((Path(folder) / "told.json").read_text())
    results, at_rest, evaluated, lateness, fed = [], 0.0, [], 0, 0
    for group in groups:
        for _ in range(group):
            lr = rates.lr_at(fed, sum(groups))
            results += session.loop.feed(samples(fed, *part), lr, stop=rank == num_ranks - 1 and fed > 0)
            fed += 1
            assert session.loop.before is not None
            assert not any(session.loop.before.microbatches), "inputs are kept after all forwards are over"
            lateness = max(lateness, fed - len(results))
        results += session.loop.flush()
        assert len(results) == fed
        at_rest = max(at_rest, probe.compare(fed))
        evaluated.append(session.loop.evaluate([samples(90, *part)])[0])
    parity.leave()
    pairs = list(zip(results, told["loss"], told["norm"], strict=True))
    return {
        "in_use": probe.worst,
        "seen": probe.seen,
        "at_rest": at_rest,
        "loss": max(abs(result.loss - loss) / loss for result, loss, _ in pairs),
        "norm": max(abs(result.gradient_norm - norm) / norm for result, _, norm in pairs),
        "moved": min(probe.distance(n, n + 1) for n in range(sum(groups))),
        "second_version_bytes": sum(each.nbytes for each in session.loop.versions.memory[1]),
        "priced_bytes": sum(
            int(item.repeat * item.bytes)
            for item in price(
                opened.profile,
                chosen,
                sequence=sequence,
                stage=session.build.stage,
                optimizer=rates,
                element_bytes=parity.DTYPES[dtype].itemsize,
            ).residents
            if item.category == "buffers" and item.life == "always" and not item.origin
        ),
        "must_stop": [result.must_stop for result in results],
        "lateness": lateness,
        "evaluated": evaluated,
    }


def evaluate_job(
    *, config: dict[str, Any], sequence: int, batch: int, folder: str, version: int, rank: int, num_ranks: int,
    rendezvous: str,
) -> float:  # fmt: skip
    """One device's evaluation of a version."""
    opened, samples = rank_jobs.open_tiny(config, batch, sequence, "float64")
    plan = Plan(batch=batch, microbatch=batch)
    session = parity.open_session(plan, opened, OptimizerConfig(), dtype="float64", device=CPU)
    with safe_open(Path(folder) / f"{version}.safetensors", framework="pt") as found:
        _set(dict(session.build.local_parameters()), {name: found.get_tensor(name) for name in found.keys()})  # noqa: SIM118
    return session.loop.evaluate([samples(90, 0, 1)])[0]


def misused_job(
    *, plan: dict[str, Any], config: dict[str, Any], optimizer: dict[str, Any], sequence: int, spoiled: bool,
    rank: int, num_ranks: int, rendezvous: str,
) -> dict[str, Any]:  # fmt: skip
    """What is said of an evaluation in mid-flight, or (`spoiled`) of a batch whose loss is not a number."""
    parity.enter(rank, num_ranks, rendezvous)
    chosen, rates = Plan.from_json(json.dumps(plan)), decode(OptimizerConfig, optimizer, "optimizer")
    opened, samples = rank_jobs.open_tiny(config, chosen.batch, sequence, "float64")
    session = parity.open_session(chosen, opened, rates, dtype="float64", device=CPU)
    part = session.mesh.part(chosen.sample_axes)

    def given(step: int) -> Samples:
        made = samples(step, *part)
        weights = made.weights * float("nan") if spoiled and step == 1 else made.weights
        return Samples(inputs=made.inputs, targets=made.targets, weights=weights, num_tokens=made.num_tokens)

    answer: dict[str, Any] = {"calls": 0}
    try:
        for step in range(4):
            session.loop.feed(given(step), 0.1)
            answer["calls"] += 1
            if not spoiled:
                session.loop.evaluate([given(step)])
    except MeshwrightError as error:
        answer |= {"said": str(error), "exit_code": error.exit_code}
    session.loop.flush() if not spoiled else None
    parity.leave()
    return answer
