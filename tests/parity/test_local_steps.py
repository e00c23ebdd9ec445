"""Islands against a loop of one process that shares nothing with them but the model's forward.

Tests of `techniques/local_steps.py`, `ops/local_averages.py`.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import tiny
import torch
from tiny import t
from torch import Tensor

from meshwright.checkpoint.load import Reader
from meshwright.checkpoint.step_folders import step_folder
from meshwright.core.box import Box
from meshwright.core.codec import decode
from meshwright.core.technique import Technique
from meshwright.launch.rank_pool import RankPool
from meshwright.models.presets import DecoderConfig
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.run.model import open_config
from meshwright.simulator.pricing import price
from meshwright.verify import parity
from meshwright.verify.reference_model import plain_of

MODEL = tiny.LLAMA | {"num_layers": 2}
ADAMW = tiny.ADAMW | {"epsilon": 1e-4}
SGD = tiny.SGD | {"momentum": 0.0, "clip": 0.0}
STEPS = 7
AVERAGE = {"outer": "average", "every": 3}
DILOCO = {"every": 3}
STREAMING = {"every": 4, "fragments": 2, "overlap": 1, "blend": 0.5}
ELASTIC = {"outer": "elastic", "every": 2, "pull": 0.3, "push": 0.2}


class Oracle:
    """Islands one after the other, each a plain model with a torch optimizer."""

    def __init__(self, count: int, optimizer: dict[str, Any]):
        config = decode(DecoderConfig, MODEL, "config")
        self.models = [
            plain_of(open_config(config, "tiny", 0), sequence=tiny.SEQUENCE, dtype=torch.float64) for _ in range(count)
        ]
        self.clip, self.count = optimizer["clip"], count
        self.optimizers = []
        for model in self.models:
            decay = OptimizerConfig().weight_decay
            groups = [
                {"params": [v for v in model.parameters.values() if (v.ndim >= 2) == is_matrix], "weight_decay": wd}
                for is_matrix, wd in ((True, decay), (False, 0.0))
            ]
            if optimizer["name"] == "sgd":  # decoupled decay, by hand in `step`
                self.optimizers.append(torch.optim.SGD([dict(each, weight_decay=0.0) for each in groups], lr=1e-2))
            else:
                settings = {"lr": optimizer["lr"], "betas": (0.9, 0.95), "eps": optimizer["epsilon"]}
                self.optimizers.append(torch.optim.AdamW(groups, **settings))
        self.decay = decay if optimizer["name"] == "sgd" else 0.0
        self.shared = {name: value.detach().clone() for name, value in self.models[0].parameters.items()}
        self.momentum = {name: torch.zeros_like(value) for name, value in self.shared.items()}
        self.under_way: dict[str, Tensor] = {}
        self.samples = parity.random_samples(config.vocab_size, tiny.BATCH, tiny.SEQUENCE)
        layers = dict.fromkeys(self.layer_of(name) for name in self.shared)
        self.layer_numbers = {name: list(layers).index(self.layer_of(name)) for name in self.shared}

    @staticmethod
    def layer_of(name: str) -> str:
        return ".".join(name.split(".")[:2]) if name.startswith("block") else name.split(".")[0]

    def loss(self, values: dict[str, Tensor] | None, island: int, step: int) -> Tensor:
        model = self.models[island]
        given = self.samples(step, island, self.count)
        before = {name: value.detach().clone() for name, value in model.parameters.items()}
        if values is not None:
            with torch.no_grad():
                for name, value in model.parameters.items():
                    value.copy_(values[name])
        loss = (model.losses(model.forward(given.inputs), given.targets) * given.weights).sum() / given.num_tokens
        if values is not None:
            with torch.no_grad():
                for name, value in model.parameters.items():
                    value.copy_(before[name])
        return loss

    def step(self, step: int) -> float:
        total = 0.0
        for island, (model, optimizer) in enumerate(zip(self.models, self.optimizers, strict=True)):
            optimizer.zero_grad()
            loss = self.loss(None, island, step)
            (loss * self.count).backward()
            total += float(loss.detach())
            trained = list(model.parameters.values())
            norm = torch.cat([value.grad.flatten() for value in trained]).norm()
            if self.clip and norm > self.clip:
                for value in trained:
                    value.grad *= self.clip / norm
            with torch.no_grad():
                for value in trained:
                    value.mul_(1 - 1e-2 * self.decay * (value.ndim >= 2))
            optimizer.step()
        return total

    @torch.no_grad()
    def meet(self, count: int, settings: dict[str, Any], *, is_last: bool) -> None:
        every, outer = settings["every"], settings.get("outer", "nesterov")
        fragments, overlap, blend = (settings.get(k, d) for k, d in (("fragments", 1), ("overlap", 0), ("blend", 1.0)))
        for name, shared in self.shared.items():
            islands = [model.parameters[name] for model in self.models]
            turn = (count + self.layer_numbers[name] % fragments * every // fragments) % every
            if name in self.under_way and (turn == overlap or is_last):
                self.use(name, self.under_way.pop(name), settings, blend)
            if turn == 0 or is_last:
                if outer == "elastic":
                    apart = [island - shared for island in islands]
                    for island, way in zip(islands, apart, strict=True):
                        island -= settings["pull"] * way
                    shared += settings["push"] * sum(apart)
                    continue
                mean = shared - sum(islands) / self.count
                if overlap and not is_last:
                    self.under_way[name] = mean
                else:
                    self.use(name, mean, settings, blend)

    def use(self, name: str, gradient: Tensor, settings: dict[str, Any], blend: float) -> None:
        shared = self.shared[name]
        if settings.get("outer", "nesterov") == "average":
            shared -= gradient
        else:
            self.momentum[name] = 0.9 * self.momentum[name] + gradient
            shared -= 0.7 * (gradient + 0.9 * self.momentum[name])
        for model in self.models:
            island = model.parameters[name]
            island.copy_(blend * shared + (1 - blend) * island)


def asked(folder: Path | str, *techniques: Technique, **question: Any) -> dict[str, Any]:
    plan = tiny.plan_of(*techniques)
    asked = {"plan": json.loads(plan.to_json()), "config": MODEL, "optimizer": ADAMW, "steps": STEPS}
    return asked | {"folder": str(folder)} | question


def shared_model(folder: Path, step: int = STEPS) -> dict[str, Tensor]:
    reader = Reader(step_folder(folder, step))
    found = {}
    for key in reader.tensor_names():
        if key.startswith("parameter."):
            shape = reader.manifest.tensors[key].shape
            found[key.removeprefix("parameter.")] = out = torch.empty(shape, dtype=torch.float64)
            reader.read_into(key, Box.whole(tuple(shape)), out)
    return found


def close(found: dict[str, Tensor], wanted: dict[str, Tensor]) -> bool:
    assert set(found) == set(wanted)
    return all(torch.allclose(found[name], wanted[name].detach(), rtol=1e-9, atol=1e-11) for name in wanted)


@pytest.mark.parametrize(
    ("islands", "settings", "optimizer"),
    [
        (2, STREAMING, ADAMW),
        (4, DILOCO, ADAMW),
        (2, AVERAGE, ADAMW),
        (4, ELASTIC, ADAMW),
        (2, {"outer": "average", "every": 1}, SGD),
        (2, DILOCO | {"every": 100}, ADAMW),
    ],
    ids=["streaming", "diloco", "average", "elastic", "synchronous", "never"],
)
def test_islands_do_what_a_plain_loop_does(
    islands: int, settings: dict[str, Any], optimizer: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    question = asked(tmp_path, t("local_steps", size=islands, **settings), optimizer=optimizer, last=STEPS)
    answers = pool.run("local_jobs:trained_job", question, num_ranks=islands)
    oracle = Oracle(islands, optimizer)
    for step in range(STEPS):
        loss = oracle.step(step)
        oracle.meet(step + 1, settings, is_last=step + 1 == STEPS)
        evaluated = sum(float(oracle.loss(oracle.shared, island, step).detach()) for island in range(islands))
        for answer in answers:
            assert answer["losses"][step] == pytest.approx(loss, rel=1e-9)
            assert answer["evaluated"][step] == pytest.approx(evaluated, rel=1e-9)
    assert close(shared_model(tmp_path), oracle.shared)
    for answer, model in zip(answers, oracle.models, strict=True):
        held = {name: torch.tensor(value, dtype=torch.float64) for name, value in answer["held"].items()}
        assert close(held, {name: value.flatten() for name, value in model.parameters.items()})


@pytest.mark.slow
@pytest.mark.parametrize(
    "inside",
    [(tiny.REPLICATE, tiny.SHARD3), (tiny.SHARD1, tiny.SEQUENCED, tiny.PIPELINE), (tiny.RING,)],
    ids=["hybrid shards", "three axes", "ring"],
)
def test_an_island_may_be_any_mesh(inside: tuple[Technique, ...], pool: RankPool, tmp_path: Path) -> None:
    settings = STREAMING | {"fragments": 1}  # which layers are in which fragment depends on the stages
    for folder, techniques in (("alone", ()), ("meshes", inside)):
        question = asked(tmp_path / folder, t("local_steps", size=2, **settings), *techniques, traffic=True)
        question["plan"]["microbatch"] = 1
        num_ranks = tiny.plan_of(t("local_steps", size=2), *techniques).num_ranks
        answers = pool.run("local_jobs:trained_job", question, num_ranks=num_ranks)
        norms = answers[0]["norms"]
        assert all(answer["norms"] == pytest.approx(norms, rel=1e-9) for answer in answers)
    assert close(shared_model(tmp_path / "meshes"), shared_model(tmp_path / "alone"))


def test_bytes_over_the_slow_axis_are_as_priced(pool: RankPool) -> None:
    plan = tiny.plan_of(t("local_steps", size=2, every=4, fragments=2), tiny.SHARD3)
    question = asked("", *plan.techniques, steps=8, traffic=True)
    answers = pool.run("local_jobs:trained_job", question, num_ranks=4)
    profile = tiny.profile_of(MODEL)
    promised = Counter[tuple[str, int]]()
    for each in price(profile, plan, sequence=tiny.SEQUENCE, element_bytes=8).collectives:
        if each.axis == "local":
            promised[each.kind, int(each.bytes)] += each.repeat * 8
    for answer in answers:
        moved = {(kind, size): count for kind, axis, size, count in answer["traffic"] if axis == "local"}
        assert moved == promised
    whole = sum(slot.repeat * slot.elements for slot in price(profile, tiny.plan_of(), sequence=16).slots)
    assert sum(size * count for (_, size), count in promised.items()) == 8 / 4 * whole / 2 * 8


def test_a_run_goes_on_bit_for_bit_and_with_other_islands(pool: RankPool, tmp_path: Path) -> None:
    """A checkpoint in the middle of a period, with a sum under way."""
    islands, at = t("local_steps", size=2, **STREAMING), 4
    whole = pool.run("local_jobs:trained_job", asked(tmp_path, islands, save_at=at, last=STEPS), num_ranks=2)
    rest: dict[str, Any] = {"first": at, "steps": STEPS - at, "resume": str(tmp_path), "last": STEPS}
    again = pool.run("local_jobs:trained_job", asked(tmp_path / "again", islands, **rest), num_ranks=2)
    for before, after in zip(whole, again, strict=True):
        assert after["held"] == before["held"]
        assert after["evaluated"] == before["evaluated"][at:]
    for count in (4, 1):
        folder = tmp_path / f"{count}"
        techniques = [t("local_steps", size=count, **STREAMING)] if count > 1 else []
        other = pool.run("local_jobs:trained_job", asked(folder, *techniques, **rest), num_ranks=count)
        assert other[0]["losses"][0] == pytest.approx(whole[0]["losses"][at], rel=0.05)
    # The sum under way is used in the next step, whoever takes part in it by then.
    pool.run("local_jobs:trained_job", asked(tmp_path / "next", islands, steps=at + 1), num_ranks=2)
    wanted = shared_model(tmp_path / "next", at + 1)
    for count in (2, 4):
        here, techniques = tmp_path / f"next {count}", [t("local_steps", size=count, **STREAMING)]
        pool.run("local_jobs:trained_job", asked(here, *techniques, **rest | {"steps": 1}), num_ranks=count)
        assert close(shared_model(here, at + 1), wanted)
    first = pool.run("local_jobs:trained_job", asked("", **rest | {"steps": 0}), num_ranks=1)[0]["held"]
    found = shared_model(tmp_path, at)
    assert all(first[name] == found[name].flatten().tolist() for name in found), "one device goes on from another model"


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every is 0"),
        ({"outer": "elastic", "pull": 0.6}, "pull is 0.6"),
        ({"outer": "elastic", "push": -0.1}, "push is -0.1"),
        ({"outer": "elastic", "push": 0.0}, "push is 0"),
        ({"outer_momentum": 1.0}, "outer_momentum is 1"),
        ({"outer": "elastic", "push": 0.5, "size": 4}, "would pass each other"),
        ({"outer": "elastic", "overlap": 1}, "centre moves at once"),
        ({"fragments": 40}, "fragments is 40, with 32 updates"),
        ({"overlap": 32}, "a layer meets again after 32"),
        ({"blend": 0}, "Use more than 0 to 1"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    plan = tiny.plan_of(t("local_steps", **{"size": 2} | settings))
    (problem,) = plan.check(tiny.profile_of(MODEL))
    assert words in str(problem)
    assert problem.where == "local_steps"
    assert problem.fix


def test_what_islands_cannot_have_is_refused() -> None:
    islands, profile = t("local_steps", size=2), tiny.profile_of(MODEL)
    with_async = tiny.plan_of(islands, t("pipeline", size=2, schedule="async"))
    with_hosts = tiny.plan_of(islands, tiny.ON_HOST)
    assert "parameters of two versions" in str(with_async.check(profile)[0])
    assert any("parameters in host memory" in str(each) for each in with_hosts.check(profile))
    assert "looks at whole parameters" in str(islands.refused_optimizer(OptimizerConfig(name="muon"))[0])
