"""Workers and servers in real processes, against plain torch: one device, or a loop that replays what was recorded.

Tests of `techniques/parameter_server.py`, `optimizers/pulled_weights.py`, `optimizers/server_process.py`,
`ops/server_link.py`.
"""

from __future__ import annotations

import json
import math
import socket
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import test_local_steps as islands
import tiny
import torch
from tiny import t
from torch import Tensor

from meshwright.core.codec import decode
from meshwright.core.technique import Technique
from meshwright.launch.rank_pool import RankError, RankPool
from meshwright.models.presets import DecoderConfig
from meshwright.ops.server_link import ServerLink
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.optimizers.server_process import ShardServer, ShardSettings
from meshwright.run.model import open_config
from meshwright.run.run_file import TrainSection
from meshwright.simulator.pricing import price
from meshwright.verify import parity
from meshwright.verify.reference_model import plain_of

MODEL = tiny.LLAMA | {"num_layers": 1}
BATCH = 6
STEPS = 6
ADAMW = tiny.ADAMW | {"epsilon": 1e-4}


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def asked(technique: Technique, **question: Any) -> dict[str, Any]:
    plan = tiny.plan_of(technique, batch=BATCH, microbatch=1)
    seconds = [0.0] * plan.num_ranks
    asked = {"plan": json.loads(plan.to_json()), "config": MODEL, "optimizer": ADAMW, "steps": STEPS}
    return asked | {"seconds": seconds} | question


class Replay:
    """The recorded updates again, by torch on a plain model: each gradient of the weights that its worker then had."""

    def __init__(self, workers: int, optimizer: dict[str, Any], settings: dict[str, Any]):
        config = decode(DecoderConfig, MODEL, "config")
        self.model = plain_of(open_config(config, "tiny", 0), sequence=tiny.SEQUENCE, dtype=torch.float64)
        self.samples = parity.random_samples(config.vocab_size, BATCH, tiny.SEQUENCE)
        self.workers, self.clip, self.settings, self.lr = workers, optimizer["clip"], settings, optimizer["lr"]
        self.values = list(self.model.parameters.values())
        decays = [OptimizerConfig().weight_decay if value.ndim >= 2 else 0.0 for value in self.values]
        groups = [{"params": [v], "weight_decay": d} for v, d in zip(self.values, decays, strict=True)]
        if optimizer["name"] == "sgd":
            self.optimizer: Any = torch.optim.SGD(groups, lr=self.lr, momentum=optimizer["momentum"])
        else:
            self.optimizer = torch.optim.AdamW(groups, lr=self.lr, betas=(0.9, 0.95), eps=optimizer["epsilon"])
        self.pulled = {(worker, 1): self.now() for worker in range(workers)}
        """(worker, clock) -> the weights with which it began it."""
        self.versions, self.version = dict.fromkeys(self.pulled, 0), 0
        self.losses: dict[tuple[int, int], float] = {}
        """(worker, clock) -> its share of the loss."""

    def now(self) -> list[Tensor]:
        return [value.detach().clone() for value in self.values]

    def gradient(self, worker: int, clock: int) -> list[Tensor]:
        """Of a worker's share of the batch's mean loss, compensated for its age."""
        now, given = self.now(), self.samples(clock - 1, worker, self.workers)
        with torch.no_grad():
            for value, old in zip(self.values, self.pulled[worker, clock], strict=True):
                value.copy_(old)
        losses = self.model.losses(self.model.forward(given.inputs), given.targets) * given.weights
        loss = losses.sum() / given.num_tokens
        found = torch.autograd.grad(loss, self.values)
        self.losses[worker, clock] = float(loss.detach())
        strength = self.settings.get("compensation", 0.0) * self.workers
        with torch.no_grad():
            for value, new in zip(self.values, now, strict=True):
                value.copy_(new)
            pairs = zip(found, now, self.pulled[worker, clock], strict=True)
            return [g + strength * g * g * (new - old) for g, new, old in pairs]

    def update(self, clock: int, workers: list[int]) -> float:
        """The norm of the gradient."""
        each = [self.gradient(worker, clock) for worker in workers]
        total = [sum(parts) * (self.workers / len(workers)) for parts in zip(*each, strict=True)]
        norm = float(torch.cat([part.flatten() for part in total]).norm())
        age = max(self.version - self.versions[worker, clock] for worker in workers)
        for group in self.optimizer.param_groups:
            group["lr"] = self.lr / (max(1, age) if self.settings.get("scaled_rate") else 1)
        for value, part in zip(self.values, total, strict=True):
            value.grad = part * min(1.0, self.clip / norm) if self.clip else part
        self.optimizer.step()
        self.version += 1
        return norm

    def run(self, record: list[list[Any]]) -> None:
        for kind, *about in record:
            if kind == "update":
                clock, workers, ages = about
                assert ages == [self.version - self.versions[worker, clock] for worker in workers]
                self.update(clock, workers)
            elif kind == "release":
                worker, clock, has_weights = about
                now = (self.now(), self.version) if has_weights else (self.pulled[worker, clock], -1)
                self.pulled[worker, clock + 1], self.versions[worker, clock + 1] = now

    def is_as(self, held: dict[str, list[float]]) -> bool:
        found = {name: torch.tensor(value, dtype=torch.float64) for name, value in held.items()}
        return islands.close(found, {name: value.flatten() for name, value in self.model.parameters.items()})


