"""Random small questions whose every plan can be listed: from the options alone, one plan at a time, by no code of the
search's own."""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from meshwright.core.cluster import Cluster
from meshwright.core.errors import MeshwrightError
from meshwright.core.plan import Plan
from meshwright.core.profile import Profile
from meshwright.core.technique import (
    Axis,
    Choice,
    PerLayer,
    Technique,
    format_layers,
    is_within,
    technique_named,
    technique_names,
)
from meshwright.machine.named_clusters import cluster
from meshwright.models.cost_decoder import block_layer, decoder_profile, plain_mlp
from meshwright.models.presets import PRESETS, DecoderConfig

MOST_PLANS = 200
MOST_DRAWS = 500

Ways = list[tuple[Technique, ...]]


@dataclass(frozen=True, kw_only=True)
class Space:
    """A question, and the techniques its plans may use."""

    profile: Profile
    machine: Cluster
    batch: int
    sequence: int
    names: tuple[str, ...]
    schedules: tuple[str, ...] = ()
    """Values of `schedule` that are left; empty: all."""
    microbatch: int | None = None
    rescues: bool = False
    """With the values that are for when nothing else fits."""
    allow: str = "rounded"

    @property
    def question(self) -> dict[str, Any]:
        """As `search` takes it."""
        bans = [name for name in technique_names() if name not in self.names]
        for name in self.names if self.schedules else ():
            for option in self._options(name):
                if isinstance(option, Choice) and option.field == "schedule":
                    bans += [f"{name}.schedule={v}" for v in option.values if v not in self.schedules]
        given = {name: getattr(self, name) for name in ("batch", "sequence", "microbatch", "allow")}
        return {**given, "ban": bans}

    def with_memory(self, num_bytes: int) -> Space:
        """The same on devices with so much."""
        device = replace(self.machine.device, memory_bytes=num_bytes)
        return replace(self, machine=replace(self.machine, device=device))

    def _options(self, name: str) -> tuple[Any, ...]:
        return technique_named(name).options(replace(self.profile, max_sequence=self.sequence), self.machine)

    def plans(self) -> Iterator[Plan]:
        """All there are: techniques and settings, splits, policies of every stage's blocks, orders, microbatches."""
        for techniques in self._settings():
            for cut in self._splits(techniques):
                for chosen in self._policies(cut):
                    yield from self._sized(chosen)

    def _settings(self) -> Iterator[tuple[Technique, ...]]:
        """Axes multiply to all devices; policies are not set yet."""
        each = []
        for name in self.names:
            options = self._options(name)
            if options and not any(isinstance(option, PerLayer) for option in options):
                each.append([None, *self._ways(technique_named(name), options)])
        for chosen in itertools.product(*each):
            techniques = tuple(technique for technique in chosen if technique is not None)
            plan = Plan(techniques=techniques, batch=self.batch)
            if plan.num_ranks == self.machine.num_devices:
                yield techniques

    def _ways(self, kind: type[Technique], options: Sequence[Any]) -> Iterator[Technique]:
        fields = []
        for option in options:
            if isinstance(option, Axis):
                fields.append([(option.field, size) for size in option.sizes])
            elif isinstance(option, Choice):
                values = (*option.values, *option.rescues) if self.rescues else option.values
                values = values or option.rescues  # a rescue that is asked for
                fields.append([(option.field, value) for value in values])
        for settings in itertools.product(*fields):
            technique = kind(**dict(settings))
            if self.schedules and getattr(technique, "schedule", self.schedules[0]) not in self.schedules:
                continue
            if not is_within(technique.exactness, self.allow):
                continue
            many = Plan(techniques=(technique,), batch=1 << 20)
            whole = replace(many, microbatch=many.batch // many.num_replicas)  # some take one microbatch only
            # What moves to another tier may need another technique that does.
            if kind.uses_tiers or not all(technique.check(plan, self.profile, None) for plan in (many, whole)):
                yield technique

    def _splits(self, techniques: tuple[Technique, ...]) -> Ways:
        blocks = self.profile.num_blocks
        for at, technique in enumerate(techniques):
            cut = technique.blocks_of_stages(blocks)
            if cut is None or len(technique.spans_of_stage(blocks, 0) or ()) > 1:
                continue  # chunks are dealt out evenly
            return [
                (*techniques[:at], replace(technique, stages=_between((0, *ends, blocks))), *techniques[at + 1 :])  # type: ignore[call-arg]
                for ends in itertools.combinations(range(1, blocks), len(cut) - 1)
            ]
        return [techniques]

    def _policies(self, techniques: tuple[Technique, ...]) -> Iterator[tuple[Technique, ...]]:
        """Of every stage, each number of each kind of block; the first of them follow the first policy."""
        kinds = [technique_named(name) for name in sorted(self.names) if technique_named(name).policies]
        options = {kind: self._options(kind.name) for kind in kinds}
        policies = [(kind, f) for kind in kinds for o in options[kind] if isinstance(o, PerLayer) for f in o.fields]
        spans = Plan(techniques=techniques, batch=self.batch).spans_of_stages(self.profile)
        stages = [list(self._followed(mine, len(policies))) for mine in spans]
        for ways in itertools.product(*stages):
            blocks = [sorted(itertools.chain(*each)) for each in zip(*ways, strict=True)]
            each_kind: list[list[Technique | None]] = []
            for kind in kinds:
                named = {f: mine for (owner, f), mine in zip(policies, blocks, strict=True) if owner is kind}
                written = {f: format_layers(mine) for f, mine in named.items()}
                made = [replace(way, **written) for way in self._ways(kind, options[kind])]
                used: list[Technique | None] = [way for way in made if any(named.values()) or not way.needs_blocks]
                each_kind.append(used if any(named.values()) else [None, *used])
            for chosen in itertools.product(*each_kind):
                yield (*techniques, *(technique for technique in chosen if technique is not None))

    def _followed(self, spans: Sequence[tuple[int, int]], policies: int) -> Iterator[tuple[list[int], ...]]:
        """The blocks of a stage that follow each policy."""
        own = [block for first, last in spans for block in range(first, last)]
        kinds = [[b for b in own if self.profile.blocks_within(b, 1)[kind]] for kind in range(self._num_kinds)]
        each = [
            [way for way in itertools.product(range(len(mine) + 1), repeat=policies) if sum(way) <= len(mine)]
            for mine in kinds
        ]
        for counts in itertools.product(*each):
            found: tuple[list[int], ...] = tuple([] for _ in range(policies))
            for mine, way in zip(kinds, counts, strict=True):
                for policy, count in enumerate(way):
                    found[policy].extend(mine[sum(way[:policy]) : sum(way[:policy]) + count])
            yield found

    @property
    def _num_kinds(self) -> int:
        return len(self.profile.block_layers)

    def _sized(self, techniques: tuple[Technique, ...]) -> Iterator[Plan]:
        plan = Plan(techniques=techniques, batch=self.batch)
        orders = list(itertools.permutations(plan.axis_order)) if self.machine.num_nodes > 1 else [()]
        for order in orders:
            for microbatch in (self.microbatch,) if self.microbatch else range(1, self.batch + 1):
                if self.batch % (plan.num_replicas * microbatch):
                    continue
                found = replace(plan, microbatch=microbatch, axis_order=order)
                try:
                    is_wrong = found.check(self.profile, self.machine) or found.check_sequence(self.sequence)
                except MeshwrightError:
                    is_wrong = True
                if not is_wrong:
                    yield found


def bare(plan: Plan) -> Plan:
    """Without what is solved for: the split, the blocks that follow policies, the order of the axes."""
    kept = []
    for technique in plan.techniques:
        if technique.blocks_of_stages(1 << 20) is not None:
            technique = replace(technique, stages=())  # type: ignore[call-arg]
        if not technique.policies:
            kept.append(technique)
    return Plan(techniques=tuple(kept), batch=plan.batch, microbatch=plan.microbatch)


def _between(ends: Sequence[int]) -> tuple[int, ...]:
    return tuple(after - before for before, after in itertools.pairwise(ends))


def machine(draw: random.Random, shape: str) -> Cluster:
    """Rates drawn so that compute, links and launches all may matter to a tiny model. As a CPU: what is allocated is
    all there is."""
    found = cluster(shape)
    slower = 10 ** draw.uniform(-4, 0)
    device = replace(
        found.device,
        kind="cpu",
        reserved_bytes=0,
        launch_seconds=10 ** draw.uniform(-9, -6),
        kernel_seconds=0.0,
        memory_half_bytes=0.0,
        memory_bytes=1 << 50,
        flops_per_second={dtype: rate * slower for dtype, rate in found.device.flops_per_second.items()},
        memory_bytes_per_second=found.device.memory_bytes_per_second * slower,
    )
    rate = 10 ** draw.uniform(8, 11) * slower
    inner = replace(found.inner, bytes_per_second=rate, latency_seconds=10 ** draw.uniform(-8, -5))
    outer = replace(found.outer, bytes_per_second=rate / draw.choice([1, 4, 20]), latency_seconds=1e-5)
    return replace(found, device=device, inner=inner, outer=outer)


def model(draw: random.Random, blocks: int, num_kinds: int) -> Profile:
    """Blocks of one kind or two, with weights tied or not."""
    size = draw.choice([32, 64, 128])
    config = replace(
        PRESETS["byte-tiny"],
        num_layers=blocks,
        hidden_size=size,
        ffn_size=size * draw.choice([1, 2, 4]),
        num_kv_heads=4,
        vocab_size=draw.choice([64, 256, 1024]),
        tied=draw.random() < 0.25,
    )
    assert isinstance(config, DecoderConfig)
    found = decoder_profile(config, "tiny")
    if config.num_layers == 1 or num_kinds == 1:
        return found
    # The first blocks are of another kind: they keep and compute more, or less.
    first = draw.randint(1, config.num_layers - 1)
    other = replace(config, ffn_size=config.ffn_size * draw.choice([2, 4]) // draw.choice([1, 8]))
    kinds = (
        block_layer(other, "other_blocks", first, plain_mlp(other)),
        block_layer(config, "blocks", config.num_layers - first, plain_mlp(config)),
    )
    layers = tuple(kind for layer in found.layers for kind in (kinds if layer.is_block else (layer,)))
    return replace(found, layers=layers)


SHAPES = ("laptop", "2xh100", "2xlaptop", "3xh100", "4xh100", "2x2xh100", "2x2xh100")
ONE_CHUNK = ("1f1b", "zero_bubble_h1", "gpipe", "zero_bubble_h2")
IN_CHUNKS = ("interleaved", "zbv", "looped_bfs", "dualpipe_v")
AXES = ("replicate", "shard", "tensor", "pipeline")
SCHEDULES = (*ONE_CHUNK, *IN_CHUNKS)


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What random questions are drawn from."""

    shapes: tuple[str, ...] = SHAPES
    names: tuple[str, ...] = ()
    """Techniques that all of them have; others are drawn."""
    axes: tuple[str, ...] = AXES
    num_axes: tuple[int, ...] = (1, 2, 2)
    schedules: tuple[str, ...] = SCHEDULES
    blocks: tuple[int, ...] = (1, 2, 3, 4)
    kinds: tuple[int, ...] = (1, 1, 2)
    """Of block, at most."""
    rescues: bool = False
    fewest: int = 4
    most: int = MOST_PLANS

    def space(self, seed: int) -> tuple[Space, list[Plan]]:
        """With its plans: of what makes too many or too few, less or more is drawn."""
        draw = random.Random(seed)
        for attempt in range(MOST_DRAWS):
            space = self._drawn(draw, attempt)
            plans = list(itertools.islice(space.plans(), self.most + 1))
            if self.fewest <= len(plans) <= self.most:
                return space, plans
        raise AssertionError(f"no space of {self.fewest} to {self.most} plans in {MOST_DRAWS} draws: {self}")

    def _drawn(self, draw: random.Random, attempt: int) -> Space:
        place = machine(draw, draw.choice(self.shapes))
        names = [*self.names]
        axes = [axis for axis in self.axes if axis not in names]
        if place.num_devices > 1:
            names += draw.sample(axes, min(len(axes), draw.choice(self.num_axes)))
        for name, chance in (("recompute", 0.6), ("chunked_loss", 0.2)):
            names += [name] if name not in names and draw.random() < chance else []
        schedules = draw.sample(self.schedules, min(len(self.schedules), draw.choice([1, 2, 4])))
        return Space(
            profile=model(draw, draw.choice(self.blocks), draw.choice(self.kinds)),
            machine=place,
            batch=draw.choice([2, 3, 4, 6, 8]),
            sequence=draw.choice([16, 32]),
            names=tuple(names),
            schedules=tuple(schedules) if attempt % 2 or self.schedules != SCHEDULES else (),
            microbatch=draw.choice([1, 2]) if attempt % 3 else None,
            rescues=self.rescues,
        )
