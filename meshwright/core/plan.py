"""A plan is a value: techniques with their settings, the batch, and the order of the axes. Nothing else.

It knows nothing of torch, ranks, files or the environment. Everything that decides how training runs is in it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, fields, replace
from functools import cached_property, reduce
from typing import ClassVar

from meshwright.core.cluster import Cluster
from meshwright.core.codec import Artefact, encode, fingerprint
from meshwright.core.errors import Problem, Problems, raise_problems
from meshwright.core.placement import group_problems, placed
from meshwright.core.profile import Profile
from meshwright.core.technique import PHASES, StepsFactor, Technique, format_layers
from meshwright.core.units import counted

MOST_SAMPLES = 2**31
"""Per step. The largest published batches have millions of samples."""


@dataclass(frozen=True, kw_only=True)
class Plan(Artefact):
    """How a model is trained: techniques with their settings, and how the samples of a step are divided. It can be
    printed, compared, edited, saved as JSON and read again.
    """

    VERSION: ClassVar[int] = 2
    """2: layers are written "none", "all", "first 3" or "0-3,8"."""

    techniques: tuple[Technique, ...] = ()
    batch: int = 1
    """Samples per step over all ranks: the same whatever the plan."""
    microbatch: int = 1
    """Samples a rank runs at once."""
    axis_order: tuple[str, ...] = ()
    """Outermost first; by default the axes with most traffic are innermost."""
    groups: tuple[int, ...] = ()
    """Of a mixed cluster: the groups whose devices the ranks take, in this order; empty: all, as they come."""
    version: int = 2

    def __post_init__(self) -> None:
        object.__setattr__(self, "version", self.VERSION)  # read from an older file, it is written as of today
        names = [technique.name for technique in self.techniques]
        problems = [
            Problem(where="techniques", what=f"{name} is given {names.count(name)} times.")
            for name in sorted({n for n in names if names.count(n) > 1})
        ]
        # By name: for equality only. The order of work is the order of phases.
        object.__setattr__(self, "techniques", tuple(sorted(self.techniques, key=lambda t: t.name)))
        axes = {t.axis: t for t in self.techniques if t.axis}
        if self.axis_order and sorted(self.axis_order) != sorted(axes):
            what = f"names {', '.join(self.axis_order)}, the techniques own {', '.join(axes) or 'none'}."
            fix = "List each axis once, outermost first, or leave it out."
            problems.append(Problem(where="axis_order", what=what, fix=fix))
        for field, count in (("batch", self.batch), ("microbatch", self.microbatch)):
            if count < 1:
                problems.append(Problem(where=field, what=f"is {count}.", fix="Use at least 1."))
            elif count > MOST_SAMPLES:
                what = f"is {count}, more samples than a step can have."
                problems.append(Problem(where=field, what=what, fix=f"Use at most {MOST_SAMPLES}."))
        for technique in self.techniques:
            if (size := getattr(technique, "size", 1)) < 1:
                problems.append(technique.problem(f"size is {size}.", "An axis has at least one rank."))
        raise_problems(problems)
        if not self.axis_order:
            order = sorted(axes, key=lambda axis: (axes[axis].closeness, axis))
            object.__setattr__(self, "axis_order", tuple(order))

    @property
    def mesh(self) -> dict[str, int]:
        """Axis -> size, outermost first."""
        sizes = {t.axis: int(t.size) for t in self.techniques if t.axis}  # type: ignore[attr-defined]
        return {axis: sizes[axis] for axis in self.axis_order}

    @property
    def num_ranks(self) -> int:
        return math.prod(self.mesh.values())

    @property
    def sample_axes(self) -> tuple[str, ...]:
        """Axes whose ranks see different samples."""
        return tuple(axis for axis in self.axis_order if self._owner(axis).splits_samples)

    @property
    def loss_axes(self) -> tuple[str, ...]:
        """Axes whose ranks each have a part of the loss."""
        owners = map(self._owner, self.axis_order)
        return tuple(owner.axis for owner in owners if owner.splits_samples or owner.splits_sequence)

    @property
    def sequence_parts(self) -> int:
        """Ranks that share every sample out along its sequence."""
        return math.prod(size for axis, size in self.mesh.items() if self._owner(axis).splits_sequence)

    @property
    def replica_axes(self) -> tuple[str, ...]:
        """Axes over which every parameter's gradient is summed by whoever owns the reduction."""
        return tuple(axis for axis in self.sample_axes if not self._owner(axis).sums_late)

    @property
    def island_axes(self) -> tuple[str, ...]:
        """Axes along which ranks train parameters of their own."""
        return tuple(axis for axis in self.axis_order if self._owner(axis).keeps_islands)

    @property
    def num_replicas(self) -> int:
        return math.prod(self.mesh[axis] for axis in self.sample_axes)

    @property
    def shares(self) -> tuple[int, ...]:
        """Microbatches of each replica where they may differ, else empty."""
        return next((tuple(t.shares) for t in self.techniques if t.takes_shares), ())  # type: ignore[attr-defined]

    @property
    def num_microbatches(self) -> int:
        """Microbatches of a replica per step; the largest count where replicas differ."""
        return max(self.shares, default=0) or self.batch // (self.num_replicas * self.microbatch)

    def microbatches_of(self, part: int) -> int:
        """Microbatches per step of the part-th of the ranks that see different samples."""
        if not self.shares:
            return self.num_microbatches
        return self.shares[part * len(self.shares) // self.num_replicas]

    def with_shares(self, shares: tuple[int, ...]) -> Plan:
        """The same with other shares, and the batch they make; without any, with the batch there is."""
        techniques = tuple(replace(t, shares=shares) if t.takes_shares else t for t in self.techniques)  # type: ignore[call-arg]
        within = self.num_replicas // max(len(shares), 1)
        return replace(self, techniques=techniques, batch=sum(shares) * within * self.microbatch or self.batch)

    def blocks_of_stages(self, profile: Profile) -> tuple[int, ...]:
        """Blocks of each stage; one stage with all of them unless a technique cuts the model."""
        result = (technique.blocks_of_stages(profile.num_blocks) for technique in self.techniques)
        return next((blocks for blocks in result if blocks is not None), (profile.num_blocks,))

    def spans_of_stages(self, profile: Profile) -> tuple[tuple[tuple[int, int], ...], ...]:
        """The runs of blocks, (first, last + 1) each, of every stage."""
        for technique in self.techniques:
            if technique.blocks_of_stages(profile.num_blocks) is not None:
                size = int(technique.size)  # type: ignore[attr-defined]
                result = [technique.spans_of_stage(profile.num_blocks, stage) for stage in range(size)]
                return tuple(spans for spans in result if spans is not None)
        return (((0, profile.num_blocks),),)

    @property
    def splits_backward(self) -> bool:
        return any(technique.splits_backward for technique in self.techniques)

    @property
    def overlaps_steps(self) -> bool:
        return any(technique.overlaps_steps for technique in self.techniques)

    @cached_property
    def steps_factor(self) -> StepsFactor:
        """Of all techniques that are in effect, together."""
        mesh = self.mesh
        used = (each.steps_factor for each in self.techniques if mesh.get(each.axis, 2) > 1)
        return reduce(StepsFactor.with_other, used, StepsFactor())

    def _owner(self, axis: str) -> Technique:
        return next(t for t in self.techniques if t.axis == axis)

    def technique(self, name: str) -> Technique | None:
        return next((t for t in self.techniques if t.name == name), None)

    def in_phase_order(self) -> tuple[Technique, ...]:
        return tuple(sorted(self.techniques, key=lambda t: (PHASES.index(t.phase), t.name)))

    def check(self, profile: Profile, cluster: Cluster | None = None) -> Problems:
        """Everything that keeps this plan from running this model (on these machines)."""
        problems: list[Problem] = []
        if cluster is not None and (self.groups or cluster.others):
            problems += group_problems(self, cluster)
            cluster = cluster if problems else placed(self, cluster)
        share = self.num_replicas * self.microbatch
        if self.batch % share and not self.shares:
            samples, replicas = counted(self.batch, "sample"), counted(self.num_replicas, "replica")
            what = f"{samples} cannot be shared by {replicas} in microbatches of {self.microbatch}."
            problems.append(Problem(where="batch", what=what, fix=f"Use a multiple of {share}."))
        elif self.num_microbatches > 1 and "samples" in profile.uncut:
            what = f"{self.num_microbatches} microbatches a step: {profile.uncut['samples']}"
            fix = f"Use microbatch = {self.batch // self.num_replicas}."
            problems.append(Problem(where="microbatch", what=what, fix=fix))
        if cluster is not None and self.num_ranks > cluster.num_devices:
            mesh = " x ".join(f"{axis} {size}" for axis, size in self.mesh.items())
            what = f"{mesh} needs {counted(self.num_ranks, 'rank')}; {cluster.name} has {cluster.num_devices}."
            problems.append(Problem(where="mesh", what=what, fix="Use smaller axes, or more devices."))
        # Each group of a mixed cluster must do for everybody.
        places = [cluster.view(i) for i in range(len(cluster.groups))] if cluster and cluster.others else [cluster]
        for technique in self.in_phase_order():
            found = [problem for place in places for problem in technique.check(self, profile, place)]
            problems.extend(dict.fromkeys(found))
        return tuple(problems) or self._policy_problems(profile)

    def _policy_problems(self, profile: Profile) -> Problems:
        """Blocks that follow policies of several techniques."""
        found: dict[str, list[int]] = {}
        following = [each for each in self.techniques if each.policies and not each.shares_blocks]
        for spans in self.spans_of_stages(profile) if len(following) > 1 else ():
            for block in (block for span in spans for block in range(*span)):
                names = [t.name for t in following if t.policy_of(block, spans)]
                found.setdefault(" and ".join(names) if len(names) > 1 else "", []).append(block)
        fix = "Let each block follow one of them."
        return tuple(
            Problem(where="techniques", what=f"{names} name the same blocks, {format_layers(blocks)}.", fix=fix)
            for names, blocks in found.items()
            if names
        )

    def check_sequence(self, sequence: int) -> Problems:
        """What is wrong for samples of this length, for a plan that `check` has nothing against."""
        problems: list[Problem] = []
        for technique in self.in_phase_order():
            # Whoever splits the sequence is told of all of it, the others of the part they get.
            asked = sequence if technique.splits_sequence else sequence // self.sequence_parts
            problems.extend(technique.check_sequence(asked))
        return tuple(problems)

    @property
    def fingerprint(self) -> str:
        return fingerprint(encode(self))

    def diff(self, other: Plan) -> tuple[str, ...]:
        """What changes from this plan to the other, a line each."""
        lines: list[str] = []

        def compare(before: object, after: object, names: Iterable[str], prefix: str = "") -> None:
            pairs = ((name, getattr(before, name), getattr(after, name)) for name in names)
            lines.extend(f"{prefix}{name}: {old} -> {new}" for name, old, new in pairs if old != new)

        for name in sorted({t.name for t in (*self.techniques, *other.techniques)}):
            mine, theirs = self.technique(name), other.technique(name)
            if mine is None or theirs is None:
                lines.append(f"- {mine}" if theirs is None else f"+ {theirs}")
            else:
                compare(mine, theirs, (f.name for f in fields(mine)), f"{name}.")
        compare(self, other, ("batch", "microbatch", "axis_order", "groups"))
        return tuple(lines)

    def __str__(self) -> str:
        listed = " + ".join(str(t) for t in self.in_phase_order()) or "one device"
        words = f"{listed}, microbatch {self.microbatch} x {self.microbatch_words}"
        return words + (f", on groups {', '.join(map(str, self.groups))}" if self.groups else "")

    @property
    def microbatch_words(self) -> str:
        """`8`, or `3 to 8` where replicas run different numbers."""
        least, most = min(self.shares, default=self.num_microbatches), self.num_microbatches
        return str(most) if least == most else f"{least} to {most}"

    @property
    def batch_words(self) -> str:
        """`64 samples = 8 replicas x 4 microbatches of 2`."""
        microbatches = "microbatch" if self.microbatch_words == "1" else "microbatches"
        replicas = counted(self.num_replicas, "replica")
        samples = counted(self.batch, "sample")
        return f"{samples} = {replicas} x {self.microbatch_words} {microbatches} of {self.microbatch}"