def test_sync_is_one_device_and_sends_what_is_priced(ran: Callable[..., list[dict[str, Any]]]) -> None:
    """Clipped by the norm of all shards; three shards, the last of which is shorter by what is left over."""
    plan = tiny.plan_of(t("parameter_server", size=4, shards=3))
    model = tiny.QWEN | {"num_layers": 1}
    answers = ran(plan, model)
    bounds = dict.fromkeys(("loss", "gradient norm", "parameter"), tiny.EXACT)
    assert tiny.departures(answers, bounds) == []
    assert tiny.price_differences(answers) == []
    work = price(tiny.profile_of(model), plan, sequence=tiny.SEQUENCE, element_bytes=8)
    elements = sum(int(slot.repeat * slot.elements) for slot in work.slots if not slot.copy_of)
    (message,) = work.collectives
    assert (message.kind, message.repeat, message.bytes) == ("send", 6, -(-elements // 3) * 8)
    states = sum(each.bytes * each.repeat for each in work.residents if each.category == "optimizer")
    assert states == 0, "states are not on the devices"


@pytest.mark.slow
def test_a_staleness_of_zero_is_sync_bit_for_bit(pool: RankPool) -> None:
    seconds = [0.0, 0.05, 0.02]
    held = []
    for settings in ({"mode": "sync"}, {"mode": "ssp", "staleness": 0}):
        question = asked(t("parameter_server", size=3, **settings), seconds=seconds)
        answers = pool.run("server_jobs:paced_job", question, num_ranks=3)
        assert all(answer["held"] == answers[0]["held"] for answer in answers)
        assert all(answer["losses"] == answers[0]["losses"] for answer in answers)
        held.append((answers[0]["held"], answers[0]["losses"]))
    assert held[0] == held[1]


@pytest.mark.parametrize(
    ("settings", "optimizer"),
    [
        pytest.param({"mode": "async", "shards": 2}, ADAMW, id="async"),
        pytest.param(
            {"mode": "async", "compensation": 0.5, "scaled_rate": True},
            tiny.SGD | {"momentum": 0.5},
            id="corrected",
            marks=pytest.mark.slow,
        ),
        pytest.param({"mode": "ssp", "staleness": 2, "shards": 2, "compensation": 0.5}, ADAMW, id="ssp"),
        pytest.param({"backups": 1}, ADAMW, id="backups", marks=pytest.mark.slow),
    ],
)
def test_what_was_recorded_is_replayed(settings: dict[str, Any], optimizer: dict[str, Any], pool: RankPool) -> None:
    question = asked(t("parameter_server", size=3, **settings), optimizer=optimizer, seconds=[0.02, 0.1, 0.3])
    answers = pool.run("server_jobs:paced_job", question, num_ranks=3)
    record = [each for each in answers[0]["record"] if each[0] != "read"]  # which others may do before
    figures = answers[0]["figures"]
    replay = Replay(3, optimizer, settings)
    replay.run(record)
    for answer in answers:
        assert [each for each in answer["record"] if each[0] != "read"] == record
        assert replay.is_as(answer["held"]), "what is evaluated at rest is the servers' newest weights"
    updates = [each for each in record if each[0] == "update"]
    ages = Counter(age for _, _, _, each in updates for age in each)
    assert {f"staleness_{age}": count for age, count in ages.items()}.items() <= figures.items()
    if settings.get("mode") == "async":
        assert max(ages) >= 2, "nobody was late: the test shows nothing"
        assert len(updates) == 3 * STEPS
    elif settings.get("mode") == "ssp":
        assert [clock for _, clock, workers, _ in updates if workers == [0, 1, 2]] == [*range(1, STEPS + 1)]
        assert figures["clock_gap_2"] > 0, "nobody was ahead: the test shows nothing"
        assert not any(figures.get(f"clock_gap_{gap}") for gap in range(3, 9))
        own = [3 * replay.losses[0, clock] for clock in range(1, STEPS + 1)]
        assert answers[0]["losses"] == pytest.approx(own, rel=1e-9)
    else:
        assert all(len(workers) == 2 for _, _, workers, _ in updates)
        left_out = [each for each in record if each[0] == "release" and not each[3]]
        assert len(left_out) >= 1, "the slow worker does not leave steps out"
        assert figures["dropped_gradients"] == STEPS  # of each clock, one is not used


def test_all_workers_stop_after_the_same_step(pool: RankPool, tmp_path: Path) -> None:
    """One is asked to while others are ahead of it."""
    technique = t("parameter_server", size=3, mode="ssp", staleness=2)
    question = asked(technique, seconds=[0.01, 0.01, 0.1], stop=[2, 2], steps=20, folder=str(tmp_path))
    answers = pool.run("server_jobs:paced_job", question, num_ranks=3)
    (steps,) = {len(answer["losses"]) for answer in answers}
    assert 3 <= steps <= 5
    replay = Replay(3, ADAMW, {})
    replay.run(answers[0]["record"])
    assert islands.close(islands.shared_model(tmp_path, steps), replay.model.parameters)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["sync", "ssp", "async"])
def test_a_loss_that_is_not_finite_is_refused_by_all_at_one_step(mode: str, pool: RankPool) -> None:
    technique = t("parameter_server", size=3, mode=mode, staleness=2 * (mode == "ssp"))
    # The others have steps to go when the slowest worker says so.
    question = asked(technique, seconds=[0.05, 0.06, 0.1], bad=[2, 2], steps=12)
    answers = pool.run("server_jobs:paced_job", question, num_ranks=3)
    (refused,) = {tuple(answer["refused"]) for answer in answers}
    assert len(refused) == 1
    assert refused[0] == 2 or mode != "sync"
    for answer in answers:
        assert [step for step, loss in enumerate(answer["losses"]) if not math.isfinite(loss)] == [*refused]
        assert answer["held"] == answers[0]["held"]
        assert all(math.isfinite(each) for value in answer["held"].values() for each in value)


@pytest.mark.slow
def test_a_run_goes_on_bit_for_bit_with_any_number_of_workers_or_none(pool: RankPool, tmp_path: Path) -> None:
    """`local_jobs` has a batch of 8."""
    servers, at = t("parameter_server", size=2, shards=2), 3
    question = {"config": MODEL, "optimizer": ADAMW, "steps": 5}
    whole = pool.run("local_jobs:trained_job", islands.asked(tmp_path, servers, save_at=at, **question), num_ranks=2)
    rest = question | {"first": at, "steps": 2, "resume": str(tmp_path), "last": 5}
    for size in (2, 4, 1):
        others = (t("parameter_server", size=size, shards=2),) if size > 1 else ()
        again = pool.run("local_jobs:trained_job", islands.asked("", *others, **rest), num_ranks=size)
        for answer in again:
            assert answer["losses"] == pytest.approx(whole[0]["losses"][at:], rel=1e-9)
            for name, value in answer["held"].items():
                assert value == pytest.approx(whole[0]["held"][name], rel=1e-9, abs=1e-12)
        assert size != 2 or again[0]["held"] == whole[0]["held"]


def test_a_server_that_dies_is_named(pool: RankPool) -> None:
    question = asked(t("parameter_server", size=2, shards=2), kill=2)
    with pytest.raises(RankError, match=r"rank 0 of 2 failed.*shard 0 of 2 of the server has ended, with exit code -9"):
        pool.run("server_jobs:paced_job", question, num_ranks=2)


def test_a_stranger_is_sent_away() -> None:
    """One without the token, one with no message of ours, and one who claims another's place."""
    about: dict[str, Any] = {"index": 0, "shards": 1, "workers": 2, "staleness": 0, "backups": 0, "compensation": 0.0}
    optimizer = decode(OptimizerConfig, ADAMW, "optimizer")
    about |= {"scales_rate": False, "optimizer": optimizer, "runs": ((4, 1.0, 0.0),), "dtype": "float64"}
    server = ShardServer(ShardSettings(**about, token="right"))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=server.admit, args=(listener,))
        thread.start()
        hellos = [b"\xff\xff\xff\xff", *({"worker": w, "token": "wrong"} for w in (0, 1))]
        hellos += [{"worker": worker, "token": "right"} for worker in (0, 0, 7, "0", 1)]
        links = []
        for hello in hellos:
            links.append(ServerLink(socket.create_connection(listener.getsockname())))
            if isinstance(hello, bytes):
                links[-1].end.sendall(hello)
            else:
                links[-1].send(hello)
        thread.join(10)
    assert not thread.is_alive()
    answers = []
    for link in links:
        try:
            answers.append(link.receive())
        except ConnectionError:
            answers.append({})
        link.close()
    states = {"states": ["exp_avg", "exp_avg_sq"]}
    assert answers == [{}, {}, {}, states, {}, {}, {}, states]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"shards": 3}, "shards is 3, of servers beside 2 workers"),
        ({"shards": 0}, "shards is 0"),
        ({"mode": "ssp", "staleness": -1}, "staleness is -1"),
        ({"staleness": 2}, "staleness is 2, with mode = sync"),
        ({"backups": 2}, "backups is 2, of 2 workers"),
        ({"backups": 1, "mode": "async"}, "mode = async"),
        ({"compensation": -1.0, "mode": "async"}, "compensation is -1"),
        ({"compensation": 1.0}, "gradients of sync are not old"),
        ({"scaled_rate": True, "mode": "ssp"}, "scaled_rate is true"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    (problem,) = tiny.plan_of(t("parameter_server", size=2, **settings)).check(tiny.profile_of(MODEL))
    assert words in str(problem)
    assert problem.where == "parameter_server"
    assert problem.fix


def test_all_that_is_wrong_is_told_at_once() -> None:
    technique = t("parameter_server", size=2, shards=5, staleness=-1, backups=7)
    assert len(tiny.plan_of(technique).check(tiny.profile_of(MODEL))) == 3


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (tiny.REPLICATE, "a worker is one device, and replicate has an axis"),
        (tiny.PEERS, "a worker is one device"),
        (tiny.ON_HOST, "keeps weights or states in a way of its own"),
        (tiny.LOW_BIT, "keeps weights or states in a way of its own"),
        (tiny.IN_BACKWARD, "updates parameters apart"),
        (tiny.EVERY_STEP, "updates parameters apart"),
        (tiny.KEEP_ALL, "codes sums"),
        (t("precision", dtype="fp16"), "a gradient of fp16 overflows"),
    ],
)
def test_what_workers_cannot_have_is_refused(other: Technique, words: str) -> None:
    problems = tiny.plan_of(tiny.SERVED, other).check(tiny.profile_of(MODEL))
    assert any(words in str(each) and each.where == "parameter_server" for each in problems)


def test_what_needs_one_loss_for_all_is_refused_where_each_worker_has_its_own() -> None:
    assert "looks at whole parameters" in str(tiny.SERVED.refused_optimizer(OptimizerConfig(name="muon"))[0])
    for mode in ("sync", "async"):
        plan = tiny.plan_of(t("parameter_server", size=2, mode=mode))
        for action in ("warn", "skip", "roll_back"):
            problems = TrainSection(steps=1, batch=8, on_spike=action).problems_with(plan)  # type: ignore[arg-type]
            is_refused = mode == "async" and action != "warn"
            assert [each.where for each in problems] == ["train.on_spike"] * is_refused
