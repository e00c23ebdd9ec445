"""All-reduces made of sends: right on real processes, with as many messages as theory says, at the seconds of theory.

Tests of `core/all_reduce.py`, `ops/collectives.py`, `simulator/stage_seconds.py`.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from meshwright.core.all_reduce import ALGORITHMS, Algorithm, AllReduce, Hop, rounds
from meshwright.launch.rank_pool import RankPool
from meshwright.machine.named_clusters import cluster as named_cluster
from meshwright.planner.bounds import best_roads
from meshwright.simulator.stage_seconds import routes

COUNTED = 840
"""Elements: a multiple of any number of pieces here."""
CASES = [("float64", 0), ("float64", 1), ("float64", 1003), ("float32", 1003), ("bfloat16", 7)]
NEAR, FAR = Hop(1e-6, 1e-10), Hop(1e-5, 1e-9)


def chosen(ranks: int) -> list[tuple[Algorithm, int]]:
    flat: list[tuple[Algorithm, int]] = [(name, 0) for name in ALGORITHMS if name != "hierarchical"]
    return [*flat, *(("hierarchical", node) for node in sorted({1, 2, 3, ranks}) if node <= ranks)]


def theory(algorithm: Algorithm, node_size: int, ranks: int, rank: int) -> list[int]:
    """Elements of each message of a rank, counted without rounds."""
    power = 2 ** int(math.log2(ranks))
    log = int(math.log2(power))

    def in_tree(place: int, size: int) -> int:
        """Messages of a place in a binomial tree: to its parent, and to each child."""
        children = sum(1 for k in range(10) if place % 2 ** (k + 1) == 0 and place + 2**k < size)
        return children + (place > 0)

    if algorithm == "ring":
        return [COUNTED // ranks] * (2 * (ranks - 1))
    if algorithm == "tree":
        return [COUNTED] * in_tree(rank, ranks)
    if algorithm == "hierarchical":
        first, nodes = rank // node_size * node_size, -(-ranks // node_size)
        whole = [COUNTED] * in_tree(rank - first, min(node_size, ranks - first))
        return sorted(whole + [COUNTED // nodes] * (2 * (nodes - 1) * (rank == first)))
    if rank >= power:
        return [COUNTED]
    whole = [COUNTED] * (rank + power < ranks)
    halves = [COUNTED // 2**k for k in range(1, log + 1)]
    return sorted(whole + (2 * halves if algorithm == "scatter_gather" else [COUNTED] * log))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_every_algorithm_gives_the_same_sum_on_all_ranks(ranks: int, pool: RankPool) -> None:
    asked = {"algorithms": chosen(ranks), "cases": CASES, "counted": COUNTED}
    answers = pool.run("sum_jobs:sums_job", asked, ranks, timeout_seconds=120)
    for rank, answer in enumerate(answers):
        assert answer["wrong"] == []
        assert answer["compared"] == 2014 * len(chosen(ranks))
        for name, node_size in chosen(ranks):
            expected = [8 * count for count in theory(name, node_size, ranks, rank)]
            assert answer["sent"][f"{name} {node_size}"] == expected, (name, node_size, rank)
            algorithm = AllReduce(algorithm=name, node_size=node_size, element_bytes=8)
            assert sorted(algorithm.sent_bytes(ranks, rank, 8 * COUNTED)) == expected


def slowest_paths(algorithm: Algorithm, node_size: int, ranks: int, per_node: int, num_bytes: int) -> float:
    """Seconds of the rounds, each as long as its slowest message."""
    pieces, turns = rounds(algorithm, ranks, node_size)
    seconds = 0.0
    for turn in turns:
        hops = [(NEAR if t.source // per_node == t.target // per_node else FAR, t.end - t.first) for t in turn]
        seconds += max(hop.latency_seconds + hop.seconds_per_byte * num_bytes * n / pieces for hop, n in hops)
    return seconds


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_seconds_are_those_of_the_slowest_message_of_each_round(algorithm: Algorithm) -> None:
    compared = 0
    for ranks in range(2, 34):
        for per_node in (1, 2, 3, 4, 6, 8, 64):
            for node_size in {2, 3, 4, ranks} if algorithm == "hierarchical" else {0}:
                if node_size > ranks:
                    continue
                one = AllReduce(algorithm=algorithm, node_size=node_size)
                priced = float(one.seconds(ranks, per_node, NEAR, FAR, 1 << 20))
                expected = slowest_paths(algorithm, node_size, ranks, per_node, 1 << 20)
                is_aligned = per_node & (per_node - 1) == 0 and (node_size == 0 or per_node % node_size == 0)
                if is_aligned or per_node == 1 or ranks <= per_node:
                    assert priced == pytest.approx(expected, rel=1e-12), (ranks, per_node, node_size)
                    compared += 1
                else:
                    assert priced >= expected * (1 - 1e-12), (ranks, per_node, node_size)
    assert compared > 100


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_round_that_leaves_a_node_waits_for_messages_inside_it(algorithm: Algorithm) -> None:
    """Also where links between nodes are the faster ones; and no bound of the search is above."""
    slow = named_cluster("2x4xh100")
    fast = replace(slow, outer=replace(slow.outer, bytes_per_second=4e12, latency_seconds=1e-7))
    one = AllReduce(algorithm=algorithm, node_size=4)
    alone = float(routes(slow, {"dp": 4})["dp"].seconds("all_reduce", 1e8, one))
    for place in (slow, fast):
        for mesh in ({"dp": 8}, {"dp": 4, "tp": 2}, {"dp": 2, "tp": 4}):
            seconds = float(routes(place, mesh)["dp"].seconds("all_reduce", 1e8, one))
            assert seconds >= (alone if mesh["dp"] == 8 else 0)
            assert float(best_roads(place, mesh)["dp"].seconds("all_reduce", 1e8, one)) <= seconds * (1 + 1e-12)


def test_seconds_of_many_candidates_are_those_of_each() -> None:
    ranks, nodes = np.array([2, 3, 8, 16, 24]), np.array([4, 1, 8, 2, 3])
    for name in ALGORITHMS:
        one = AllReduce(algorithm=name, node_size=2)
        each = [float(one.seconds(int(n), int(m), NEAR, FAR, 1e6)) for n, m in zip(ranks, nodes, strict=True)]
        assert one.seconds(ranks, nodes, NEAR, FAR, 1e6) == pytest.approx(each, rel=1e-14)


def test_size_and_topology_decide_which_is_fastest() -> None:
    """Small sums by few rounds, large ones by few bytes; across nodes by few ranks that use the slow link."""
    road = routes(named_cluster("4x8xh100"), {"dp": 32})["dp"]

    def fastest(num_bytes: float) -> str:
        every = {name: AllReduce(algorithm=name, node_size=8) for name in ALGORITHMS}
        return min(every, key=lambda name: float(road.seconds("all_reduce", num_bytes, every[name])))

    assert fastest(1e3) == "doubling"
    assert fastest(1e9) == "scatter_gather"
    alone = routes(named_cluster("4x8xh100"), {"dp": 32, "tp": 1})["tp"]
    assert alone.seconds("all_reduce", 1e6, AllReduce(algorithm="ring")) == 0
