"""Peers that train parameters of their own and average with neighbours only.

    meeting t:  x_i <- sum over j of P_ij x_j          P_ij: share of peer j's parameters in peer i's, 0 but for few j

    ring:         i - 1, i, i + 1 with 1/3 each (two peers: 1/2)          (D-PSGD: Lian et al. 2017)
    exponential:  i, i - 2^(t mod log2 n) with 1/2 each                   (one-peer exponential graph: Ying et al. 2021)
    pairs:        a random perfect matching, 1/2 each; an odd peer is idle
    push:         each sends half to a random peer: (w x)_i <- sum of S_ij (w x)_j, w_i <- sum of S_ij w_j
                  (push-sum, as GoSGD has it: Blot et al. 2016)
    tree:         S of a binary tree: a child gives 1/4 to its parent in each `up`-th meeting, a parent 1/4 to each
                  child in each `down`-th (periods up and down as in EASGD's tree: Zhang et al. 2015)

The first three are doubly stochastic. The columns of S sum to 1, not its rows: sum-weights w make up for it, and sum to
n at all times. All ranks draw the same random numbers, so nobody has to send a weight or a choice. The mean over the
peers, of push and tree weighted by w, is what a meeting conserves; it is evaluated and written to checkpoints.

With a target for the drift, the root mean square of the distances between those who meet over that of their norms, the
period T of the meetings follows what each meeting finds before it mixes (as Jiang and Agrawal 2020 adapt that of
averages over all):

    T <- T + 1 where the drift is below 0.7 of the target, T - 1 above 1.3 of it, never below `every` or over `longest`
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from meshwright.core.box import Box
from meshwright.core.build import Build, Exchange, OptimizerState
from meshwright.ops.host_memory import flat_views
from meshwright.ops.local_averages import trained_layers

if TYPE_CHECKING:
    from meshwright.techniques.gossip import Gossip


def mixing_shares(
    graph: str, size: int, meeting: int, seed: int, up: int = 1, down: int = 1
) -> dict[tuple[int, int], float]:
    """(taker, giver) -> the share of what the giver has that the taker gets; what each gives sums to 1."""
    ways, drawn = {1, size - 1}, random.Random(f"{seed}.{meeting}")
    if graph == "ring":
        others = [(peer, (peer + way) % size) for peer in range(size) for way in sorted(ways)]
    elif graph == "exponential":
        way = 2 ** (meeting % (size.bit_length() - 1))
        others = [((peer + way) % size, peer) for peer in range(size)]
    elif graph == "pairs":
        order = drawn.sample(range(size), size)
        matched = list(zip(order[::2], order[1::2], strict=False))
        others = [*matched, *((second, first) for first, second in matched)]
    elif graph == "tree":
        edges = [((child - 1) // 2, child) for child in range(1, size)]
        others = edges * (meeting % up == 0) + [(child, parent) for parent, child in edges] * (meeting % down == 0)
    else:
        others = [((peer + drawn.randrange(1, size)) % size, peer) for peer in range(size)]
    share = 1 / 3 if graph == "ring" and len(ways) == 2 else 1 / 4 if graph == "tree" else 1 / 2
    shares = dict.fromkeys(others, share)
    left = [1.0] * size
    for _, giver in others:
        left[giver] -= share
    return shares | {(peer, peer): left[peer] for peer in range(size)}


def adapted(period: int, drift: float, settings: Gossip) -> int:
    """The period after a meeting that has found this drift."""
    change = (drift < 0.7 * settings.drift) - (drift > 1.3 * settings.drift)
    return min(max(period + change, settings.every), settings.longest)


@dataclass(frozen=True, eq=False)
class PeerLayer:
    """A layer's parameters as this peer trains them, and their averages over the peers as of the last time asked."""

    names: list[str]
    values: list[Tensor]
    copies: list[Tensor]
    """What the model computes with: the values, or copies of them in fewer bits."""
    averages: list[Tensor] = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "averages", [value.clone() for value in self.values])

    def flat(self) -> Tensor:
        return torch.cat([value.flatten() for value in self.values])

    def write(self, flat: Tensor) -> None:
        torch._foreach_copy_(self.values, list(flat_views(flat, self.values)))
        for copy, value in zip(self.copies, self.values, strict=True):
            if copy is not value:
                copy.copy_(value)


