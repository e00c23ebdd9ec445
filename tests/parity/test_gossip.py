"""Peers that average with neighbours, against a loop of one process over all peers with the mixing matrix.

Tests of `techniques/gossip.py`, `ops/gossip.py`.
"""

from __future__ import annotations

import json
import random
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import test_local_steps as islands
import tiny
import torch
from tiny import t

from meshwright.core.technique import Technique
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.named_clusters import cluster
from meshwright.ops.gossip import adapted, mixing_shares
from meshwright.optimizers.optimizer_config import OptimizerConfig
from meshwright.simulator.pricing import price
from meshwright.simulator.stage_seconds import AGREED_BYTES, routes, stage_cost

Matrix = npt.NDArray[np.float64]
MODEL = islands.MODEL
SMALL = MODEL | {"num_layers": 1}
GRAPHS = ("ring", "exponential", "pairs", "push", "tree")
SEED = 5
UP, DOWN = 1, 2
"""Periods of a tree's meetings in either direction."""


def matrix(graph: str, size: int, meeting: int) -> Matrix:
    """Column j: where what peer j has goes."""
    whole, numbers = np.eye(size), random.Random(f"{SEED}.{meeting}")
    if graph == "ring":
        both = np.roll(whole, 1, axis=0) + np.roll(whole, -1, axis=0)
        return (whole + both) / 3 if size > 2 else np.full((2, 2), 0.5)
    if graph == "exponential":
        return (whole + np.roll(whole, 2 ** (meeting % round(np.log2(size))), axis=0)) / 2
    if graph == "pairs":
        order = numbers.sample(range(size), size)
        for a, b in zip(order[0::2], order[1::2], strict=False):
            whole[np.ix_([a, b], [a, b])] = 0.5
        return whole
    if graph == "tree":
        for child in range(1, size):
            parent = (child + 1) // 2 - 1
            for giver, taker, period in ((child, parent, UP), (parent, child, DOWN)):
                if meeting % period == 0:
                    whole[taker, giver] += 0.25
                    whole[giver, giver] -= 0.25
        return whole
    for giver in range(size):
        whole[giver, giver] = 0.5
        whole[(giver + numbers.randrange(1, size)) % size, giver] += 0.5
    return whole


def peers_of(graph: str, **settings: Any) -> Technique:
    return t("gossip", graph=graph, seed=SEED, **({"up": UP, "down": DOWN} if graph == "tree" else {}), **settings)


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Peers:
    """What all peers have, a row for each, and their sum-weights."""

    def __init__(self, size: int):
        self.size, self.weights = size, np.ones(size)

    def mixed(self, rows: Matrix, graph: str, meeting: int) -> Matrix:
        shares = matrix(graph, self.size, meeting)
        sums = shares @ (self.weights[:, None] * rows)
        self.weights = shares @ self.weights
        return sums / self.weights[:, None]

    def average(self, rows: Matrix) -> Matrix:
        return self.weights @ rows / self.size

    def distance(self, rows: Matrix) -> float:
        return float(np.sqrt(((rows - self.average(rows)) ** 2).sum(axis=1).mean()))


@pytest.mark.parametrize("graph", GRAPHS)
def test_nothing_is_lost_in_a_meeting_and_everyone_is_reached(graph: str) -> None:
    for size in (2, 4, 8, 16) if graph == "exponential" else (2, 3, 4, 5, 8, 13):
        reached, weights = np.eye(size), np.ones(size)
        for meeting in range(200):
            found = np.zeros((size, size))
            for (taker, giver), share in mixing_shares(graph, size, meeting, SEED, UP, DOWN).items():
                found[taker, giver] = share
            np.testing.assert_allclose(found, matrix(graph, size, meeting), atol=1e-15)
            assert found.min() >= 0
            np.testing.assert_allclose(found.sum(axis=0), 1, rtol=1e-15)
            if graph == "push":
                assert ((found > 0).sum(axis=0) == 2).all(), "a peer sends one message"
            elif graph == "tree":
                sent = (found > 0).sum() - size
                assert sent == (size - 1) * ((meeting % UP == 0) + (meeting % DOWN == 0)), "one message for each edge"
            else:
                np.testing.assert_allclose(found.sum(axis=1), 1, rtol=1e-15)
            reached, weights = found @ reached, found @ weights
            assert weights.sum() == pytest.approx(size, rel=1e-12)
            assert weights.min() > 0
        np.testing.assert_allclose(reached, np.outer(weights, np.ones(size)) / size, atol=1e-2)


