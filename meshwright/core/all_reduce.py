"""All-reduces made of sends: which pieces of a tensor go from whom to whom in which round, and how long that takes.

    ring            2 (n-1) rounds, each of a piece of 1/n: sums go round once, then the results do
    tree            binomial: ceil(log2 n) rounds up to the first rank and as many down, each of the whole
    doubling        log2 n rounds in which pairs exchange the whole
    scatter_gather  recursive halving of the sums, recursive doubling of the results (Rabenseifner): 2 log2 n rounds
    hierarchical    a tree inside each node, a ring between the first ranks of nodes, the tree of each node down

Where n is not a power of two, `doubling` and `scatter_gather` add the ranks beyond one to the first ranks beforehand
and send them the results. A sum of two is the same either way round, and everything else is computed in one place, so
all ranks have the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

Algorithm = Literal["ring", "tree", "doubling", "scatter_gather", "hierarchical"]
ALGORITHMS: tuple[Algorithm, ...] = get_args(Algorithm)
OF_NODES: Algorithm = "hierarchical"
"""The one that must know how many ranks a node has."""
Num = Any
"""A number, or an array of them."""


class Transfer(NamedTuple):
    source: int
    target: int
    first: int
    """Of the pieces that are sent."""
    end: int
    adds: bool
    """The target adds them to its own; otherwise they take their place."""


Rounds = tuple[tuple[Transfer, ...], ...]
"""Transfers of a round do not depend on each other."""


class Hop(NamedTuple):
    """A message from a rank to another."""

    latency_seconds: Num
    seconds_per_byte: Num


def _ring(ranks: Sequence[int]) -> Iterator[list[Transfer]]:
    count = len(ranks)
    for shift in (0, 1):
        for step in range(count - 1):
            pieces = [(at + shift - step) % count for at in range(count)]
            yield [
                Transfer(rank, ranks[(at + 1) % count], pieces[at], pieces[at] + 1, shift == 0)
                for at, rank in enumerate(ranks)
            ]


def _down(rounds: Sequence[Sequence[Transfer]]) -> Iterator[list[Transfer]]:
    """The same ways back, with the results."""
    for each in reversed(rounds):
        yield [t._replace(source=t.target, target=t.source, adds=False) for t in each]


@cache
def rounds(algorithm: Algorithm, ranks: int, node_size: int) -> tuple[int, Rounds]:
    """How many pieces the tensor has, and what is sent."""
    power = 1 << ranks.bit_length() - 1
    distances = [1 << at for at in range(power.bit_length() - 1)]
    made: list[list[Transfer]] = []
    if algorithm == "ring":
        pieces, made = ranks, [*_ring(range(ranks))]
    elif algorithm in ("tree", "hierarchical"):
        node = ranks if algorithm == "tree" else node_size
        leaders = range(0, ranks, node)
        pieces = len(leaders)
        up = [
            [
                Transfer(first + i + distance, first + i, 0, pieces, True)
                for first in leaders
                for i in range(0, min(node, ranks - first) - distance, 2 * distance)
            ]
            for distance in (1 << at for at in range((node - 1).bit_length()))
        ]
        made = [*up, *_ring(leaders), *_down(up)]
    else:
        pieces = power if algorithm == "scatter_gather" else 1
        into = [[Transfer(power + i, i, 0, pieces, True) for i in range(ranks - power)]]
        if algorithm == "doubling":
            inner = [[Transfer(i, i ^ d, 0, 1, True) for i in range(power)] for d in distances]
        else:  # a rank's range at a distance is the aligned one of so many pieces in which its own lies
            inner = [
                [Transfer(i, i ^ d, (i ^ d) // d * d, (i ^ d) // d * d + d, True) for i in range(power)]
                for d in reversed(distances)
            ]
            inner += [[Transfer(i, i ^ d, i // d * d, i // d * d + d, False) for i in range(power)] for d in distances]
        made = [*into, *inner, *_down(into)]
    return pieces, tuple(tuple(each) for each in made if each)


@dataclass(frozen=True, kw_only=True)
class AllReduce:
    algorithm: Algorithm
    node_size: int = 0
    """Ranks in a row that `hierarchical` treats as a node."""
    element_bytes: int = 4
    """Pieces are of whole elements."""

    def sends(self, ranks: int, elements: int) -> tuple[tuple[tuple[Transfer, slice], ...], ...]:
        """Round by round, transfers with the elements of each; empty ones are left out."""
        pieces, made = rounds(self.algorithm, ranks, self.node_size)
        ends = [elements * at // pieces for at in range(pieces + 1)]
        return tuple(
            tuple((each, slice(ends[each.first], ends[each.end])) for each in turn if ends[each.first] < ends[each.end])
            for turn in made
        )

    def sent_bytes(self, ranks: int, rank: int, num_bytes: int) -> list[int]:
        """Of each message of a rank."""
        turns = self.sends(ranks, num_bytes // self.element_bytes)
        mine = (part for turn in turns for transfer, part in turn if transfer.source == rank)
        return [(part.stop - part.start) * self.element_bytes for part in mine]

    def seconds(self, ranks: Num, per_node: Num, near: Hop, far: Hop, num_bytes: Num) -> Num:
        """Latency and bytes of each round, at the rate of its slowest link; a node holds so many ranks in a row.

        A distance that leaves a node somewhere counts as if it did everywhere; so do all inside of what `hierarchical`
        takes for a node where that does not divide `per_node`.
        """
        is_near = ranks <= per_node
        up, down = np.ceil(np.log2(ranks)), np.floor(np.log2(ranks))
        power = 2.0**down
        aligned = np.log2(per_node & -per_node)  # distances, from 1 on, that do not leave a node

        def passed(inside: Any, turns: Num, share: Num) -> Num:
            """So many rounds, which pass on a share of the bytes in all."""
            by_near, by_far = (
                hop.latency_seconds * turns + hop.seconds_per_byte * share * num_bytes for hop in (near, far)
            )
            return np.where(inside, by_near, by_far)

        def whole(turns: Num) -> Num:
            """Rounds of the whole at distances 1, 2, 4 ..."""
            inner = np.where(is_near, turns, np.minimum(turns, aligned))
            return passed(True, inner, inner) + passed(is_near, turns - inner, turns - inner)

        folded = (ranks > power) * 2 * passed(is_near, 1, 1.0)
        if self.algorithm == "ring":
            return passed(is_near, 2 * (ranks - 1), 2 * (ranks - 1) / ranks)
        if self.algorithm == "tree":
            return 2 * whole(up)
        if self.algorithm == "doubling":
            return whole(down) + folded
        if self.algorithm == "scatter_gather":
            inner = np.where(is_near, down, np.minimum(down, aligned))
            halves = passed(True, inner, (2**inner - 1) / power)
            return 2 * (halves + passed(is_near, down - inner, (power - 2**inner) / power)) + folded
        node = np.minimum(self.node_size, ranks)
        leaders, turns = np.ceil(ranks / node), np.ceil(np.log2(node))
        inside = 2 * passed(is_near | (per_node % node == 0), turns, turns)
        return inside + passed(is_near, 2 * (leaders - 1), 2 * (leaders - 1) / leaders)