class NeighbourAverages(Exchange):
    def __init__(self, build: Build, settings: Gossip):
        self.build, self.settings = build, settings
        self.group, self.index = build.mesh.group(settings.axis), build.mesh.index(settings.axis)
        self.weights = torch.ones(settings.size, dtype=torch.float64)
        """Sum-weights of all peers; 1 but for `push` and `tree`."""
        self.clock = torch.tensor([settings.every, settings.every, 0], dtype=torch.float64)
        """Where the period adapts: it, the update after which peers meet next, and how often they have met."""
        self.figures: dict[str, float] = {}
        self.layers = [PeerLayer(*map(list, zip(*named, strict=True))) for named in trained_layers(build)]
        for layer in self.layers:
            build.evaluated.update(zip(layer.names, layer.averages, strict=True))
        if build.mesh.device.type == "cuda":  # NCCL wants all ranks of a group in its first call, and some may be idle
            dist.all_reduce(torch.zeros(1, device=build.mesh.device), group=self.group)

    def begin_step(self) -> None:
        self.figures = {}

    @torch.no_grad()
    def after_update(self, count: int) -> None:
        settings = self.settings
        if settings.drift:
            period, at, meeting = (int(each) for each in self.clock)
            is_time = count >= at
        else:
            meeting, since = divmod(count, settings.every)
            meeting, is_time = meeting - 1, since == 0
        if is_time:
            given = settings.graph, settings.size, meeting, settings.seed, settings.up, settings.down
            shares = mixing_shares(*given)
            drift = self.meet(shares)
            if settings.drift:
                period = adapted(period, drift, settings) if len(shares) > settings.size else period
                self.clock.copy_(torch.tensor([period, count + period, meeting + 1]))
                self.figures = {"meeting_drift": drift, "meeting_period": period}
        if self.build.is_last_step:
            self._average()

    def meet(self, shares: Mapping[tuple[int, int], float]) -> float:
        """Mix; where the period adapts, answers how far apart those who met were."""
        mine, before, after = self.index, self.weights.tolist(), [0.0] * self.settings.size
        for (taker, giver), share in shares.items():
            after[taker] += share * before[giver]
        if self.settings.has_weights:
            self.weights.copy_(torch.tensor(after))
        squares = torch.zeros(2, dtype=torch.float64, device=self.build.mesh.device)  # of differences, of own
        taken = {giver: share * before[giver] / after[mine] for (to, giver), share in shares.items() if to == mine}
        own = taken.pop(mine)
        takers = [taker for taker, giver in shares if giver == mine != taker]
        for layer in self.layers:
            flat = layer.flat()
            received = {giver: torch.empty_like(flat) for giver in taken}
            messages = [dist.P2POp(dist.isend, flat, group=self.group, group_peer=taker) for taker in takers]
            for giver, other in received.items():
                messages.append(dist.P2POp(dist.irecv, other, group=self.group, group_peer=giver))
            for work in dist.batch_isend_irecv(messages) if messages else ():
                work.wait()
            for other in received.values() if self.settings.drift else ():
                apart = torch._foreach_sub(layer.values, list(flat_views(other, layer.values)))
                for name, *pair in zip(layer.names, apart, layer.values, strict=True):
                    if self.build.owns(name):
                        squares += torch.stack([each.double().square().sum() for each in pair])
            mixed = flat.mul_(own)
            for giver, other in received.items():
                mixed.add_(other, alpha=taken[giver])
            layer.write(mixed)
        if not self.settings.drift:
            return 0.0
        total = squares.cpu()
        dist.all_reduce(total, group=self.build.mesh.control)
        return float(total[0] / total[1].clamp(min=1e-300)) ** 0.5

    def _average(self) -> None:
        """Bring the averages up to date; the root mean square of the peers' distances from them is a figure."""
        share = float(self.weights[self.index]) / self.settings.size
        square = torch.zeros((), dtype=torch.float64, device=self.build.mesh.device)
        for layer in self.layers:
            flat = layer.flat().mul_(share)
            dist.all_reduce(flat, group=self.group)
            torch._foreach_copy_(layer.averages, list(flat_views(flat, layer.averages)))
            for name, apart in zip(layer.names, torch._foreach_sub(layer.values, layer.averages), strict=True):
                if self.build.owns(name):
                    square += apart.double().square().sum()
        total = square.cpu()
        dist.all_reduce(total, group=self.build.mesh.control)
        self.figures["consensus_distance"] = float(total / self.settings.size) ** 0.5

    @torch.no_grad()
    def before_evaluation(self) -> None:
        self._average()
        self._swap()

    def after_evaluation(self) -> None:
        self._swap()

    @torch.no_grad()
    def before_saving(self) -> None:
        self._average()

    @torch.no_grad()
    def _swap(self) -> None:
        """The averages change places with this peer's parameters."""
        for layer in self.layers:
            own = layer.flat()
            layer.write(torch.cat([average.flatten() for average in layer.averages]))
            torch._foreach_copy_(layer.averages, list(flat_views(own, layer.averages)))

    def take_figures(self) -> Mapping[str, float]:
        figures, self.figures = self.figures, {}
        return figures

    def kept(self) -> Iterator[OptimizerState]:
        size, is_first_peer = self.settings.size, self.index == 0
        for layer in self.layers:
            for name, value in zip(layer.names, layer.values, strict=True):
                box, is_mine = self.build.boxes[name], self.build.owns(name)
                yield OptimizerState(f"gossip.peer@{self.index}", name, value, box, is_mine)
                # Beside every parameter: another plan may have any of them here.
                is_first = is_first_peer and is_mine and not (box.is_empty or any(box.offset))
                if self.settings.has_weights:
                    yield OptimizerState(f"gossip.weights{size}", name, self.weights, Box.whole((size,)), is_first)
                if self.settings.drift:
                    yield OptimizerState("gossip.clock", name, self.clock, Box.whole((3,)), is_first)