@pytest.mark.parametrize(
    ("graph", "size", "every", "optimizer"),
    [
        ("ring", 4, 1, islands.ADAMW),
        ("ring", 2, 2, islands.SGD),
        ("exponential", 4, 1, islands.ADAMW),
        ("pairs", 4, 2, islands.ADAMW),
        ("push", 4, 1, islands.ADAMW),
        ("tree", 4, 2, islands.ADAMW),
    ],
)
def test_peers_do_what_a_plain_loop_does(
    graph: str, size: int, every: int, optimizer: dict[str, Any], pool: RankPool, tmp_path: Path
) -> None:
    technique = peers_of(graph, size=size, every=every)
    question = islands.asked(tmp_path, technique, optimizer=optimizer, last=islands.STEPS)
    answers = pool.run("local_jobs:trained_job", question, num_ranks=size)
    oracle, peers = islands.Oracle(size, optimizer), Peers(size)
    for step in range(islands.STEPS):
        loss = oracle.step(step)
        with torch.no_grad():
            for name in oracle.shared:
                given = [model.parameters[name] for model in oracle.models]
                rows = torch.stack([each.flatten() for each in given]).numpy()
                weights = peers.weights
                if (step + 1) % every == 0:
                    rows = peers.mixed(rows, graph, (step + 1) // every - 1)
                oracle.shared[name] = torch.from_numpy(peers.average(rows)).view_as(given[0])
                peers.weights, weights = weights, peers.weights
                for row, each in zip(rows, given, strict=True):
                    each.copy_(torch.from_numpy(row).view_as(each))
            peers.weights = weights
        evaluated = sum(float(oracle.loss(oracle.shared, peer, step).detach()) for peer in range(size))
        for answer in answers:
            assert answer["losses"][step] == pytest.approx(loss, rel=1e-9)
            assert answer["evaluated"][step] == pytest.approx(evaluated, rel=1e-9)
    assert islands.close(islands.shared_model(tmp_path), oracle.shared)
    for answer, model in zip(answers, oracle.models, strict=True):
        held = {name: torch.tensor(value, dtype=torch.float64) for name, value in answer["held"].items()}
        assert islands.close(held, {name: value.flatten() for name, value in model.parameters.items()})
    has_parted = any(answer["held"] != answers[0]["held"] for answer in answers)
    assert has_parted == ((graph, size) != ("ring", 2) or islands.STEPS % every > 0)


@pytest.mark.parametrize(
    ("graph", "size", "copies"),
    [("ring", 4, 1), ("exponential", 4, 1), ("pairs", 3, 2), ("push", 4, 1), ("tree", 6, 1)],
)
def test_at_a_rate_of_zero_peers_come_together_and_their_average_stays(
    graph: str, size: int, copies: int, pool: RankPool
) -> None:
    """The distance falls in each step at least as the mixing matrix's second singular value says."""
    inside = (t("replicate", size=copies),) if copies > 1 else ()
    peer = peers_of(graph, size=size)
    plan, steps = tiny.plan_of(peer, *inside, batch=2 * size * copies, microbatch=2), 6
    question = {"plan": json.loads(plan.to_json()), "config": SMALL, "steps": steps}
    answers = pool.run("gossip_jobs:apart_job", question, num_ranks=size * copies)
    assert all(answers[rank]["held"] == answers[rank - rank % copies]["held"] for rank in range(len(answers)))
    answers = answers[::copies]
    peers, rows = Peers(size), np.array([answer["held"][0] for answer in answers])
    first, before = peers.average(rows), peers.distance(rows)
    assert before > 1
    for step in range(steps):
        rows = peers.mixed(rows, graph, step)
        assert peers.weights.sum() == pytest.approx(size, rel=1e-12)
        found = np.array([answer["held"][step + 1] for answer in answers])
        np.testing.assert_allclose(found, rows, rtol=1e-9, atol=1e-12)
        for answer in answers:
            np.testing.assert_allclose(answer["averages"][step], first, rtol=1e-9, atol=1e-12)
            assert answer["distances"][step] == pytest.approx(peers.distance(rows), rel=1e-9, abs=1e-12)
        if graph not in ("push", "tree"):
            (_, second, *_) = np.linalg.svd(matrix(graph, size, step), compute_uv=False)
            assert answers[0]["distances"][step] <= second * before * (1 + 1e-12) + 1e-12
        before = answers[0]["distances"][step]
    assert before < {"ring": 0.02, "exponential": 1e-9, "pairs": 0.5, "push": 0.5, "tree": 0.5}[graph] * peers.distance(
        np.array([answer["held"][0] for answer in answers])
    )


@pytest.mark.parametrize(
    ("technique", "inside"),
    [
        (t("gossip", size=4, every=2), ()),
        (t("gossip", size=4, graph="exponential", every=2), ()),
        (t("gossip", size=4, graph="push", seed=SEED), ()),
        (t("gossip", size=2, graph="pairs", every=4), (tiny.SHARD3,)),
    ],
    ids=str,
)
def test_bytes_between_peers_are_as_priced(technique: Technique, inside: tuple[Technique, ...], pool: RankPool) -> None:
    plan = tiny.plan_of(technique, *inside)
    question = islands.asked("", *plan.techniques, steps=8, traffic=True)
    answers = pool.run("local_jobs:trained_job", question, num_ranks=4)
    profile = tiny.profile_of(MODEL)
    promised = Counter[tuple[str, int]]()
    for each in price(profile, plan, sequence=tiny.SEQUENCE, element_bytes=8).collectives:
        if each.axis == "gossip":
            promised[each.kind, int(each.bytes)] += each.repeat * 8
    assert {kind for kind, _ in promised} == {"send"}
    for answer in answers:
        moved = {(kind, size): count for kind, axis, size, count in answer["traffic"] if axis == "gossip"}
        assert moved == promised
    whole = sum(slot.repeat * slot.elements for slot in price(profile, tiny.plan_of(), sequence=16).slots)
    messages = (2 if technique.graph == "ring" else 1) * 8 / technique.every  # type: ignore[attr-defined]
    assert sum(size * count for (_, size), count in promised.items()) == messages * whole * 8 / (1 + len(inside))


def test_an_idle_peer_sends_nothing_and_the_price_is_the_mean(pool: RankPool) -> None:
    plan = tiny.plan_of(t("gossip", size=3, graph="pairs", seed=SEED), batch=6)
    question = {"plan": json.loads(plan.to_json()), "config": SMALL, "steps": 2}
    answers = pool.run("gossip_jobs:apart_job", question, num_ranks=3)
    work = price(tiny.profile_of(SMALL), plan, sequence=tiny.SEQUENCE, element_bytes=8)
    promised = sum(each.bytes * each.repeat for each in work.collectives if each.axis == "gossip")
    for step in range(2):
        sent = [sum(size * count for *_, size, count in answer["sent"][step]) for answer in answers]
        assert sorted(sent) == [0, max(sent), max(sent)]
        assert sum(sent) == pytest.approx(3 * promised, rel=1e-12)


def test_a_tree_is_priced_as_the_mean_over_peers_and_meetings(pool: RankPool) -> None:
    size, steps = 3, 2 * UP * DOWN
    plan = tiny.plan_of(peers_of("tree", size=size), batch=6)
    question = {"plan": json.loads(plan.to_json()), "config": SMALL, "steps": steps}
    answers = pool.run("gossip_jobs:apart_job", question, num_ranks=size)
    work = price(tiny.profile_of(SMALL), plan, sequence=tiny.SEQUENCE, element_bytes=8)
    promised = sum(each.bytes * each.repeat for each in work.collectives if each.axis == "gossip")
    sent = sum(size * count for answer in answers for step in answer["sent"] for *_, size, count in step)
    assert sent == pytest.approx(steps * size * promised, rel=1e-12)


def test_the_period_is_between_its_limits_and_stays_near_the_target() -> None:
    settings: Any = t("gossip", size=2, every=2, drift=0.1, longest=4)
    found, period = [], 2
    for drift in (0.2, 0.0, 0.069, 0.06, 0.071, 0.129, 0.131, 0.1, 9.0, 9.0, 0.0):
        found.append(period := adapted(period, drift, settings))
    assert found == [2, 3, 4, 4, 4, 4, 3, 3, 2, 2, 3]


@pytest.mark.parametrize(
    ("graph", "inside", "every", "target"),
    [
        ("ring", (), 1, 0.05),
        pytest.param("pairs", (tiny.SEQUENCED,), 2, 0.12, marks=pytest.mark.slow),
        ("tree", (), 1, 1e9),
    ],
    ids=["ring", "pairs of meshes", "always near"],
)
def test_the_period_follows_the_drift(
    graph: str, inside: tuple[Technique, ...], every: int, target: float, pool: RankPool, tmp_path: Path
) -> None:
    """The same losses, periods and drifts as a plain loop's, on all ranks; and again from the middle."""
    size, steps, longest = 4, 14, every + 2
    technique = peers_of(graph, size=size, every=every, drift=target, longest=longest)
    question = islands.asked(tmp_path, technique, *inside, steps=steps, save_at=5, traffic=True)
    num_ranks = tiny.plan_of(technique, *inside).num_ranks
    answers = pool.run("local_jobs:trained_job", question, num_ranks=num_ranks)
    oracle, peers = islands.Oracle(size, islands.ADAMW), Peers(size)
    period, at, meeting, periods = every, every, 0, []
    for step in range(steps):
        loss = oracle.step(step)
        wanted: dict[str, Any] = {}
        if step + 1 == at:
            shares = matrix(graph, size, meeting)
            given = torch.stack(
                [torch.cat([v.detach().flatten() for v in m.parameters.values()]) for m in oracle.models]
            )
            takers, givers = np.nonzero(shares - np.diag(np.diag(shares)))
            rows = given.numpy().copy()
            drift = float(np.sqrt(((rows[givers] - rows[takers]) ** 2).sum() / (rows[takers] ** 2).sum()))
            rows = peers.mixed(rows, graph, meeting)
            with torch.no_grad():
                for row, model in zip(torch.from_numpy(rows), oracle.models, strict=True):
                    for part, value in zip(
                        row.split([v.numel() for v in model.parameters.values()]),
                        model.parameters.values(),
                        strict=True,
                    ):
                        value.copy_(part.view_as(value))
            if drift < 0.7 * target:
                period = min(period + 1, longest)
            elif drift > 1.3 * target:
                period = max(period - 1, every)
            at, meeting = at + period, meeting + 1
            wanted = {"meeting_drift": pytest.approx(drift, rel=1e-9), "meeting_period": period}
            periods.append(period)
        for answer in answers:
            assert answer["losses"][step] == pytest.approx(loss, rel=1e-9)
            assert {key: value for each in answer["figures"][step] for key, value in each.items()} == wanted
    if target > 1:
        assert periods[:3] == [every + 1, longest, longest]
    else:
        assert {after - before for before, after in pairwise([every, *periods])} == {0, 1}, periods
    rest: dict[str, Any] = {"first": 5, "steps": steps - 5, "resume": str(tmp_path), "traffic": True}
    again = pool.run("local_jobs:trained_job", islands.asked("", technique, *inside, **rest), num_ranks=num_ranks)
    for before, after in zip(answers, again, strict=True):
        assert after["held"] == before["held"]
        assert after["figures"] == before["figures"][5:]


def test_messages_between_peers_take_time_in_a_forecast() -> None:
    seconds = {}
    for graph, size in (("ring", 8), ("pairs", 8), ("pairs", 4)):
        plan, machine = tiny.plan_of(t("gossip", size=size, graph=graph)), cluster("8xh100")
        work = price(tiny.profile_of(MODEL), plan, sequence=tiny.SEQUENCE)
        road = routes(machine, plan.mesh)
        charges = stage_cost(work, machine, road).charges
        (spent,) = (spent for charge, spent in charges.items() if charge.axis == "gossip")
        agreed = road["gossip"].seconds("all_reduce", AGREED_BYTES)  # by all peers, in each step
        seconds[graph, size] = spent - agreed
        sends = [each for each in work.collectives if each.axis == "gossip"]
        wanted = sum(float(each.repeat) * float(road["gossip"].seconds("send", each.bytes)) for each in sends)
        assert agreed > 0
        assert seconds[graph, size] == pytest.approx(wanted, rel=1e-9)
    assert seconds["ring", 8] == pytest.approx(2 * seconds["pairs", 8])
    assert seconds["pairs", 4] == pytest.approx(seconds["pairs", 8]), "a meeting costs the same for any number of peers"


def test_a_run_goes_on_bit_for_bit_and_new_peers_begin_at_the_average(pool: RankPool, tmp_path: Path) -> None:
    """A checkpoint between two meetings."""
    settings, at = {"graph": "push", "every": 2, "seed": SEED}, 5
    few, many = t("gossip", size=2, **settings), t("gossip", size=4, **settings)
    whole = pool.run("local_jobs:trained_job", islands.asked(tmp_path, many, save_at=at, last=7), num_ranks=4)
    rest: dict[str, Any] = {"first": at, "steps": 2, "resume": str(tmp_path), "last": 7}
    again = pool.run("local_jobs:trained_job", islands.asked(tmp_path / "again", many, **rest), num_ranks=4)
    for before, after in zip(whole, again, strict=True):
        assert after["held"] == before["held"]
        assert after["evaluated"] == before["evaluated"][at:]
    assert islands.close(islands.shared_model(tmp_path / "again"), islands.shared_model(tmp_path))
    question = islands.asked(tmp_path / "few", few, steps=at, traffic=True)  # nothing is evaluated before it is saved
    own = [answer["held"] for answer in pool.run("local_jobs:trained_job", question, num_ranks=2)]
    found = islands.shared_model(tmp_path / "few", at)
    for name, value in found.items():  # sum-weights of two are 1
        np.testing.assert_allclose(
            value.flatten(), np.mean([held[name] for held in own], axis=0), rtol=1e-9, atol=1e-12
        )
    rest |= {"resume": str(tmp_path / "few"), "steps": 0}
    answers = pool.run("local_jobs:trained_job", islands.asked("", many, **rest), num_ranks=4)
    is_average = [all(each["held"][name] == found[name].flatten().tolist() for name in found) for each in answers]
    assert is_average == [False, False, True, True]
    alone = pool.run("local_jobs:trained_job", islands.asked("", **rest), num_ranks=1)[0]["held"]
    assert all(alone[name] == found[name].flatten().tolist() for name in found)


@pytest.mark.slow
@pytest.mark.parametrize(
    "inside",
    [(tiny.REPLICATE, tiny.SHARD3), (tiny.SHARD1, tiny.SEQUENCED, tiny.PIPELINE), (tiny.RING,)],
    ids=["hybrid shards", "three axes", "ring"],
)
def test_a_peer_may_be_any_mesh(inside: tuple[Technique, ...], pool: RankPool, tmp_path: Path) -> None:
    peers = t("gossip", size=2, graph="push", every=2, seed=SEED)
    held = []
    for folder, techniques in (("alone", ()), ("meshes", inside)):
        question = islands.asked(tmp_path / folder, peers, *techniques, traffic=True)
        question["plan"]["microbatch"] = 1
        num_ranks = tiny.plan_of(peers, *techniques).num_ranks
        answers = pool.run("local_jobs:trained_job", question, num_ranks=num_ranks)
        assert all(answer["norms"] == pytest.approx(answers[0]["norms"], rel=1e-9) for answer in answers)
        held.append(islands.shared_model(tmp_path / folder))
    assert islands.close(*held)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"every": 0}, "every is 0"),
        ({"every": 1_000_001}, "every is 1000001"),
        ({"graph": "exponential", "size": 6}, "an exponential graph of 6 peers"),
        ({"graph": "tree", "up": 0}, "up is 0, down 1"),
        ({"down": 2}, "up and down are periods of a tree, and the graph is ring"),
        ({"drift": -0.1}, "drift is -0.1"),
        ({"drift": float("nan")}, "drift is nan"),
        ({"drift": 0.1, "every": 9, "longest": 8}, "longest is 8, and every 9"),
    ],
)
def test_settings_without_sense_are_refused(settings: dict[str, Any], words: str) -> None:
    plan = tiny.plan_of(t("gossip", **{"size": 2} | settings), batch=12)
    (problem,) = plan.check(tiny.profile_of(MODEL))
    assert words in str(problem)
    assert problem.where == "gossip"
    assert problem.fix


@pytest.mark.parametrize(
    ("other", "words"),
    [
        (t("pipeline", size=2, schedule="async"), "parameters of two versions"),
        (tiny.ON_HOST, "parameters in host memory"),
        (tiny.KEEP_ALL, "codes sums"),
        (tiny.ISLANDS, "has islands, too"),
    ],
)
def test_what_peers_cannot_have_is_refused(other: Technique, words: str) -> None:
    problems = tiny.plan_of(tiny.PEERS, other).check(tiny.profile_of(MODEL))
    assert any(words in str(each) and each.where == "gossip" for each in problems)


def test_optimizers_and_periods_that_peers_cannot_have_are_refused() -> None:
    assert "looks at whole parameters" in str(tiny.PEERS.refused_optimizer(OptimizerConfig(name="muon"))[0])
    assert not tiny.PEERS.refused_optimizer(OptimizerConfig(name="lion"))
    (warning,) = t("gossip", size=2, every=9).warnings_for(8)
    assert "peers never meet" in warning
    assert not t("gossip", size=2, every=8).warnings_for(8)
